"""A job as a Primus experiment."""

from dataclasses import replace
from typing import Any

from plait.dialects import huggingface_names
from plait.dialects.launch import Told, Written, note
from plait.dialects.megatron.arguments import understand
from plait.dialects.megatron.writer import arguments_of
from plait.dialects.primus import schedules as primus_schedules
from plait.dialects.primus.config import merge, presets
from plait.dialects.primus.megatron import known, spell
from plait.dialects.primus.titan import RELEASE
from plait.dialects.settings import Settings
from plait.dialects.torchtitan import writer as titan_write
from plait.dialects.torchtitan.models import flavor_of
from plait.spec.findings import Finding
from plait.spec.job import Job

TARGET = "Primus"

#: Schedules that Primus has for TorchTitan only.
_TORCH_ONLY = ("gpipe", "looped-bfs", "dualpipev")
#: Schedules that it has nowhere -> what comes nearest, and what that costs.
_INSTEAD = {
    "gpipe": ("1f1b", "the same bubble, and fewer activations"),
    "looped-bfs": ("interleaved-1f1b", "the same bubble, and fewer activations"),
    "zb-h1": ("interleaved-1f1b", "weight gradients are not split off"),
    "zb-h2": ("zb-auto", "as many activations as its heuristic finds room for"),
    "dualpipe": ("zbv", "one copy of the weights, a V in place of two directions"),
    "dualpipev": ("zbv", "the same chunks in a V, without overlapped pairs"),
    "auto": ("zb-auto", "its heuristic in place of a search"),
}
#: What a reader looks for first, said even where it is the default.
_ALWAYS = (
    "micro_batch_size", "global_batch_size", "seq_length", "tensor_model_parallel_size",
    "sequence_parallel", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "use_distributed_optimizer",
)  # fmt: skip
#: Options that a preset changes and that decide nothing where a job does not say them.
_ASIDE = ("add_position_embedding", "data_parallel_sharding_strategy", "cp_comm_type")
_HEAD = {
    "work_group": "${PRIMUS_TEAM:amd}",
    "user_name": "${PRIMUS_USER:root}",
    "exp_name": "${PRIMUS_EXP_NAME:@}",
    "workspace": "${PRIMUS_WORKSPACE:./output}",
}


def write_experiment(job: Job) -> Written:
    """The file for the Megatron backend; for TorchTitan where the schedule is torch's alone and
    TorchTitan has the model."""
    name = job.layout.schedule.partition(":")[0]
    torch_alone = name in _TORCH_ONLY or (name == "zb-h1" and job.layout.vpp > 1)
    if job.layout.pp > 1 and torch_alone and flavor_of(job.model) is not None:
        return _titan(job)
    return _megatron(job)


# ------------------------------------------------------------------------------------------
# Megatron


def _megatron(job: Job) -> Written:
    job, notes, pipeline = _pipelined(job)
    arguments, more = arguments_of(job, TARGET)
    arguments = dict(arguments) | pipeline
    # Made-up data has its own tokenizer; the preset's stays for real data.
    arguments = {k: v for k, v in arguments.items() if not k.startswith("tokenizer_")}
    arguments |= {"mock_data": True, "vocab_size": job.model.vocab}
    arguments |= _sharding(arguments)
    model = preset_of(job.model.name)
    base = presets("megatron", "models", "base") | presets("megatron", "models").get(model, {})
    base |= presets("megatron", "modules", "base")
    base |= presets("megatron", "modules")["pre_trainer"]
    aside = {*_ASIDE, *(k for k in base if k.startswith("moe_") and job.model.moe is None)}
    plain = {k: v for k, v in _defaults().items() if k in base and k not in aside}
    off = {"mtp_num_layers": None} if base.get("mtp_num_layers") else {}
    wanted = {key: _plain(value) for key, value in (plain | off | arguments).items()}
    overrides = {
        key: value
        for key, value in wanted.items()
        if (key in arguments and key in _ALWAYS) or _plain(base.get(key)) != value
    }
    text = _text(job, "megatron", model, overrides)
    return Written({f"{_stem(job)}.yaml": text}, [*notes, *more])


def _plain(value: Any) -> Any:
    """As YAML says it: one word by itself, nothing for an empty list."""
    if isinstance(value, list | tuple):
        return (value[0] if len(value) == 1 else list(value)) if value else None
    return value


def preset_of(model: str) -> str:
    """The preset of Primus of that model, by its name; "language_model" where it has none."""
    for stem in presets("megatron", "models"):
        named = huggingface_names.named(stem)
        if named is not None and named.exact and named.fields.get("model") == model:
            return stem
    return "language_model"


def _defaults() -> dict[str, Any]:
    """Megatron's own default of each argument that is read, for those that a preset changes."""
    facts = understand(Settings([]), Told(), spell, None, TARGET).facts
    own = {"given", "world", "zero", "vpp", "tokenizer_type", "tokenizer_model"}
    return {k: v for k, v in facts.items() if k in known() and k not in own}


def _pipelined(job: Job) -> tuple[Job, list[Finding], dict[str, Any]]:
    """The job as Megatron-LM can say it, and the options that make Primus run its schedule."""
    layout, notes = job.layout, []
    name = layout.schedule.partition(":")[0]
    if layout.pp == 1:
        return job, [], {}
    said = primus_schedules.settings_of(name)
    if name == "zb-h1" and layout.vpp > 1:
        said = None
    if said is None:
        near, cost = _INSTEAD.get(name, ("1f1b", "one forward, one backward"))
        near = "1f1b" if near == "interleaved-1f1b" and layout.vpp == 1 else near
        near = "interleaved-1f1b" if near == "1f1b" and layout.vpp > 1 else near
        near = "zbv" if near == "zb-auto" and layout.vpp == 2 else near
        near = "interleaved-1f1b" if near == "zb-auto" and layout.vpp > 2 else near
        if near == "zbv" and layout.vpp != 2:
            layout = replace(layout, vpp=2, stages=None)
        message = f"it has no schedule {name}; {near} instead: {cost}"
        notes.append(note(TARGET, "primus-schedule", message, name))
        said = primus_schedules.settings_of(near) or {}
        name = near
    if said and layout.recompute != "none":
        message = f"{name} keeps what recompute would free: recompute {layout.recompute} left out"
        notes.append(note(TARGET, "primus-recompute-split", message))
        layout = replace(layout, recompute="none")
    plain = layout.schedule
    if said or plain.partition(":")[0] not in ("1f1b", "interleaved-1f1b"):
        plain = "interleaved-1f1b" if layout.vpp > 1 else "1f1b"
    return replace(job, layout=replace(layout, schedule=plain)), notes, said


def _sharding(arguments: dict[str, Any]) -> dict[str, Any]:
    """Replicas of sharded states: Primus' own key, where torch's FSDP2 does the sharding."""
    copies = arguments.get("num_distributed_optimizer_instances", 1)
    if copies > 1 and arguments.get("use_torch_fsdp2"):
        return {"data_parallel_replicate_degree": copies, "ckpt_format": "torch_dcp"}
    return {}


# ------------------------------------------------------------------------------------------
# TorchTitan


def _titan(job: Job) -> Written:
    sections, notes = titan_write.config_of(job, RELEASE, TARGET)
    schedule = job.layout.schedule
    why = note(TARGET, "primus-torchtitan", f"for TorchTitan: only it has the schedule {schedule}")
    flavor = sections.pop("model", {})
    model = titan_preset(flavor)
    base: dict[str, Any] = {}
    for path, value in presets("torchtitan", "modules", "base").items():
        section, _, option = path.partition(".")
        base = merge(base, {section: {option: value}})
    kept: dict[str, Any] = {"training": {"mock_data": True, "steps": job.train.steps}}
    if model is None:
        kept["model"] = flavor
    for section, options in sections.items():
        changed = {k: v for k, v in options.items() if base.get(section, {}).get(k) != v}
        kept = merge(kept, {section: changed} if changed else {})
    text = _text(job, "torchtitan", model or "llama3.1_8B", kept)
    return Written({f"{_stem(job)}.yaml": text}, [why, *notes])


def titan_preset(flavor: dict[str, Any]) -> str | None:
    """The preset of Primus of a flavor of TorchTitan."""
    for stem, said in presets("torchtitan", "models").items():
        same = (said.get("model.name"), said.get("model.flavor"))
        if not stem.endswith("-fp8") and same == (flavor.get("name"), flavor.get("flavor")):
            return stem
    return None


# ------------------------------------------------------------------------------------------


def _stem(job: Job) -> str:
    return "".join(c if c.isalnum() or c in ".-_" else "-" for c in job.model.name) + "-pretrain"


def _text(job: Job, framework: str, model: str, overrides: dict[str, Any]) -> str:
    import yaml

    head = {k: v.replace("@", _stem(job)) for k, v in _HEAD.items()}
    module = {
        "framework": framework,
        "config": "pre_trainer.yaml",
        "model": f"{model}.yaml",
        "overrides": overrides,
    }
    tree = head | {"modules": {"pre_trainer": module}}
    world = job.layout.world
    nodes, each = (world // 8, 8) if world % 8 == 0 else (1, world)
    lines = [
        f"# {world} ranks: NNODES={nodes} GPUS_PER_NODE={each}",
        f"#   primus-cli direct -- train pretrain --config {_stem(job)}.yaml",
    ]
    dumped = yaml.safe_dump(tree, sort_keys=False, width=100, default_flow_style=False)
    return "\n".join(lines) + "\n" + dumped
