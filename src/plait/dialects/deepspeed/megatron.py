"""Megatron-DeepSpeed: Megatron's flags, in the fork of DeepSpeed's, beside a configuration.

Source: megatron/arguments.py of deepspeedai/Megatron-DeepSpeed (validate_args, _add_zero_args).
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from plait.dialects import tables
from plait.dialects.flags import Word, settings_of
from plait.dialects.launch import AT_START, Told, changed, note, refused
from plait.dialects.megatron.arguments import understand
from plait.dialects.megatron.names import dashed
from plait.dialects.settings import Setting, Settings
from plait.spec.findings import Finding
from plait.spec.job import Job
from plait.spec.layout import divisors, nearest

TARGET = "Megatron-DeepSpeed"
#: Megatron's argument -> the fork's flag, where they differ.
_SPELLED = {
    "context_parallel_size": "--ds-sequence-parallel-size",
    "expert_model_parallel_size": "--moe-expert-parallel-size",
    "moe_router_topk": "--topk",
    "rotary_base": "--rotary-position-embeddings-theta",
    "moe_layer_freq": "--expert-interval",
    "moe_aux_loss_coeff": "--moe-loss-coeff",
    "num_query_groups": "--num-key-value-heads",
    "moe_expert_capacity_factor": "--moe-train-capacity-factor",
    "layernorm_epsilon": "--layernorm-epsilon",
}
#: What no Megatron argument means, but plait's layout or batch does.
_OWN = {
    "--zero-stage": "layout.zero", "--no-pipeline-parallel": "layout.pp is 1",
    "--enable-zbh1-pipeline": "layout.schedule", "--checkpoint-activations": "layout.recompute",
    "--deepspeed-activation-checkpointing": "how, not whether, layers are recomputed",
    "--enable-expert-tensor-parallelism": "layout.etp", "--disable-moe-token-dropping": "dropless",
    "--mlp-type": "model.moe", "--train-tokens": "train.steps", "--deepspeed": "DeepSpeed's engine",
    "--deepspeed_config": "the configuration", "--lr-warmup-tokens": "train.warmup",
    "--lr-decay-tokens": "train.schedule", "--embed-layernorm": "model.embed_norm",
    "--ds-sequence-parallel-fpdt": "attention in chunks",
}  # fmt: skip


@lru_cache(maxsize=1)
def known() -> Mapping[str, str]:
    """Flag -> arity."""
    return dict(tables.rows("megatron_deepspeed.txt"))


def spell(name: str) -> str | None:
    return _SPELLED.get(name) or dashed(name)


def flags(words: Iterable[Word]) -> list[Setting]:
    found, _ = settings_of(words, known(), {"--deepspeed-config": "--deepspeed_config"})
    return [_plain(setting) for setting in found]


def _plain(setting: Setting) -> Setting:
    """`--num-experts 64` is a list there, 1 is dense; norms are written in small letters."""
    if setting.name == "--normalization":
        name = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}.get(str(setting.value).lower())
        return replace(setting, value=name) if name else setting
    if setting.name != "--num-experts":
        return setting
    counts = [int(v) for v in list(setting.value) if str(v).isdecimal() and len(str(v)) < 7]
    return setting if not counts else replace(setting, value=max(counts) if max(counts) > 1 else 0)


def injected(settings: list[Setting]) -> list[Setting]:
    """What the fork's flags say without saying it."""
    for setting in settings:
        if setting.name == "--num-key-value-heads":
            return [*settings, Setting("--group-query-attention", True, setting.where)]
    return settings


def fields_of(
    settings: Settings, told: Told, world: int | None
) -> tuple[dict[str, Any], dict[str, Any], list[Finding]]:
    """Fields, facts and notes of the flags; the configuration's own fields come on top."""
    said = settings.said
    for name, means in _OWN.items():
        if name in said and not (said[name].open and means.startswith(("layout", "train.steps"))):
            settings.taken[name] = (said[name].value, means)
    understood = understand(settings, told, spell, world, TARGET)
    fields, facts, found = dict(understood.fields), dict(understood.facts), understood.findings
    found = [f for f in found if f.rule not in ("megatron-float32", "megatron-fp16-gradients")]
    tp, cp = fields.get("layout.tp", 1), fields.get("layout.cp", 1)
    fields["layout.zero"] = _number(settings, "--zero-stage", 1)
    fields.pop("layout.dp_replicate", None)
    if cp > 1:
        fields["layout.ulysses"] = cp
        fields.pop("layout.cp_method", None)
    if "--embed-layernorm" in said:
        fields["model.embed_norm"] = True
    if "--checkpoint-activations" in said:
        fields["layout.recompute"] = "full"
    pipeline = "--no-pipeline-parallel" not in said
    if "--enable-zbh1-pipeline" in said and fields.get("layout.pp", 1) > 1:
        fields["layout.schedule"] = "zb-h1"
    for path in ("train.seq_len", "layout.micro_batch", "train.global_batch"):
        if fields.get(path, 1) < 1:
            message = f"{path} {fields.pop(path)}: left to the checkpoint or to another program"
            found.append(note(TARGET, "megatron-deepspeed-unset", message))
    has = told.model.moe is not None if told.model else "model.moe.experts" in fields
    _mixture(settings, fields, found, tp if has else None)
    if told.model:
        fields = {path: v for path, v in fields.items() if not path.startswith("model.")}
    _steps(settings, fields)
    facts |= {
        "pipeline_engine": pipeline and "--deepspeed" in said,
        "no_pipeline": not pipeline, "zbh1": "--enable-zbh1-pipeline" in said,
        "zero_flag": fields["layout.zero"] if "--zero-stage" in said else None,
        "legacy_moe": True, "batch_elsewhere": True,
    }  # fmt: skip
    return fields, facts, found


def _mixture(
    settings: Settings, fields: dict[str, Any], found: list[Finding], tp: int | None
) -> None:
    """Experts as DeepSpeed's MoE layer counts them: one layer in two, one expert a token.

    Args:
        tp: None for a dense model.
    """
    settings.defaults.pop("--expert-tensor-parallel-size", None)
    if tp is None:
        for path in [p for p in fields if p in ("layout.ep", "layout.etp")]:
            fields.pop(path)
        return
    whole = "--enable-expert-tensor-parallelism" in settings
    fields["layout.etp"] = tp if whole else 1
    for name, path, value in (
        ("--expert-interval", "model.moe.every", 2),
        ("--topk", "model.moe.topk", 1),
        ("--moe-loss-coeff", "model.moe.aux_loss", 0.1),
    ):
        if name not in settings:
            fields[path] = value
            settings.defaults[name] = (value, path)
    fields["model.moe.normalize"] = fields.get("model.moe.topk", 1) > 1
    if "--disable-moe-token-dropping" not in settings:
        fields.setdefault("model.moe.capacity", 1.0)
        fields["model.moe.drop"] = "position"
    else:
        fields.pop("model.moe.capacity", None)
        fields.pop("model.moe.drop", None)
    if "--mlp-type" in settings and settings.said["--mlp-type"].value == "residual":
        message = "residual experts have an MLP beside them; plait counts it as a shared expert"
        found.append(note(TARGET, "megatron-deepspeed-residual", message))
        fields["model.moe.shared"] = 1
    counts = settings.said.get("--num-experts")
    if counts and settings.said.get("--num-experts-teacher"):
        message = f"layers may have other numbers of experts; counted are {counts.value} everywhere"
        found.append(note(TARGET, "megatron-deepspeed-experts", message))


def _steps(settings: Settings, fields: dict[str, Any]) -> None:
    tokens = _number(settings, "--train-tokens", None)
    batch, length = fields.get("train.global_batch"), fields.get("train.seq_len")
    if tokens and "train.steps" not in fields and batch and length and batch > 0 and length > 0:
        fields["train.steps"] = max(1, tokens // (batch * length))


def _number(settings: Settings, name: str, default: Any) -> Any:
    setting = settings.said.get(name)
    if setting is None or setting.open:
        return default
    text = str(setting.value).partition(".")[0]
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 18 else default


def rules(facts: Mapping[str, Any], job: Job) -> list[Finding]:
    """validate_args, and what its engine does."""
    layout, found = job.layout, []
    world = facts.get("world") or layout.world
    tp, pp = facts.get("tensor_model_parallel_size") or 1, facts.get("pipeline_model_parallel_size")
    if tp > world:
        message = f"TP {tp} silently becomes {world}, the number of ranks"
        found.append(changed(TARGET, "megatron-deepspeed-clamp", message, tp, layout__tp=world))
    rest = max(1, world // max(1, min(tp, world)))
    if pp and pp > rest:
        message = f"PP {pp} silently becomes {rest}, the ranks over TP"
        found.append(changed(TARGET, "megatron-deepspeed-clamp", message, pp, layout__pp=rest))
    if facts.get("no_pipeline") and layout.pp > 1:
        message = f"--no-pipeline-parallel and PP {layout.pp}"
        found.append(refused(TARGET, "megatron-deepspeed-no-pipeline", AT_START, message,
                             layout.pp, layout__pp=1))  # fmt: skip
    if layout.vpp > 1 and layout.pp <= 2:
        message = f"chunks need PP above 2, not {layout.pp}"
        found.append(refused(TARGET, "megatron-deepspeed-chunks", AT_START, message, layout.pp,
                             layout__vpp=1))  # fmt: skip
    if facts.get("zbh1") and layout.sequence_parallel:
        message = "ZB-H1 is not tested with --sequence-parallel, and refuses it"
        found.append(refused(TARGET, "megatron-deepspeed-zbh1", AT_START, message, True,
                             layout__sequence_parallel=False))  # fmt: skip
    batch, unit = job.train.global_batch, layout.micro_batch * max(1, layout.dp)
    if batch and batch % unit:
        message = f"global batch {batch} is no multiple of micro batch x dp = {unit}"
        found.append(refused(TARGET, "megatron-deepspeed-batch", AT_START, message, batch,
                             train__global_batch=max(1, round(batch / unit)) * unit))  # fmt: skip
    if job.model.heads % max(1, layout.tp):
        message = f"{job.model.heads} heads do not divide over TP {layout.tp}"
        legal = nearest(layout.tp, divisors(max(1, job.model.heads)))
        found.append(refused(TARGET, "megatron-deepspeed-heads", AT_START, message, layout.tp,
                             layout__tp=legal))  # fmt: skip
    flag, stage = facts.get("zero_flag"), facts.get("stage")
    if flag is not None and stage is not None and flag != stage:
        message = f"--zero-stage {flag} but the configuration says {stage}, which holds"
        found.append(changed(TARGET, "megatron-deepspeed-zero", message, flag))
    return found
