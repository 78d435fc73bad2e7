"""Accelerate's configuration and the flags of `accelerate launch`, in plait's words.

Sources, of accelerate 1.15.0.dev0: commands/launch.py, utils/launch.py, utils/dataclasses.py
(FullyShardedDataParallelPlugin, DeepSpeedPlugin, MegatronLMPlugin), parallelism_config.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from plait.dialects import tables
from plait.dialects.launch import changed, note
from plait.dialects.settings import Settings
from plait.spec.findings import Finding

TARGET = "Accelerate"
#: torch's ShardingStrategy as Accelerate numbers it -> (ZeRO stage, within a node only).
STRATEGIES = {"FULL_SHARD": (3, False), "SHARD_GRAD_OP": (2, False), "NO_SHARD": (0, False),
              "HYBRID_SHARD": (3, True), "HYBRID_SHARD_ZERO2": (2, True)}  # fmt: skip
#: Prefixes of sections whose keys repeat the section's name, or leave it out.
_SECTIONS = {"fsdp_config": "fsdp_", "parallelism_config": "parallelism_config_",
             "megatron_lm_config": "megatron_lm_", "deepspeed_config": ""}  # fmt: skip
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}


@lru_cache(maxsize=1)
def known() -> Mapping[str, str]:
    """Flag or key -> arity, "key" of the latter."""
    return dict(tables.rows("accelerate.txt"))


def known_of(settings: Settings) -> list[str]:
    free = tuple(key[:-1] for key in known() if key.endswith(".*"))
    return [*known(), *(name for name in settings.said if name.startswith(free))]


@dataclass
class Said:
    """Options by their short names: "fsdp_version" stands as `fsdp_config.fsdp_version` in a file
    and as `--fsdp_version` on a command line, which is stronger."""

    settings: Settings
    places: dict[str, list[str]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in self.settings.said:
            self.places.setdefault(_short(name), []).append(name)

    def __contains__(self, short: str) -> bool:
        return short in self.places

    def take(self, short: str, kind: Any = str, default: Any = None, means: str = "") -> Any:
        value = default
        for name in sorted(self.places.get(short, ()), key=lambda n: n.startswith("-")):
            setting = self.settings.said[name]
            if setting.value is None or setting.value == "auto":
                self.settings.taken[name] = (setting.value, means)
                continue
            said = self.settings.take(name, kind, None, means)
            value = value if said is None else said
        decides = means.partition(".")[0] in ("layout", "train")
        if short not in self.places and default is not None and decides:
            self.settings.defaults[short] = (default, means)
        self.values[short] = value
        return value

    def number_or_open(
        self, short: str, told: int | None, default: int | None = None, means: str = "ranks"
    ) -> int | None:
        """A number of ranks; one in a variable is left to the person, or assumed."""
        for name in self.places.get(short, ()):
            setting = self.settings.said[name]
            if setting.open:
                self.settings.taken[name] = (setting.value, means)
                self.places[short].remove(name)
                if told is None:
                    message = f"the number of processes depends on {', '.join(setting.open)}"
                    self.note("world-open", message)
                break
        return self.take(short, int, default, means)

    def switch(self, short: str, default: bool, means: str) -> bool:
        """true, "true", "yes" and 1 alike."""
        value = self.take(short, None, default, means)
        self.values[short] = str(value).lower() in ("true", "yes", "1", "on", "y", "t")
        return self.values[short]

    def note(self, rule: str, message: str, value: Any = None) -> None:
        self.findings.append(note(TARGET, f"accelerate-{rule}", message, value))


def _short(name: str) -> str:
    if name.startswith("--"):
        return name[2:].replace("-", "_")
    section, dot, key = name.partition(".")
    if not dot or section not in _SECTIONS:
        return name
    prefix = _SECTIONS[section]
    return key if key.startswith(prefix) else prefix + key


def understand(said: Said, world: int | None) -> tuple[dict[str, Any], int | None]:
    """Fields, and the ranks where they are known. What the rules need is in `said.values`.

    Args:
        world: ranks, as a person says them.
    """
    processes = said.number_or_open("num_processes", world)
    machines = said.number_or_open("num_machines", 1, 1, "nodes") or 1
    world = world or (processes if processes and processes > 0 else None)
    kind = said.take("distributed_type", None, None, "how ranks work together")
    # YAML reads an unquoted NO as false.
    kind = "NO" if kind is False else str(kind or "").upper().rpartition(".")[2]
    for flag, name in (("use_deepspeed", "DEEPSPEED"), ("use_fsdp", "FSDP"),
                       ("use_megatron_lm", "MEGATRON_LM"), ("multi_gpu", "MULTI_GPU")):  # fmt: skip
        if flag in said and said.switch(flag, False, "how ranks work together"):
            kind = name
    precision = said.take("mixed_precision", None, None, "train.dtype")
    if precision is None and said.switch("fp16", False, "train.dtype, of old"):
        precision = "fp16"
    precision = "no" if precision in (None, "False", "false") else str(precision).lower()
    said.switch("downcast_bf16", False, "of TPUs")
    said.values |= {"kind": kind, "precision": precision, "machines": machines, "world": world}
    fields: dict[str, Any] = {"train.dtype": DTYPES.get(precision, "bfloat16")}
    if precision == "fp8":
        said.note("fp8", "fp8 in matrix products; plait counts bfloat16")
    if kind == "FSDP":
        fields |= _fsdp(said, world, machines)
    elif kind == "MEGATRON_LM":
        fields |= _megatron(said)
    elif kind != "DEEPSPEED":
        fields["layout.zero"] = 0
        if kind in ("", "NO") and not world:
            world = 1 if kind == "NO" else None
    if kind != "DEEPSPEED" and precision in ("bf16", "fp16"):
        fields["train.grad_dtype"] = "float32"
        what = "gradients are reduced in it" if kind == "FSDP" else "of autocast only"
        message = (
            f"parameters and gradients are kept in float32; {precision} is for computing ({what}), "
            f"where plait keeps a copy in {precision}"
        )
        said.note("mixed-precision", message)
    fields |= _parallelism(said, kind, fields)
    accumulation = said.take("gradient_accumulation_steps", int, None, "train.accumulation")
    if accumulation:
        fields["train.accumulation"] = accumulation
    clip = said.take("gradient_clipping", float, None, "train.clip")
    if clip is not None and clip >= 0:
        fields["train.clip"] = clip
    if kind == "AMAZON_SAGEMAKER" or "compute_environment" in said:
        place = said.take("compute_environment", str, None, "where it runs")
        if place == "AMAZON_SAGEMAKER":
            said.note("sagemaker", "SageMaker decides how ranks work together")
    if world:
        fields["ranks"] = world
    return fields, world


def _fsdp(said: Said, world: int | None, machines: int) -> dict[str, Any]:
    version = said.take("fsdp_version", int, 1, "FSDP1 or FSDP2") or 1
    strategy = said.take("fsdp_sharding_strategy", None, None, "layout.zero (FSDP1)")
    reshard = said.take("fsdp_reshard_after_forward", None, None, "layout.zero")
    offload = said.switch("fsdp_offload_params", False, "where parameters live")
    recompute = said.switch("fsdp_activation_checkpointing", False, "layout.recompute")
    said.switch("fsdp_forward_prefetch", False, "a rule of FSDP2's")
    if version == 2:
        if strategy is not None:
            message = "fsdp_sharding_strategy is FSDP1's; fsdp_reshard_after_forward holds"
            said.note("sharding-strategy", message, strategy)
        off = str(reshard).lower() in ("false", "no", "0")
        fields: dict[str, Any] = {"layout.zero": 2 if off else 3}
    else:
        named = _strategy(strategy if strategy is not None else reshard)
        zero, hybrid = STRATEGIES.get(named, (3, False))
        said.values["strategy"] = named
        fields = {"layout.zero": zero}
        if hybrid and world and machines > 0 and world % machines == 0:
            fields["layout.dp_shard"] = max(1, world // machines)
            message = f"hybrid: sharded within each of {machines} nodes, copied between them"
            said.note("hybrid", message, named)
    if recompute:
        fields["layout.recompute"] = "full"
    if offload:
        said.note("offload", "parameters live on the host; plait keeps them on the device")
    return fields


def _strategy(text: Any) -> str:
    names = list(STRATEGIES)
    if text is None or isinstance(text, bool | list | dict):
        return "FULL_SHARD"
    if str(text).isdecimal() and 1 <= int(str(text)[:3]) <= len(names):
        return names[int(str(text)) - 1]
    return str(text).upper()


def _parallelism(said: Said, kind: str, so_far: Mapping[str, Any]) -> dict[str, Any]:
    """Degrees of `parallelism_config`. Its "sp" is Ulysses, by DeepSpeed."""
    prefix = "parallelism_config_"
    if not any(short.startswith(prefix) for short in said.places):
        return {}
    sizes = {
        name: said.take(f"{prefix}{name}_size", int, 1, means)
        for name, means in (
            ("dp_replicate", "layout.dp_replicate"), ("dp_shard", "layout.dp_shard"),
            ("tp", "layout.tp"), ("cp", "layout.cp"), ("sp", "layout.ulysses and cp"),
        )
    }  # fmt: skip
    said.take(f"{prefix}cp_backend", str, "torch", "whose context parallelism")
    said.take(f"{prefix}sp_backend", str, "deepspeed", "whose Ulysses")
    rotate = said.take(f"{prefix}cp_comm_strategy", str, "allgather", "layout.cp_method")
    length = said.take(f"{prefix}sp_seq_length", int, None, "train.seq_len")
    said.values["sizes"] = sizes
    degrees = {name: size or 1 for name, size in sizes.items()}
    fields: dict[str, Any] = {"layout.tp": degrees["tp"], "layout.sequence_parallel": False}
    if degrees["cp"] > 1:
        method = "all-gather" if rotate == "allgather" else "ring"
        fields |= {"layout.cp": degrees["cp"], "layout.cp_method": method}
    if degrees["sp"] > 1:
        fields |= {"layout.cp": degrees["sp"], "layout.ulysses": degrees["sp"]}
        if length and length > 0:
            fields["train.seq_len"] = length
    if kind == "FSDP" and so_far.get("layout.zero"):
        fields["layout.dp_replicate"] = degrees["dp_replicate"]
        fields["layout.dp_shard"] = degrees["dp_shard"]
    if degrees["tp"] > 1:
        said.note("tp-norms", "tensor parallelism of transformers' plans keeps norms whole")
    return fields


def _megatron(said: Said) -> dict[str, Any]:
    """`megatron_lm_config`: the defaults are MegatronLMPlugin's."""
    prefix = "megatron_lm_"
    take = lambda name, kind, default, means: said.take(prefix + name, kind, default, means)  # noqa: E731
    tp, pp = take("tp_degree", int, 1, "layout.tp"), take("pp_degree", int, 1, "layout.pp")
    micros = take("num_micro_batches", int, 1, "train.accumulation")
    cp = take("context_parallel_size", int, 1, "layout.cp") or 1
    ep = take("expert_model_parallel_size", int, 1, "layout.ep") or 1
    etp = take("expert_tensor_parallel_size", int, None, "layout.etp")
    norms = said.switch(f"{prefix}sequence_parallelism", False, "layout.sequence_parallel")
    distributed = said.switch(f"{prefix}use_distributed_optimizer", False, "layout.zero")
    custom = said.switch(f"{prefix}use_custom_fsdp", False, "layout.zero")
    recompute = said.switch(f"{prefix}recompute_activations", False, "layout.recompute")
    granularity = take("recompute_granularity", str, None, "layout.recompute")
    clip = take("gradient_clipping", float, 1.0, "train.clip")
    last = take("decoder_last_pipeline_num_layers", int, None, "layout.stages")
    if last:
        message = f"the last stage has {last} layers; plait balances them (--stages says more)"
        said.note("last-stage", message, last)
    if recompute and granularity is None:
        said.note("recompute", "selective recompute of attention: plait's kernel stores no scores")
    fields: dict[str, Any] = {
        "layout.tp": tp, "layout.pp": pp, "layout.cp": cp,
        "layout.sequence_parallel": norms and (tp or 1) > 1,
        "layout.zero": 3 if custom else 1 if distributed else 0,
        "layout.recompute": "full" if granularity == "full" else "none",
    }  # fmt: skip
    if ep > 1 or (etp or 1) > 1:
        fields |= {"layout.ep": ep, "layout.etp": etp or tp or 1}
    if micros and micros > 1:
        fields["train.accumulation"] = micros
    if clip is not None and clip >= 0:
        fields["train.clip"] = clip
    return fields


def inline(said: Said, world: int | None) -> dict[str, Any]:
    """`deepspeed_config` without a file of DeepSpeed's: what DeepSpeedPlugin makes of it."""
    zero = said.take("zero_stage", int, 2, "layout.zero")
    fields: dict[str, Any] = {"layout.zero": zero}
    precision = said.values["precision"]
    dtype = DTYPES.get(precision, "bfloat16")
    fields |= {"train.dtype": dtype, "train.grad_dtype": dtype}
    facts: dict[str, Any] = {"stage": zero, "dtype": dtype}
    for part in ("optimizer", "param"):
        device = said.take(f"offload_{part}_device", str, "none", f"where {part}s live")
        facts[f"offload_{part}"] = None if device in (None, "none") else device
        if facts[f"offload_{part}"]:
            what = "optimizer states" if part == "optimizer" else "parameters"
            said.note("offload", f"{what} live on {device}; plait keeps them on the device")
    said.values["deepspeed"] = facts
    return fields


def overridden(said: Said) -> list[Finding]:
    """What a file of DeepSpeed's takes the place of: Accelerate refuses to have both."""
    names = (
        "gradient_accumulation_steps",
        "gradient_clipping",
        "zero_stage",
        "offload_optimizer_device",
        "offload_param_device",
        "zero3_save_16bit_model",
    )
    both = [n for n in names if f"deepspeed_config.{n}" in said.settings.said]
    if "mixed_precision" in said and not _on_command_line(said, "mixed_precision"):
        both.append("mixed_precision")
    if not both:
        return []
    message = f"deepspeed_config_file beside {', '.join(both)}: which it refuses to have both"
    return [changed(TARGET, "accelerate-deepspeed-twice", message, both[0])]


def _on_command_line(said: Said, short: str) -> bool:
    return all(name.startswith("-") for name in said.places.get(short, ()))
