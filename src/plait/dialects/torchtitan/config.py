"""What TorchTitan's configuration means, whatever language it is written in.

Settings bear its dotted names ("parallelism.tensor_parallel_degree"), as JobConfig (up to 0.2.2:
TOML, command line), its copy in Primus and today's Trainer.Config have them. Three ages differ in
how a batch is counted:

    "0.2.2", "0.3.0"  samples of a data-parallel rank before the pipeline splits them
    "main"            tokens of a micro batch

What an activation checkpoint's class says is given as `activation_checkpoint.mode`, and what
picks a model as `model.name` and `model.flavor`.

Source of defaults: torchtitan/config/{job_config,configs}.py; of what they mean:
distributed/{parallel_dims,pipeline_parallel,fsdp}.py and trainer.py.
"""

from collections.abc import Mapping
from math import ceil
from typing import Any

from plait.dialects.launch import Told
from plait.dialects.nearest import smallest_world
from plait.dialects.settings import Settings
from plait.dialects.torchtitan.models import flavor_fields
from plait.spec import presets
from plait.spec.findings import Finding, UserError
from plait.spec.schedule import SCHEDULES, canonical

#: Where a degree is said, in plait's words; the default of each is 1.
DEGREES = {
    "tp": "parallelism.tensor_parallel_degree",
    "cp": "parallelism.context_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
    "ep": "parallelism.expert_parallel_degree",
    "dp_replicate": "parallelism.data_parallel_replicate_degree",
}
#: Options that only a configuration which counts tokens has.
TOKENS = (
    "training.num_tokens_per_microbatch_per_dp_rank",
    "training.num_tokens_per_train_step",
    "training.max_context_length",
    "parallelism.num_pp_microbatches",
)
#: Options that only one which counts samples has.
SAMPLES = (
    "training.local_batch_size",
    "training.global_batch_size",
    "training.seq_len",
    "parallelism.pipeline_parallel_microbatch_size",
)
#: What decides a rule but no field: name -> (kind, default, what it is).
_FACTS: dict[str, tuple[Any, Any, str]] = {
    "model.attention": (str, None, "which attention runs"),
    "model.moe_comm_backend": (str, "standard", "how tokens travel to experts"),
    "model.non_blocking_capacity_factor": (float, None, "whether the dispatcher ever waits"),
    "compile.enable": (bool, False, "whether the model is compiled"),
    "compile.enable_async_tensor_parallel": (bool, False, "tensor parallelism overlapped"),
    "parallelism.enable_async_tensor_parallel": (bool, False, "tensor parallelism overlapped"),
    "parallelism.spmd_backend": (str, None, "how sharding is expressed"),
    "parallelism.context_parallel_load_balancer": (str, "headtail", "how cp balances work"),
    "parallelism.context_parallel_ptrr_mask_key": (str, None, "how cp balances work"),
    "parallelism.expert_parallel_comm_backend": (str, "standard", "how tokens reach experts"),
    "training.disable_cuda_graphs": (bool, False, "whether a step is one CUDA graph"),
    "training.enable_cpu_offload": (bool, False, "states in host memory"),
    "debug.spmd_typechecking": (bool, False, "types of sharding are checked"),
    "checkpoint.enable": (bool, False, "whether checkpoints are written"),
    "checkpoint.keep_latest_k": (int, 10, "checkpoint.keep"),
    "checkpoint.create_seed_checkpoint": (bool, False, "only initial parameters are written"),
    "checkpoint.last_save_in_hf": (bool, False, "a checkpoint for Hugging Face"),
    "checkpoint.last_save_model_only": (bool, True, "a checkpoint without optimizer states"),
    "checkpoint.initial_load_in_hf": (bool, False, "a checkpoint of Hugging Face"),
    "checkpoint.initial_load_model_only": (bool, True, "a checkpoint without optimizer states"),
}
#: Training values: name -> (plait's path, kind, default).
_TRAINING: dict[str, tuple[str, Any, Any]] = {
    "training.steps": ("train.steps", int, 10000),
    "training.max_norm": ("train.clip", float, 1.0),
    "optimizer.lr": ("train.learning_rate", float, 8e-4),
    "optimizer.beta1": ("train.beta1", float, 0.9),
    "optimizer.beta2": ("train.beta2", float, 0.95),
    "optimizer.eps": ("train.eps", float, 1e-8),
    "optimizer.weight_decay": ("train.weight_decay", float, 0.1),
    "lr_scheduler.warmup_steps": ("train.warmup", int, 200),
    "debug.seed": ("train.seed", int, None),
    "training.seed": ("train.seed", int, None),
}


def understand(
    settings: Settings, told: Told, world: int | None = None, version: str | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a configuration says: the fields of a job file, and what `validation.rules` needs.

    What was assumed or is wrong goes into `settings.findings`.

    Args:
        world: ranks, where the launch says how many. version: "0.2.2", "0.3.0" or "main", where
            it is known; else the names of the options tell.
    """
    version = version or _version(settings)
    facts: dict[str, Any] = {"version": version, "said": tuple(settings.said)}
    for name, (kind, default, means) in _FACTS.items():
        facts[name] = settings.take(name, kind, default, means)
    facts["compile.components"] = _components(settings)
    fields = flavor_fields(settings, told, facts)
    fields |= _degrees(settings, facts)
    world = told.world or world
    if world is not None:
        fields["ranks"] = world
    fields |= _sharding(settings, fields, facts, world)
    fields |= _experts(settings, fields, facts)
    layers = _layers(fields, told)
    fields |= _pipeline(settings, fields, facts, layers)
    fields |= _batch(settings, fields, facts, version)
    fields |= _recompute(settings, facts)
    fields |= _dtypes(settings)
    fields |= _training(settings, fields)
    return fields, facts


def _version(settings: Settings) -> str:
    if any(name in settings for name in TOKENS):
        return "main"
    return "0.2.2"


def _note(settings: Settings, rule: str, message: str, level: str = "note") -> None:
    settings.findings.append(Finding(level, rule, f"TorchTitan: {message}"))  # type: ignore[arg-type]


def _components(settings: Settings) -> tuple[str, ...]:
    said = settings.take("compile.components", object, "model,loss", "what is compiled")
    words = said if isinstance(said, list | tuple) else str(said).split(",")
    return tuple(str(word).strip("[]'\" ") for word in words)


def _degrees(settings: Settings, facts: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for axis, name in DEGREES.items():
        fields[f"layout.{axis}"] = settings.take(name, int, 1, f"layout.{axis}")
    tp, cp = fields["layout.tp"], fields["layout.cp"]
    sequence = settings.take(
        "parallelism.enable_sequence_parallel", bool, True, "layout.sequence_parallel"
    )
    facts["sequence_parallel"] = sequence and tp > 1
    if tp > 1:
        fields["layout.sequence_parallel"] = sequence
    rotate = settings.take(
        "parallelism.context_parallel_rotate_method", str, "allgather", "layout.cp_method"
    )
    if cp > 1:
        # torch's ring attention by all-to-all sends one block a step; by all-gather all at once.
        fields["layout.cp_method"] = "ring" if rotate == "alltoall" else "all-gather"
    return fields


def _sharding(
    settings: Settings, fields: Mapping[str, Any], facts: dict[str, Any], world: int | None
) -> dict[str, Any]:
    """`dp_shard` where it is a number, and what sharding amounts to.

    FSDP2 shards parameters, gradients and states alike: ZeRO-3; where parameters stay gathered
    after the forward pass it is ZeRO-2. Over one rank it shards nothing.
    """
    shard = settings.take("parallelism.data_parallel_shard_degree", int, -1, "layout.dp_shard")
    policy = settings.take("parallelism.fsdp_reshard_after_forward", str, "default", "layout.zero")
    facts |= {"dp_shard": shard, "reshard": policy}
    pp, cp = fields["layout.pp"], fields["layout.cp"]
    kept = policy == "never" or (policy == "default" and pp > 1)
    sharded = 2 if kept else 3
    said = {} if shard == -1 else {"layout.dp_shard": shard}
    degree = shard
    if shard == -1:
        others = fields["layout.tp"] * cp * pp * fields["layout.dp_replicate"]
        size = world or smallest_world({**fields, "layout.zero": sharded})[0]
        degree = max(1, size // others) if others > 0 else 1
    if degree * cp > 1:
        return said | {"layout.zero": sharded}
    return {"layout.dp_shard": 1, "layout.zero": 0}


def _experts(
    settings: Settings, fields: Mapping[str, Any], facts: dict[str, Any]
) -> dict[str, Any]:
    """Tensor parallelism inside experts: without EP they are split as the rest of the model is;
    with EP they are whole, but in old versions where the option says otherwise."""
    said = settings.take("parallelism.expert_tensor_parallel_degree", int, 1, "layout.etp")
    facts["etp"] = said
    if not facts["experts"]:
        return {}
    if fields["layout.ep"] == 1:
        return {"layout.etp": fields["layout.tp"]}
    return {"layout.etp": said}


def _layers(fields: Mapping[str, Any], told: Told) -> int | None:
    if told.model is not None:
        return told.model.layers
    if "model.layers" in fields:
        return int(fields["model.layers"])
    name = fields.get("model") or fields.get("model.name")
    try:
        return presets.model(name).layers if name else None
    except UserError:
        return None


def _pipeline(
    settings: Settings, fields: Mapping[str, Any], facts: dict[str, Any], layers: int | None
) -> dict[str, Any]:
    take = settings.take
    name = take("parallelism.pipeline_parallel_schedule", str, "1F1B", "layout.schedule")
    table = take("parallelism.pipeline_parallel_schedule_csv", str, "", "layout.schedule")
    per_stage = take("parallelism.pipeline_parallel_layers_per_stage", int, None, "layout.vpp")
    first = take("parallelism.pipeline_parallel_first_stage_less_layers", int, 1, "layout.stages")
    last = take("parallelism.pipeline_parallel_last_stage_less_layers", int, 1, "layout.stages")
    parts = take("parallelism.module_fqns_per_model_part", object, None, "layout.stages")
    facts |= {"schedule": name, "csv": table, "layers_per_stage": per_stage}
    facts |= {"first_less": first, "last_less": last, "layers": layers, "parts": None}
    pp = fields["layout.pp"]
    if pp <= 1:
        return {}
    plain = canonical(name)
    single = plain is not None and SCHEDULES[plain].vpp == (1, 1)
    vpp = 1 if single else 2
    stages = _stages_of_parts(parts)
    if stages is not None:
        facts["parts"] = stages
        vpp = max(1, len(stages) // pp)
    elif per_stage and per_stage > 0 and layers:
        vpp = max(1, ceil((layers + first + last) / per_stage) // pp)
    found: dict[str, Any] = {"layout.schedule": table or plain or name}
    found["layout.vpp"] = vpp
    if stages is None and layers:
        stages = split(pp * vpp, layers, first, last)
    if stages is not None and sum(stages) == (layers or sum(stages)):
        found["layout.stages"] = tuple(stages)
    return found


def split(stages: int, layers: int, first: int = 1, last: int = 1) -> list[int] | None:
    """Layers of each stage as TorchTitan shares them out: embedding and head count as `first` and
    `last` layers, what is left over goes to the first stages. None where it refuses.

    Source: pipeline_parallel.py, _generate_llm_fqn_per_model_part.
    """
    if stages < 1 or layers < 1 or stages > layers + 2:
        return None
    if stages == 1:
        return [layers]
    least, more = divmod(layers + first + last, stages)
    if least == 0 or first > least or last > least:
        return None
    shares = [least + (i < more) for i in range(stages)]
    shares[0] -= first
    shares[-1] -= last
    return shares


def _stages_of_parts(parts: Any) -> list[int] | None:
    """Layers of each part of `module_fqns_per_model_part`."""
    if not isinstance(parts, list | tuple) or not parts:
        return None
    if not all(isinstance(part, list | tuple) for part in parts):
        return None
    return [sum(str(name).startswith("layers.") for name in part) for part in parts]


def _batch(
    settings: Settings, fields: Mapping[str, Any], facts: dict[str, Any], version: str
) -> dict[str, Any]:
    """Samples of a micro batch, and how many micro batches make a step."""
    counts = _tokens if version == "main" else _samples
    micro, batches, total, seq = counts(settings, facts, fields["layout.pp"] > 1)
    found = {"layout.micro_batch": micro, "train.seq_len": seq}
    if total is not None:
        return found | {"train.global_batch": total}
    return found | {"train.accumulation": batches}


def _tokens(
    settings: Settings, facts: dict[str, Any], pipeline: bool
) -> tuple[int, int, int | None, int]:
    take = settings.take
    tokens = take(TOKENS[0], int, 16384, "layout.micro_batch")
    step = take(TOKENS[1], int, -1, "train.global_batch")
    longest = take(TOKENS[2], int, 2048, "train.seq_len")
    batches = take(TOKENS[3], int, 1, "train.accumulation")
    batches = batches if pipeline else 1
    facts |= {"tokens": tokens, "step_tokens": step, "longest": longest, "batches": batches}
    if longest < 1 or tokens < 1:
        return 1, batches, None, max(longest, 1)
    seq = longest
    if tokens % longest:
        seq = tokens
        message = f"a micro batch of {tokens} tokens holds no whole number of {longest}; it is"
        _note(settings, "torchtitan-packed", f"{message} taken for one sample of {tokens}")
    total = None if step < 0 else max(1, step // seq)
    if step > 0 and step % seq:
        message = f"{step} tokens a step are no whole number of samples of {seq}"
        _note(settings, "torchtitan-packed", message, "warning")
    return tokens // seq, batches, total, seq


def _samples(
    settings: Settings, facts: dict[str, Any], pipeline: bool
) -> tuple[int, int, int | None, int]:
    take = settings.take
    local = take(SAMPLES[0], int, 8, "layout.micro_batch")
    total = take(SAMPLES[1], int, -1, "train.global_batch")
    seq = take(SAMPLES[2], int, 2048, "train.seq_len")
    part = take(SAMPLES[3], int, 1, "layout.micro_batch")
    facts |= {"local": local, "global": total, "longest": seq, "part": part}
    said = None if total < 0 else total
    if not pipeline or part < 1:
        return local, 1, said, seq
    return part, max(1, local // part), said, seq


def _recompute(settings: Settings, facts: dict[str, Any]) -> dict[str, Any]:
    take = settings.take
    mode = take("activation_checkpoint.mode", str, "selective", "layout.recompute")
    every = str(take("activation_checkpoint.selective_ac_option", str, "op", "layout.recompute"))
    budget = take("activation_checkpoint.memory_budget", float, 0.5, "layout.recompute")
    facts["ac_mode"] = mode
    if mode in ("full", "none"):
        return {"layout.recompute": mode}
    if mode == "memory_budget":
        near = "none" if budget >= 1 else "full" if budget <= 0 else "selective"
        message = f"which activations a memory budget of {budget} keeps, the compiler decides;"
        _note(settings, "torchtitan-recompute", f"{message} taken for {near}")
    elif mode == "selective" and every == "op":
        near = "selective"
        message = "keeps what attention and every second matrix product give, and recomputes the"
        _note(settings, "torchtitan-recompute", f"{message} rest; taken for norm and mlp")
    elif mode == "selective":
        near = "full" if every == "1" else "selective"
        message = f"recomputes one layer in {every} whole and keeps the others; taken for {near}"
        _note(settings, "torchtitan-recompute", message)
    else:
        return {"layout.recompute": mode}
    return {"layout.recompute": near}


def _dtypes(settings: Settings) -> dict[str, Any]:
    stored = settings.take("training.dtype", str, "float32", "dtype of master weights")
    used = settings.take("training.mixed_precision_param", str, "bfloat16", "train.dtype")
    reduced = settings.take("training.mixed_precision_reduce", str, "float32", "train.grad_dtype")
    if stored == "bfloat16":
        message = "parameters, gradients and Adam states are all bfloat16, without float32 copies;"
        _note(settings, "torchtitan-dtype", f"{message} plait counts float32 states", "warning")
        return {"train.dtype": "bfloat16", "train.grad_dtype": "bfloat16"}
    return {"train.dtype": used, "train.grad_dtype": reduced}


def _training(settings: Settings, fields: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (path, kind, default) in _TRAINING.items():
        value = settings.take(name, kind, default, path)
        if value is not None:
            found[path] = value
    steps, rate = found["train.steps"], found["train.learning_rate"]
    ratio = settings.take("lr_scheduler.decay_ratio", float, None, "train.decay")
    shape = settings.take("lr_scheduler.decay_type", str, "linear", "train.schedule")
    low = settings.take("lr_scheduler.min_lr_factor", float, 0.0, "train.min_learning_rate")
    found["train.min_learning_rate"] = rate * low
    # A decay over the whole run by a cosine is plait's; one at the end is its "wsd".
    found["train.schedule"] = "cosine" if shape == "cosine" and ratio is None else "wsd"
    if low == 1:
        found["train.schedule"] = "constant"
    rest = max(1, steps - found["train.warmup"])
    found["train.decay"] = rest if ratio is None else max(1, min(rest, round(steps * ratio)))
    return found
