"""Fields of Megatron-Bridge's ConfigContainer: by which of them go Megatron's arguments, and what
Bridge itself makes of them before Megatron sees any."""

from dataclasses import dataclass, field, replace
from typing import Any

from plait.dialects.launch import changed, note, refused
from plait.dialects.megatron_bridge.recipes import Recipe
from plait.dialects.settings import Setting
from plait.spec.build import convert
from plait.spec.chunks import balanced
from plait.spec.findings import Finding, closest
from plait.spec.jobfile import draft

TARGET = "Megatron-Bridge"

#: Part of the container -> Megatron's arguments that are fields of it under the same name; the
#: rest are fields of the model.
_PARTS = {
    "train": "train_iters train_samples global_batch_size micro_batch_size rampup_batch_size "
    "decrease_batch_size_if_needed manual_gc check_weight_hash_across_dp_replicas_interval",
    "optimizer": "optimizer lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad "
    "use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_dtype "
    "exp_avg_sq_dtype optimizer_cpu_offload optimizer_offload_fraction loss_scale",
    "scheduler": "lr_decay_style lr_decay_iters lr_warmup_iters lr_warmup_samples "
    "lr_warmup_fraction lr_wsd_decay_iters lr_wsd_decay_style start_weight_decay end_weight_decay",
    "ddp": "use_distributed_optimizer use_megatron_fsdp use_custom_fsdp overlap_grad_reduce "
    "data_parallel_sharding_strategy num_distributed_optimizer_instances overlap_param_gather "
    "outer_dp_sharding_strategy average_in_collective nccl_ub align_param_gather "
    "megatron_fsdp_version",
    "dist": "use_torch_fsdp2 use_tp_pp_dp_mapping distributed_backend "
    "torch_fsdp2_reshard_after_forward",
    "rng": "seed data_parallel_random_init te_rng_tracker",
    "checkpoint": "ckpt_format save load async_save use_persistent_ckpt_worker "
    "ckpt_fully_parallel_load dist_ckpt_strictness",
    "tokenizer": "tokenizer_type tokenizer_model",
    "comm_overlap": "tp_comm_overlap overlap_moe_expert_parallel_comm delay_wgrad_compute",
}
#: Arguments that are called otherwise here; None: there is no such field, or Bridge has its own.
_OTHERWISE: dict[str, str | None] = {
    "num_experts": "model.num_moe_experts",
    "swiglu": "model.gated_linear_unit",
    "decoder_first_pipeline_num_layers": "model.num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "model.num_layers_in_last_pipeline_stage",
    "group_query_attention": None,
    "untie_embeddings_and_output_weights": None,
    "accumulate_allreduce_grads_in_fp32": None,
    "grad_reduce_in_bf16": None,
    "norm_epsilon": "model.layernorm_epsilon",
    "use_rotary_position_embeddings": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "recompute_activations": None,
    "padded_vocab_size": None,
}
_PLACES = {name: f"{part}.{name}" for part, names in _PARTS.items() for name in names.split()}


def spell(argument: str) -> str | None:
    """Megatron's argument -> the field that it is here."""
    if argument in _OTHERWISE:
        return _OTHERWISE[argument]
    return _PLACES.get(argument, f"model.{argument}")


#: Fields without which there is no layout, batch or model; of others nobody needs to know what a
#: variable holds.
_DECIDING = frozenset(
    "model.sequence_parallel model.cp_comm_type model.hierarchical_context_parallel_sizes "
    "model.pipeline_model_parallel_layout model.num_layers_in_first_pipeline_stage "
    "model.num_layers_in_last_pipeline_stage model.seq_length dataset.seq_length "
    "dataset.sequence_length train.global_batch_size train.micro_batch_size mixed_precision "
    "model.recompute_granularity model.recompute_modules ddp.use_distributed_optimizer "
    "optimizer.use_distributed_optimizer ddp.use_megatron_fsdp dist.use_torch_fsdp2 "
    "ddp.data_parallel_sharding_strategy ddp.num_distributed_optimizer_instances "
    "model.num_layers model.num_attention_heads model.num_query_groups model.num_moe_experts "
    "model.kv_channels model.moe_router_topk recipe".split()
)


def _decides(path: str) -> bool:
    return path in _DECIDING or (path.startswith("model.") and path.endswith("_size"))


#: Names of precision recipes -> (dtype, whether gradients are reduced in float32, in what the
#: matrices are multiplied) (training/mixed_precision.py).
_LOW = {
    "delayed_scaling": "FP8", "mxfp8": "MXFP8", "current_scaling": "FP8",
    "subchannel_scaling": "FP8", "nvfp4": "NVFP4",
}  # fmt: skip
PRECISIONS = frozenset(
    [f"{dtype}_mixed" for dtype in ("bf16", "fp16")]
    + [
        f"{dtype}_with_{low}_mixed"
        for dtype in ("bf16", "fp16")
        for low in ("fp8_delayed_scaling", "mxfp8", "fp8_current_scaling", "fp8_subchannel_scaling")
    ]
    + ["bf16_with_nvfp4_mixed", "nemotron_3_super_bf16_with_nvfp4_mixed"]
    + [f"{name}_bf16_with_fp8_current_scaling_mixed" for name in ("nemotron_h", "nanov2")]
)


@dataclass
class Container:
    """The fields that a launch sets, of its recipe and its own, and what Bridge makes of them.

    Attributes:
        settings: field -> the setting that holds; the recipe's have no line.
        said: fields that the launch sets itself.
        findings: what Bridge changes or refuses on the way.
        grad_dtype: in which gradients are reduced; None: as Megatron has it.
    """

    settings: dict[str, Setting]
    said: frozenset[str] = frozenset()
    findings: list[Finding] = field(default_factory=list)
    grad_dtype: str | None = None

    def value(self, name: str, kind: Any, default: Any = None) -> Any:
        """A field's value, where it is one of the kind; else the default."""
        setting = self.settings.get(name)
        if setting is None or setting.value is None or setting.open:
            return default
        try:
            return convert(setting.value, kind, name, [])
        except (TypeError, ValueError, OverflowError):
            return default

    def on(self, name: str, default: bool = False) -> bool:
        return bool(self.value(name, bool, default))

    def put(self, name: str, value: Any, where: str) -> None:
        """A field as Bridge sets it."""
        self.settings.pop(name, None)
        self.settings[name] = Setting(name, value, where)


def resolved(recipe: Recipe | None, said: list[Setting], synced: bool) -> Container:
    """The container as it is when Megatron sees it.

    Args:
        said: fields of the launch.
        synced: the launcher makes the model's length that of the data, and the pipeline's layout
            anew where the launch changes its stages.
    """
    name, fields = (recipe.name, recipe.settings) if recipe else ("", {})
    said = [s if not s.open or _decides(s.name) else Setting(s.name, None, s.where) for s in said]
    base = {path: Setting(path, value, f"recipe {name}") for path, value in fields.items()}
    own = {setting.name: setting for setting in said}
    whole = tuple(f"{path}." for path in own if "." not in path)
    rest = {
        path: setting
        for path, setting in base.items()
        if path not in own and not path.startswith(whole)
    }
    container = Container(rest | own, frozenset(own))
    if synced and recipe:
        _stages(container, recipe)
    _experts(container)
    _lengths(container, synced)
    _precision(container)
    _distributed(container)
    _overlap(container)
    return container


def _stages(c: Container, recipe: Recipe) -> None:
    """A recipe's split of its layers does not outlive other stages or chunks
    (recipe_runner.sync_model_pipeline_layout)."""
    path = "model.pipeline_model_parallel_layout"
    stages = "model.pipeline_model_parallel_size"
    if not c.said & {stages, "model.virtual_pipeline_model_parallel_size"}:
        return
    rebuilt = recipe.rebuilt and path not in c.said
    gone = [path] if rebuilt else []
    if stages in c.said and path not in c.settings:
        ends = ("first", "last")
        gone += [f"model.num_layers_in_{end}_pipeline_stage" for end in ends]
    gone = [name for name in gone if name in c.settings and name not in c.said]
    for name in gone:
        del c.settings[name]
    if gone:
        message = f"{' and '.join(gone)} of the recipe is made anew for these stages; balanced here"
        c.findings.append(note(TARGET, "megatron-bridge-stages", message))
    if rebuilt and (layers := _layers(c, recipe)):
        c.put(path, _balanced(c, layers), "made anew")


def _layers(c: Container, recipe: Recipe) -> int | None:
    made = draft("plan", None, recipe.model | {"ranks": 1}) if recipe.model else None
    own = made.job.model.layers if made and made.job else None
    return c.value("model.num_layers", int, own)


def _balanced(c: Container, layers: int) -> str | None:
    """A layout of equal stages, in Megatron's letters."""
    pp = c.value("model.pipeline_model_parallel_size", int, 1)
    vpp = c.value("model.virtual_pipeline_model_parallel_size", int, 1)
    if not 1 < pp * vpp <= layers or layers > 10_000:
        return None
    rows = ["t" * n for n in balanced(layers, pp * vpp)]
    rows[0], rows[-1] = "E" + rows[0], rows[-1] + "m" * c.value("model.mtp_num_layers", int, 0)
    return "|".join(rows) + "L"


def _experts(c: Container) -> None:
    """Experts are whole where EP is above 1 and nobody says otherwise
    (models/transformer_config.py, _set_moe_expert_tensor_parallel_default)."""
    path, ep = "model.expert_tensor_parallel_size", c.value("model.expert_model_parallel_size", int)
    if ep is None or ep <= 1 or c.value(path, int) is not None:
        return
    if path in c.settings and c.settings[path].open:
        return
    tp = c.value("model.tensor_model_parallel_size", int, 1)
    if tp > 1:
        message = (
            f"ETP is 1, as nothing says it and EP is {ep}; older releases make it as large as TP "
            f"({tp}), where each stage needs ETP x EP = {tp * ep} ranks"
        )
        c.findings.append(note(TARGET, "megatron-bridge-etp", message, 1))
    c.put(path, 1, "by default where EP is above 1")


def _lengths(c: Container, synced: bool) -> None:
    """The model's length is that of the data (recipe_runner.sync_model_dataset_sequence_length;
    without it ConfigContainer.validate refuses two that differ)."""
    if "dataset.sequence_length" in c.settings:
        old = c.settings["dataset.sequence_length"]
        c.put("dataset.seq_length", old.value, old.where)
        c.said |= {"dataset.seq_length"} if "dataset.sequence_length" in c.said else set()
    data, model = c.value("dataset.seq_length", int), c.value("model.seq_length", int)
    if data is None or model is None or data == model:
        if data is not None and model is None:
            c.put("model.seq_length", data, c.settings["dataset.seq_length"].where)
        return
    if "model.seq_length" in c.said and "dataset.seq_length" not in c.said:
        message = f"model.seq_length {model}, but the data has samples of {data} tokens"
    elif "model.seq_length" in c.said:
        message = f"model.seq_length {model} and dataset.seq_length {data} differ"
    else:
        message = f"dataset.seq_length {data}, but the recipe's model.seq_length is {model}"
    if synced:
        if "model.seq_length" in c.said:
            end = f"{message}: the launcher makes both {data} (say dataset.seq_length)"
            c.findings.append(changed(TARGET, "megatron-bridge-seq-length", end, model))
        c.put("model.seq_length", data, "dataset.seq_length")
    else:
        c.findings.append(
            refused(TARGET, "megatron-bridge-seq-length", "at start", message, model,
                    train__seq_len=data)
        )  # fmt: skip
        c.put("model.seq_length", data, "dataset.seq_length")


def _precision(c: Container) -> None:
    """A precision recipe sets dtypes in model, optimizer and ddp over what these say."""
    name = c.value("mixed_precision", str)
    if name is not None:
        plain = name.replace("-", "_")
        if plain not in PRECISIONS:
            near = closest(plain, PRECISIONS)
            message = f"mixed_precision {name!r} is none of its recipes"
            finding = refused(TARGET, "megatron-bridge-precision", "at start", message, name)
            suggest = {"mixed_precision": near} if near else {}
            c.findings.append(replace(finding, suggest=suggest))
            plain = near or "bf16_mixed"
        dtype = "float16" if plain.startswith("fp16") else "bfloat16"
        where = f"mixed_precision {plain}"
        c.put("model.bf16", dtype == "bfloat16", where)
        c.put("model.fp16", dtype == "float16", where)
        low = next((word for key, word in _LOW.items() if key in plain), None)
        if low:
            message = f"{plain} multiplies matrices in {low}; counted in {dtype}"
            c.findings.append(note(TARGET, "megatron-bridge-low-precision", message, plain))
        wide = c.on("mixed_precision.grad_reduce_in_fp32", dtype == "bfloat16")
        _said_gradients(c, wide, plain)
    else:
        dtype = "bfloat16" if c.on("model.bf16") else "float16" if c.on("model.fp16") else None
        if dtype is None and c.on("mixed_precision.bf16"):
            dtype = "bfloat16"
            c.put("model.bf16", True, "mixed_precision.bf16")
        wide = c.on("mixed_precision.grad_reduce_in_fp32", c.on("ddp.grad_reduce_in_fp32"))
    c.grad_dtype = "float32" if wide or dtype is None else dtype


def _said_gradients(c: Container, wide: bool, name: str) -> None:
    said = c.value("ddp.grad_reduce_in_fp32", bool)
    if "ddp.grad_reduce_in_fp32" in c.said and said is not None and said != wide:
        message = (
            f"ddp.grad_reduce_in_fp32={str(said).lower()} has no effect: mixed_precision {name} "
            f"sets it to {str(wide).lower()} (say mixed_precision.grad_reduce_in_fp32)"
        )
        c.findings.append(changed(TARGET, "megatron-bridge-grad-dtype", message, said))


def _distributed(c: Container) -> None:
    """The distributed optimizer is on if either place says so, Megatron-FSDP if either does
    (training/config.py)."""
    ddp, optimizer = "ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer"
    one, other = c.on(ddp), c.on(optimizer)
    if one != other and (ddp in c.said or optimizer in c.said):
        off = ddp if not one else optimizer
        if off in c.said:
            message = f"{off}=false has no effect: the other one is true, and both are switched on"
            c.findings.append(changed(TARGET, "megatron-bridge-distributed-optimizer", message))
    on = one or other
    if c.on("dist.use_megatron_fsdp") or c.on("ddp.use_megatron_fsdp"):
        c.put("ddp.use_megatron_fsdp", True, "ddp or dist")
        version = c.value("ddp.megatron_fsdp_version", int, 1)
        if version == 1 and not on:
            message = "Megatron-FSDP switches the distributed optimizer on"
            c.findings.append(changed(TARGET, "megatron-bridge-distributed-optimizer", message))
        on = version == 1
    c.put(ddp, on, "ddp or optimizer")


def _overlap(c: Container) -> None:
    """Overlap of tensor parallel communication is switched off where it cannot be
    (training/comm_overlap.py)."""
    if not c.on("comm_overlap.tp_comm_overlap"):
        return
    tp, sequence = (
        c.value("model.tensor_model_parallel_size", int, 1),
        c.on("model.sequence_parallel"),
    )
    if tp < 2 or not sequence:
        why = f"TP is {tp}" if tp < 2 else "model.sequence_parallel is off"
        if "comm_overlap.tp_comm_overlap" in c.said:
            message = f"comm_overlap.tp_comm_overlap is switched off: {why}"
            c.findings.append(changed(TARGET, "megatron-bridge-tp-overlap", message))
        c.put("comm_overlap.tp_comm_overlap", False, why)
