"""The pipelines that Primus adds to Megatron-LM: which schedule its options mean, what each needs.

Two runtimes: `patch_primus_pipeline` with `pp_algorithm` (primus/core/pipeline_parallel/scheduler),
and the older `patch_zero_bubble` (primus/backends/megatron/core/pipeline_parallel/zerobubble).
"""

from collections.abc import Mapping
from typing import Any

from plait.dialects.launch import AT_START, FIRST_STEP, changed, note, refused
from plait.dialects.settings import Settings
from plait.spec.findings import Finding, closest
from plait.spec.job import Job

#: `pp_algorithm` -> plait's schedule (schedule_table_factory.py).
ALGORITHMS = {
    "1f1b": "1f1b",
    "1f1b-interleaved": "interleaved-1f1b",
    "zero-bubble": "zb-h1",
    "zero-bubble-heuristic": "zb-auto",
    "zbv-formatted": "zbv",
    "v-half": "v-half",
    "v-min": "v-min",
}
#: `zero_bubble_v_schedule_mem_setup` -> plait's schedule.
SETUPS = {"half": "v-half", "min": "v-min", "zb": "zbv"}

#: Chunks of a rank that an algorithm takes; others take at least 2 (primuspipe, __init__).
CHUNKS = {"1f1b": 1, "zero-bubble": 1, "zero-bubble-heuristic": 1,
          "zbv-formatted": 2, "v-half": 2, "v-min": 2}  # fmt: skip

#: What splits the backward pass in two (projection/config_validation.py).
SPLIT = frozenset(("zb-h1", "zb-h2", "zb-auto", "zbv", "v-half", "v-min"))

#: What both runtimes are documented to need and do not check (zerobubble/README.md).
NEEDED = {
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "no_persist_layer_norm": True,
    "create_attention_mask_in_dataloader": False,
    "gradient_accumulation_fusion": True,
}

#: Options that decide a schedule: name -> (kind, default, what it is).
_OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "patch_primus_pipeline": (bool, False, "layout.schedule: by pp_algorithm"),
    "pp_algorithm": (str, "1f1b-interleaved", "layout.schedule"),
    "patch_zero_bubble": (bool, False, "layout.schedule: the older runtime"),
    "enable_zero_bubble": (bool, True, "layout.schedule"),
    "zero_bubble_v_schedule": (bool, False, "layout.schedule: a V"),
    "zero_bubble_v_schedule_mem_setup": (str, "half", "layout.schedule: which V"),
    "zero_bubble_max_pending_backward": (None, "auto", "activations that zero bubbles may hold"),
    "enable_1f1b_v": (bool, False, "layout.schedule: 1F1B over a V"),
    "interleave_group_size": (int, 0, "layout.schedule: micro batches of a group"),
    "num_seq_splits": (int, 1, "parts of a sequence that travel by themselves"),
    "offload": (bool, False, "activations in host memory"),
    "pp_max_mem": (None, None, "activations that the heuristic may hold"),
    "overlap_grad_reduce": (bool, False, "gradients sent during the backward pass"),
    "overlap_param_gather": (bool, False, "parameters gathered during the forward pass"),
    "no_persist_layer_norm": (bool, False, "which kernel norms run on"),
    "create_attention_mask_in_dataloader": (bool, True, "where masks are made"),
    "gradient_accumulation_fusion": (bool, True, "weight gradients added up by their kernel"),
    "decoder_pipeline_manual_split_list": (None, None, "nothing: it is checked, and not used"),
}


def options(settings: Settings) -> dict[str, Any]:
    """What a launch says of its pipeline, by Primus' names."""
    found = {}
    for name, (kind, default, means) in _OPTIONS.items():
        setting = settings.said.get(name)
        if setting is not None and setting.value is None and not setting.open:
            settings.taken[name] = (None, "the default")
            found[name] = default
        else:
            found[name] = settings.take(name, kind, default, means)
    return found


def schedule(facts: Mapping[str, Any], pp: int, vpp: int) -> tuple[str | None, str]:
    """plait's schedule of a launch, and what it is called in Primus; (None, "") where its
    options leave the pipeline to Megatron-LM.

    Args:
        facts: of `options`.
    """
    if pp <= 1:
        return None, ""
    if facts.get("patch_zero_bubble"):
        return _zero_bubble(facts, pp, vpp)
    if not facts.get("patch_primus_pipeline"):
        return None, ""
    algorithm = str(facts.get("pp_algorithm"))
    return ALGORITHMS.get(algorithm), algorithm


def _zero_bubble(facts: Mapping[str, Any], pp: int, vpp: int) -> tuple[str | None, str]:
    """As get_zero_bubble_forward_backward_func of zerobubble/runtime.py chooses."""
    if facts.get("enable_1f1b_v"):
        return "interleaved-1f1b", "1F1B over a V"
    if not facts.get("enable_zero_bubble") and not facts.get("zero_bubble_v_schedule"):
        return ("interleaved-1f1b" if vpp > 1 else "1f1b"), "1F1B"
    if vpp > 1:
        setup = str(facts.get("zero_bubble_v_schedule_mem_setup"))
        return SETUPS.get(setup, "zbv"), f"zero bubble V, {setup}"
    pending = str(facts.get("zero_bubble_max_pending_backward"))
    most = int(pending) if pending.isascii() and pending.isdecimal() and len(pending) < 9 else None
    if most is None:
        return "zb-auto", "zero bubble"
    return ("zb-h1" if most <= pp else "zb-h2" if most >= 2 * pp - 1 else "zb-auto"), "zero bubble"


def check(facts: Mapping[str, Any], job: Job) -> list[Finding]:
    """The rules of both runtimes.

    Args:
        facts: of `options`, and "schedule": the schedule as Primus calls it, "vpp" as said.
    """
    layout, found = job.layout, []
    old, new = bool(facts.get("patch_zero_bubble")), bool(facts.get("patch_primus_pipeline"))
    if facts.get("decoder_pipeline_manual_split_list"):
        message = "decoder_pipeline_manual_split_list is checked and then used by nothing; "
        message += "pipeline_model_parallel_layout says the layers of each stage"
        found.append(changed("Primus", "primus-manual-split", message))
    if not (old or new):
        return found
    if old and new:
        message = "patch_zero_bubble and patch_primus_pipeline exclude each other"
        found.append(refused("Primus", "primus-two-pipelines", FIRST_STEP, message))
    vpp = facts.get("vpp") or layout.vpp
    if layout.pp > 1:
        found += _old(facts, job, vpp) if old else _new(facts, job, vpp)
        found += _split(facts, job)
        found += _needed(facts, "patch_zero_bubble" if old else "patch_primus_pipeline")
    elif old and facts.get("enable_zero_bubble"):
        message = "patch_zero_bubble without a pipeline changes nothing but its runtime"
        found.append(note("Primus", "primus-no-pipeline", message))
    if (facts.get("num_seq_splits") or 1) > 1:
        message = f"num_seq_splits {facts['num_seq_splits']}: parts of a sequence are micro "
        message += "batches of their own; plait counts whole sequences"
        found.append(note("Primus", "primus-sequence-splits", message))
    return found


def _new(facts: Mapping[str, Any], job: Job, vpp: int) -> list[Finding]:
    layout, name = job.layout, str(facts.get("pp_algorithm"))
    target, found = "Primus", []
    if name not in ALGORITHMS:
        near = closest(name, ALGORITHMS)
        suggest = {"layout__schedule": ALGORITHMS[near]} if near else {}
        message = f"pp_algorithm {name!r} is none of {', '.join(ALGORITHMS)}"
        return [refused(target, "primus-pp-algorithm", FIRST_STEP, message, name, **suggest)]
    need = CHUNKS.get(name)
    if need is not None and vpp != need:
        message = f"{name} takes {need} chunks a rank, not {vpp}" if need > 1 else (
            f"{name} takes one chunk a rank, not {vpp}")  # fmt: skip
        suggest = {"layout__vpp": need, "layout__schedule": ALGORITHMS[name]}
        found.append(refused(target, "primus-chunks", FIRST_STEP, message, vpp, **suggest))
    elif need is None and vpp < 2:
        message = f"{name} takes two chunks a rank or more"
        suggest = {"layout__schedule": "1f1b", "layout__vpp": 1}
        found.append(refused(target, "primus-chunks", FIRST_STEP, message, vpp, **suggest))
    batches = job.train.accumulation or 1
    if name == "zbv-formatted" and batches < 2 * layout.pp - 1:
        message = f"its table of zbv-formatted is made for {2 * layout.pp - 1} micro batches or "
        message += f"more (2 pp - 1) and keeps those that do not exist; there are {batches}"
        found.append(changed(target, "primus-zbv-micro-batches", message, batches))
    if facts.get("offload") and ALGORITHMS[name] not in ("zbv", "v-half", "v-min"):
        message = f"offload goes with V schedules only, not with {name}"
        found.append(refused(target, "primus-offload", FIRST_STEP, message))
    return found


def _old(facts: Mapping[str, Any], job: Job, vpp: int) -> list[Finding]:
    target, found = "Primus", []
    wants_v = bool(facts.get("zero_bubble_v_schedule"))
    setup = str(facts.get("zero_bubble_v_schedule_mem_setup"))
    if facts.get("enable_1f1b_v"):
        message = "1F1B over a V (enable_1f1b_v) is counted as interleaved 1F1B"
        found.append(note(target, "primus-1f1b-v", message))
    elif vpp > 1 and facts.get("enable_zero_bubble") and not wants_v:
        message = f"{vpp} chunks a rank under patch_zero_bubble need zero_bubble_v_schedule"
        suggest = {"layout__vpp": 1, "layout__schedule": "zb-auto"}
        found.append(refused(target, "primus-chunks", FIRST_STEP, message, vpp, **suggest))
    elif wants_v and vpp == 1:
        message = "zero_bubble_v_schedule needs num_virtual_stages_per_pipeline_rank: 2; with one "
        message += "chunk a rank it runs zero bubble without a V"
        found.append(changed(target, "primus-v-without-chunks", message, vpp))
    elif wants_v and vpp > 2:
        message = f"a V has two chunks a rank, not {vpp}"
        found.append(refused(target, "primus-chunks", FIRST_STEP, message, vpp, layout__vpp=2))
    if wants_v and setup not in SETUPS:
        message = f"zero_bubble_v_schedule_mem_setup {setup!r} is none of {', '.join(SETUPS)}"
        found.append(refused(target, "primus-v-setup", FIRST_STEP, message, setup))
    return found


def _split(facts: Mapping[str, Any], job: Job) -> list[Finding]:
    name = job.layout.schedule
    if name not in SPLIT or job.layout.recompute == "none":
        return []
    message = f"{name} keeps the inputs of weight gradients until they are done, so recompute "
    message += f"{job.layout.recompute} frees next to nothing; the trainer does not look"
    who, suggest = "Primus' planning (projection, tuning agent)", {"layout__recompute": "none"}
    value = job.layout.recompute
    return [refused(who, "primus-recompute-split", AT_START, message, value, **suggest)]


def _needed(facts: Mapping[str, Any], patch: str) -> list[Finding]:
    """Unchecked needs, one line for all."""
    wrong = [name for name, value in NEEDED.items() if facts.get(name, value) != value]
    if not wrong:
        return []
    said = ", ".join(f"{name}: {str(NEEDED[name]).lower()}" for name in wrong)
    message = f"{patch} needs {said}, and does not check it"
    if "overlap_grad_reduce" in wrong or "gradient_accumulation_fusion" in wrong:
        message += "; weight gradients are then not split off"
    return [changed("Primus", "primus-pipeline-needs", message)]


def has(facts: Mapping[str, Any], schedule_name: str) -> bool:
    """Whether Primus can run a schedule: it has more than Megatron-LM, and checks its own."""
    patched = facts.get("patch_primus_pipeline") or facts.get("patch_zero_bubble")
    return bool(patched) or settings_of(schedule_name) is not None


def settings_of(schedule_name: str) -> dict[str, Any] | None:
    """What a Primus file says for a schedule; {} for what Megatron-LM has, None for what neither
    has."""
    if schedule_name.partition(":")[0] in ("1f1b", "interleaved-1f1b"):
        return {}
    names = {ours: theirs for theirs, ours in ALGORITHMS.items()}
    if schedule_name not in names:
        return None
    return {"patch_primus_pipeline": True, "pp_algorithm": names[schedule_name]} | NEEDED
