"""DeepSpeed's configuration in plait's words: the room that DeepSpeed, Megatron-DeepSpeed and
Accelerate share.

Sources, of DeepSpeed 0.19.6: runtime/config.py (names, defaults, the batch), runtime/engine.py
(get_data_types), runtime/zero/config.py, module_inject/auto_ep_config.py.
"""

from dataclasses import dataclass, field
from typing import Any

from plait.dialects.deepspeed.elastic import Elastic
from plait.dialects.launch import AT_START, changed, note, refused
from plait.dialects.settings import Settings
from plait.spec.findings import Finding

TARGET = "DeepSpeed"
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "bfp16": "bfloat16",
          "float32": "float32", "float16": "float16", "bfloat16": "bfloat16"}  # fmt: skip
#: Keys that 0.19.8 has lost, and refuses at start wherever they stand (its runtime/config.py).
GONE = (
    "nebula", "compression_training", "amp", "quantize_training", "sparse_gradients", "eigenvalue",
    "sparse_attention", "elasticity", "graph_harvesting", "curriculum_learning",
    "progressive_layer_drop", "zero_optimization.mics_shard_size",
    "zero_optimization.mics_hierarchical_params_gather", "zero_optimization.zeropp_loco_param",
)  # fmt: skip
#: Optimizers of DeepSpeed's that keep two states a parameter, as Adam does.
_ADAMS = frozenset({"adam", "adamw", "fusedadam", "deepspeedcpuadam", "cpuadam", "adam8bit"})
_SCHEDULES = {"warmuplr": "constant", "warmupcosinelr": "cosine"}


@dataclass
class Config:
    """The settings of a configuration, "auto" taken for nothing said.

    Attributes:
        autos: keys that Hugging Face's integration fills in.
        values: short name -> value, for the rules.
    """

    settings: Settings
    autos: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def take(self, name: str, kind: Any = str, default: Any = None, means: str = "") -> Any:
        setting = self.settings.said.get(name)
        if setting is None:
            if default is not None and means.partition(".")[0] in ("layout", "train"):
                self.settings.defaults[name] = (default, means)
            return default
        if setting.value == "auto" or setting.value is None:
            self.settings.taken[name] = (setting.value, means)
            if setting.value == "auto":
                self.autos.append(name)
            return default
        return self.settings.take(name, kind, default, means)

    def quietly(self, name: str, kind: Any, default: Any, means: str) -> Any:
        """Of what matters little: a variable in it is not asked for, nor is a wrong value."""
        setting = self.settings.said.get(name)
        wrong = setting is not None and (
            setting.open or isinstance(setting.value, dict | list | bool) != (kind is bool)
        )
        if setting is not None and wrong:
            self.settings.taken[name] = (setting.value, means)
            return default
        return self.take(name, kind, default, means)


@dataclass(frozen=True)
class Understood:
    """What a configuration says.

    Attributes:
        fields: dotted path -> value, as `Launch.fields`.
        facts: short name -> value, for `validation`: "stage", "batch", "micro",
            "accumulation", "mics", "hpz", ...
        findings: what was assumed.
        autos: keys that are "auto".
    """

    fields: dict[str, Any]
    facts: dict[str, Any]
    findings: list[Finding]
    autos: tuple[str, ...]


def understand(settings: Settings, world: int | None, pp: int = 1, tp: int = 1) -> Understood:
    """What the settings of a configuration say.

    Args:
        settings: by dotted path ("zero_optimization.stage").
        world: ranks, where they are known.
        pp, tp: degrees that are said outside of the configuration.
    """
    config = Config(settings)
    fields = _degrees(config)
    tp = fields.get("layout.tp", tp)
    fields |= _sharding(config, fields.get("layout.cp", 1))
    fields |= _precision(config)
    fields |= _batch(config)
    fields |= _training(config)
    _offload(config)
    model_ranks = max(pp, 1) * max(tp, 1) * max(fields.get("layout.cp", 1), 1)
    world = _world(config, world, model_ranks)
    fields |= _on_ranks(config, world, model_ranks)
    if world:
        fields["ranks"] = world
    if config.autos:
        names = ", ".join(config.autos[:6]) + (", ..." if len(config.autos) > 6 else "")
        message = f"{names}: filled in by Hugging Face's Trainer from its own arguments"
        config.findings.append(note(TARGET, "deepspeed-auto", message))
    facts = config.values | {"world": world}
    return Understood(fields, facts, config.findings, tuple(config.autos))


def _degrees(config: Config) -> dict[str, Any]:
    """AutoTP, Ulysses and AutoEP."""
    take, values = config.take, config.values
    tp = take("tensor_parallel.autotp_size", int, 0, "layout.tp") or 1
    inner = take("tensor_parallel.tp.tp_size", int, None, "layout.tp")
    tp = inner if inner and tp == 1 else tp
    ulysses = take("sequence_parallel_size", int, 1, "layout.ulysses and cp") or 1
    enabled = take("expert_parallel.enabled", bool, False, "whether autoep_size holds")
    ep = take("expert_parallel.autoep_size", int, 1, "layout.ep") or 1
    etp = take("expert_parallel.expert_tensor_parallel_size", int, 1, "layout.etp") or 1
    balance = take("expert_parallel.load_balance_coeff", None, None, "a rule of AutoEP's")
    values |= {"autotp": tp, "ulysses": ulysses, "autoep": bool(enabled), "autoep_size": ep,
               "autoetp": etp, "balance": balance}  # fmt: skip
    fields: dict[str, Any] = {}
    if tp > 1:
        # AutoTP keeps norms whole on every rank.
        fields |= {"layout.tp": tp, "layout.sequence_parallel": False}
    if ulysses > 1:
        fields |= {"layout.cp": ulysses, "layout.ulysses": ulysses}
    if enabled and ep > 1:
        fields |= {"layout.ep": ep, "layout.etp": etp}
    elif ep > 1:
        message = f"autoep_size {ep} does nothing: expert_parallel.enabled is not true"
        config.findings.append(changed(TARGET, "deepspeed-autoep-off", message, ep))
    return fields


def _sharding(config: Config, ulysses: int) -> dict[str, Any]:
    take, values = config.take, config.values
    stage = take("zero_optimization.stage", int, 0, "layout.zero")
    if config.settings.said.get("zero_optimization") is not None:
        # The form of the first versions: true is stage 1; {} is stage 0.
        whole = config.settings.said["zero_optimization"].value
        config.settings.taken["zero_optimization"] = (whole, "layout.zero")
        stage = 1 if whole is True else stage
    mics = take("zero_optimization.mics_shard_size", int, -1, "layout.dp_shard (with cp)")
    hpz = take("zero_optimization.zero_hpz_partition_size", int, 1, "layout.dp_shard (with cp)")
    values |= {"stage": stage, "mics": mics, "hpz": hpz}
    for key in ("zero_quantized_weights", "zero_quantized_gradients"):
        values[key] = config.quietly(f"zero_optimization.{key}", bool, False, "quantized traffic")
        if values[key]:
            message = f"{key}: plait counts what is sent in full width"
            config.findings.append(note(TARGET, "deepspeed-quantized", message))
    fields: dict[str, Any] = {"layout.zero": stage}
    shard = mics if mics and mics > 0 else hpz if hpz and hpz > 1 else None
    if shard and stage == 3:
        if shard >= ulysses and shard % ulysses == 0:
            fields["layout.dp_shard"] = shard // ulysses
        if shard == hpz and not mics > 0:
            message = (
                f"hpZ keeps a second copy of the parameters in groups of {hpz}; gradients and "
                "states stay sharded over all ranks, which plait's HSDP shards over the group too"
            )
            config.findings.append(note(TARGET, "deepspeed-hpz", message, hpz))
    return fields


def _precision(config: Config) -> dict[str, Any]:
    take, values = config.take, config.values
    fp16 = take("fp16.enabled", bool, False, "train.dtype")
    bf16 = take("bf16.enabled", bool, None, "train.dtype")
    bf16 = take("bfloat16.enabled", bool, False, "train.dtype") if bf16 is None else bf16
    cast = take("torch_autocast.enabled", bool, False, "train.dtype")
    cast_to = take("torch_autocast.dtype", str, "bfloat16", "train.dtype")
    wide = take("data_types.grad_accum_dtype", str, None, "train.grad_dtype")
    dtype = "float16" if fp16 else "bfloat16" if bf16 else "float32"
    grad = DTYPES.get(wide or "", dtype)
    narrow = take("bf16.bf16_master_weights_and_grads", bool, False, "16 bit master weights")
    narrow = take("fp16.fp16_master_weights_and_grads", bool, False, "the same") or narrow
    if narrow:
        message = "master weights and gradients in 16 bit; plait keeps master weights in float32"
        config.findings.append(note(TARGET, "deepspeed-master", message))
    if cast:
        message = f"torch_autocast computes in {cast_to}, parameters and gradients stay {dtype}"
        config.findings.append(note(TARGET, "deepspeed-autocast", message))
    scale = config.quietly("fp16.loss_scale", float, 0.0, "train.loss_scale, 0: found out")
    power = config.quietly("fp16.initial_scale_power", int, 16, "train.loss_scale")
    values |= {"fp16": fp16, "bf16": bf16, "dtype": dtype, "grad": grad, "grad_said": wide}
    fields: dict[str, Any] = {"train.dtype": dtype, "train.grad_dtype": grad}
    if fp16:
        first = scale or (2.0**power if power is not None and 0 <= power <= 60 else None)
        fields |= {"train.loss_scale": first} if first and first > 0 else {}
    return fields


def _batch(config: Config) -> dict[str, Any]:
    """What is said of the three; DeepSpeed derives the rest by integer division."""
    take, values = config.take, config.values
    batch = take("train_batch_size", int, None, "train.global_batch")
    micro = take("train_micro_batch_size_per_gpu", int, None, "layout.micro_batch")
    accumulation = take("gradient_accumulation_steps", int, None, "train.accumulation")
    values |= {"batch": batch, "micro": micro, "accumulation": accumulation}
    elastic = take("elasticity.enabled", bool, False, "whether the batch is elastic")
    ignore = take("elasticity.ignore_non_elastic_batch_info", bool, False, "a rule of elasticity")
    values |= {"elastic": elastic, "elastic_ignores": ignore}
    if elastic:
        return _elastic(config)
    fields: dict[str, Any] = {}
    if batch is not None:
        fields["train.global_batch"] = batch
    if micro is not None:
        fields["layout.micro_batch"] = micro
    if accumulation is not None:
        fields["train.accumulation"] = accumulation
    elif (batch is None) != (micro is None):
        fields["train.accumulation"] = 1
    return fields


def _elastic(config: Config) -> dict[str, Any]:
    """The batch that elasticity chooses; the micro batch is known with the ranks (`_on_ranks`)."""
    quietly, means = config.quietly, "train.global_batch"
    micros = config.settings.said.get("elasticity.micro_batch_sizes")
    found: Any = Elastic().micros
    if micros is not None:
        config.settings.taken[micros.name] = (micros.value, "layout.micro_batch")
        given = micros.value if isinstance(micros.value, list) else []
        found = tuple(m for m in given[:64] if isinstance(m, int) and not isinstance(m, bool))
    asked = Elastic(
        quietly("elasticity.max_train_batch_size", int, 2000, means),
        found,
        quietly("elasticity.min_gpus", int, 1, means),
        quietly("elasticity.max_gpus", int, 10000, means),
        quietly("elasticity.prefer_larger_batch", bool, True, means),
        quietly("elasticity.version", float, 0.2, means),
    )
    if not asked.sound():
        return {}
    batch, worlds = asked.batch()
    config.values |= {"elasticity": asked, "elastic_worlds": worlds}
    shown = ", ".join(map(str, worlds[:12])) + (", ..." if len(worlds) > 12 else "")
    message = f"elasticity chooses a global batch of {batch}, for data-parallel sizes of {shown}"
    config.findings.append(note(TARGET, "deepspeed-elastic", message, batch))
    return {"train.global_batch": batch}


def _on_ranks(config: Config, world: int | None, model_ranks: int) -> dict[str, Any]:
    """The elastic batch on so many ranks."""
    asked = config.values.get("elasticity")
    if asked is None or not world or world < model_ranks:
        return {}
    batch, micro = asked.on(world // model_ranks)
    fields = {"train.global_batch": batch} if batch else {}
    return fields | ({"layout.micro_batch": micro} if micro and batch else {})


def _training(config: Config) -> dict[str, Any]:
    take, quietly = config.take, config.quietly
    fields: dict[str, Any] = {}
    kind = quietly("optimizer.type", str, None, "the optimizer")
    config.values["optimizer"] = kind
    if kind and kind.lower() not in _ADAMS:
        message = f"optimizer {kind}; plait counts Adam's two states a parameter"
        config.findings.append(note(TARGET, "deepspeed-optimizer", message, kind))
    lr = quietly("optimizer.params.lr", float, None, "train.learning_rate")
    peak = quietly("scheduler.params.warmup_max_lr", float, None, "train.learning_rate")
    fields["train.learning_rate"] = lr if lr is not None else peak
    lowest = quietly("scheduler.params.cos_min_ratio", float, 0.0, "train.min_learning_rate")
    if fields["train.learning_rate"]:
        fields["train.min_learning_rate"] = (
            min(max(lowest, 0.0), 1.0) * fields["train.learning_rate"]
        )
    decay = quietly("optimizer.params.weight_decay", float, None, "train.weight_decay")
    fields["train.weight_decay"] = decay
    fields["train.eps"] = quietly("optimizer.params.eps", float, None, "train.eps")
    betas = config.settings.said.get("optimizer.params.betas")
    if betas is not None:
        config.settings.taken[betas.name] = (betas.value, "train.beta1, train.beta2")
        numbers = betas.value if isinstance(betas.value, list) else []
        if len(numbers) == 2 and all(isinstance(b, float) and 0 <= b < 1 for b in numbers):
            fields |= {"train.beta1": numbers[0], "train.beta2": numbers[1]}
    clip = take("gradient_clipping", float, 0.0, "train.clip")
    fields["train.clip"] = clip
    name = quietly("scheduler.type", str, None, "train.schedule")
    warmup = quietly("scheduler.params.warmup_num_steps", int, None, "train.warmup")
    steps = quietly("scheduler.params.total_num_steps", int, None, "train.steps")
    if name:
        fields |= {"train.warmup": warmup, "train.steps": steps}
        schedule = _SCHEDULES.get(name.lower())
        if schedule:
            fields["train.schedule"] = schedule
        else:
            message = f"scheduler {name}; plait has constant, cosine and WSD"
            config.findings.append(note(TARGET, "deepspeed-scheduler", message, name))
    if any(s.startswith("activation_checkpointing.") for s in config.settings.said):
        message = "activation_checkpointing says how, not whether: the model decides (--recompute)"
        config.findings.append(note(TARGET, "deepspeed-recompute", message))
        for key in ("partition_activations", "cpu_checkpointing", "number_checkpoints"):
            quietly(f"activation_checkpointing.{key}", None, None, "how activations are kept")
    op = quietly("gradient_allreduce_op", str, "mean", "how gradients are added up")
    config.values["allreduce_op"] = op
    return {path: value for path, value in fields.items() if value is not None}


def _offload(config: Config) -> None:
    """Where states live; plait keeps all on the device."""
    said = config.settings.said
    for part, old in (("optimizer", "cpu_offload"), ("param", "cpu_offload_params")):
        key = f"zero_optimization.offload_{part}.device"
        device = config.quietly(key, str, "none", f"where the {part}s live")
        if config.quietly(f"zero_optimization.{old}", bool, False, "the same, of old"):
            device = "cpu"
            message = f"{old} is deprecated; it is offload_{part} now"
            config.findings.append(note(TARGET, "deepspeed-deprecated", message))
        config.values[f"offload_{part}"] = device if device != "none" else None
        if device != "none":
            what = "optimizer states" if part == "optimizer" else "parameters"
            message = f"{what} live on {device}; plait keeps them on the device"
            config.findings.append(note(TARGET, "deepspeed-offload", message, device))
    whole = said.get("zero_optimization.offload_optimizer")
    if whole is not None:
        config.settings.taken[whole.name] = (whole.value, "where the optimizers live")


def _world(config: Config, world: int | None, model_ranks: int) -> int | None:
    """The ranks that the file itself implies: all three numbers of the batch say dp."""
    values = config.values
    batch, micro, accumulation = values["batch"], values["micro"], values["accumulation"]
    if world or not (batch and micro and accumulation) or values["elastic"]:
        return world
    if min(batch, micro, accumulation) < 1 or batch % (micro * accumulation):
        return None
    dp = batch // (micro * accumulation)
    message = (
        f"its batch, {batch} = {micro} x {accumulation} x dp, leaves dp {dp}: it runs on no other "
        f"number of devices than {dp * model_ranks}"
    )
    config.findings.append(note(TARGET, "deepspeed-world", message, dp * model_ranks))
    return dp * model_ranks if 0 < dp * model_ranks < 10**7 else None


def strangers(settings: Settings, known: list[str]) -> list[Finding]:
    """What becomes of keys that DeepSpeed does not know."""
    from plait.dialects.deepspeed.json import STRICT

    names = set(known)
    found = []
    ignored: list[str] = []
    for name in settings.said:
        if name in names or name in settings.taken or name.startswith("-"):
            continue
        section = name.partition(".")[0]
        if section in STRICT:
            message = f"{section} takes no {name.partition('.')[2] or 'such value'}"
            found.append(refused(TARGET, "deepspeed-unknown-key", AT_START, message, name))
        else:
            ignored.append(name)
    lost = [key for key in GONE if any(f"{s}.".startswith(f"{key}.") for s in settings.said)]
    if lost:
        message = f"0.19.8 has lost {', '.join(lost)}, and refuses to start with it"
        found.append(changed(TARGET, "deepspeed-gone", message, lost[0]))
    if ignored:
        message = f"it ignores what it does not know: {', '.join(ignored[:8])}"
        found.append(changed(TARGET, "deepspeed-ignored-key", message, ignored[0]))
    return found
