"""What Megatron says to options that do not go together: sharding, recompute, mixtures, overlap,
checkpoints.

Sources: megatron/training/arguments.py, core/transformer/transformer_config.py.
"""

from collections.abc import Iterator

from plait.dialects.launch import AT_START
from plait.dialects.megatron.layout import SHARDING
from plait.dialects.megatron.validation import Case
from plait.spec.findings import Finding

#: Switches that only these rules ask for.
SWITCHES = (
    "tp_comm_overlap", "overlap_grad_reduce", "overlap_param_gather", "moe_shared_expert_overlap",
    "overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "distribute_saved_activations",
    "calculate_per_token_loss", "async_save", "use_persistent_ckpt_worker", "moe_enable_deepep",
    "add_position_embedding", "use_checkpoint_args", "mock_data", "checkpoint_activations",
    "moe_grouped_gemm", "defer_embedding_wgrad_compute", "use_tp_pp_dp_mapping",
)  # fmt: skip
#: Those that are on unless they are switched off.
ON = ("gradient_accumulation_fusion", "add_position_embedding")
#: Words and numbers that only these rules ask for: argument -> (kind, default).
WORDS = {
    "ckpt_format": (str, "torch_dist"),
    "megatron_fsdp_version": (int, 1),
    "outer_dp_sharding_strategy": (str, "no_shard"),
    "moe_flex_dispatcher_backend": (str, None),
    "tensor_parallel_num_weight_shards": (int, None),
    "expert_tensor_parallel_num_weight_shards": (int, None),
    "data_path": (None, None),
    "batch_size": (int, None),
    "warmup": (int, None),
    "model_parallel_size": (int, None),
}

#: What `recompute_modules` may name.
MODULES = (
    "core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts",
    "gdn_norm_out", "gdp_in_proj", "gdp_qkv", "mhc",
)  # fmt: skip

#: Arguments that are no longer valid -> what stands in their place.
GONE = {
    "batch_size": "micro_batch_size",
    "warmup": "lr_warmup_fraction",
    "model_parallel_size": "tensor_model_parallel_size",
    "checkpoint_activations": "recompute_granularity",
}

_Wrong = tuple[object, str]


def _each(case: Case, rule: str, checks: tuple[_Wrong, ...]) -> Iterator[Finding]:
    for wrong, message in checks:
        if wrong:
            yield case.refused(rule, message, AT_START)


def gone(case: Case) -> Iterator[Finding]:
    """Arguments of earlier versions, which stop the parser."""
    for old, new in GONE.items():
        if case.fact(old):
            message = f"{case.name(old)} is no longer valid; it is {case.name(new)}"
            yield case.refused("gone", message, value=case.fact(old))


def dtypes(case: Case) -> Iterator[Finding]:
    fact = case.fact
    data = bool(fact("data_path")) + bool(fact("mock_data"))
    yield from _each(case, "dtype", ((fact("fp16") and fact("bf16"), "fp16 and bf16 together"),))
    yield from _each(
        case,
        "conflict",
        (
            (fact("train_iters") and fact("train_samples"), "steps and samples to train together"),
            (
                fact("lr_warmup_fraction") is not None and fact("lr_warmup_iters"),
                "only one of warm-up fraction and warm-up steps may be given",
            ),
            (data > 1, "data paths and mock data together"),
        ),
    )


def torch_fsdp(case: Case) -> Iterator[Finding]:
    fact, layout = case.fact, case.job.layout
    if not fact("use_torch_fsdp2"):
        return
    name = case.name("use_torch_fsdp2")
    untied = fact("untie_embeddings_and_output_weights")
    yield from _each(
        case,
        "torch-fsdp2",
        (
            (layout.pp > 1, f"{name} with PP {layout.pp}"),
            (layout.ep > 1, f"{name} with EP {layout.ep}"),
            (fact("use_distributed_optimizer"), f"{name} with the distributed optimizer"),
            (
                fact("gradient_accumulation_fusion"),
                f"{name} with gradient accumulation fusion, which is on by default",
            ),
            (
                fact("ckpt_format") not in ("torch_dist", "torch_dcp"),
                f"{name} with checkpoints {fact('ckpt_format')}; it takes torch_dist, torch_dcp",
            ),
            (
                case.said("hidden_size") and not untied,
                f"{name} needs {case.name('untie_embeddings_and_output_weights')}",
            ),
            (fact("fp16"), f"{name} with fp16"),
        ),
    )


def megatron_fsdp(case: Case) -> Iterator[Finding]:
    fact = case.fact
    if not (fact("use_megatron_fsdp") or fact("use_custom_fsdp")):
        return
    name, strategy = case.name("use_megatron_fsdp"), fact("data_parallel_sharding_strategy")
    second = fact("megatron_fsdp_version") == 2
    if not second and not fact("use_distributed_optimizer"):
        yield case.changed("fsdp-optimizer", f"{name} switches the distributed optimizer on")
    yield from _each(
        case,
        "fsdp",
        (
            (
                second and fact("use_distributed_optimizer"),
                f"version 2 of {name} with the distributed optimizer",
            ),
            (
                fact("ckpt_format") != "fsdp_dtensor",
                f"{name} writes checkpoints fsdp_dtensor, not {fact('ckpt_format')}",
            ),
            (
                fact("optimizer", "adam") not in ("adam", "sgd"),
                f"{name} with optimizer {fact('optimizer')}",
            ),
            (strategy not in SHARDING, f"sharding strategy {strategy!r}"),
            (
                fact("outer_dp_sharding_strategy") == "optim" and strategy != "optim_grads_params",
                "outer sharding of the optimizer with other than optim_grads_params",
            ),
        ),
    )


def overlaps(case: Case) -> Iterator[Finding]:
    """What may be hidden behind what."""
    fact, layout = case.fact, case.job.layout
    sharded = fact("use_distributed_optimizer") or fact("use_megatron_fsdp")
    gather = case.name("overlap_param_gather")
    yield from _each(
        case,
        "overlap",
        (
            (
                fact("tp_comm_overlap") and not case.sequence_parallel,
                f"{case.name('tp_comm_overlap')} without {case.name('sequence_parallel')}",
            ),
            (
                fact("overlap_param_gather") and not (sharded or fact("optimizer") == "dist_muon"),
                f"{gather} without the distributed optimizer",
            ),
            (
                fact("overlap_param_gather") and not fact("overlap_grad_reduce"),
                f"{gather} without {case.name('overlap_grad_reduce')}",
            ),
            (
                fact("defer_embedding_wgrad_compute") and layout.pp == 1,
                f"{case.name('defer_embedding_wgrad_compute')} without a pipeline",
            ),
            (
                fact("delay_wgrad_compute") and not fact("overlap_moe_expert_parallel_comm"),
                f"{case.name('delay_wgrad_compute')} without "
                f"{case.name('overlap_moe_expert_parallel_comm')}",
            ),
        ),
    )
    if fact("overlap_moe_expert_parallel_comm"):
        name = case.name("overlap_moe_expert_parallel_comm")
        modules = fact("recompute_modules", ())
        depth = str(fact("mtp_num_layers", 0))
        yield from _each(
            case,
            "expert-overlap",
            (
                (layout.ep <= 1, f"{name} without expert parallelism"),
                (
                    fact("moe_token_dispatcher_type") not in ("alltoall", "flex"),
                    f"{name} with dispatcher {fact('moe_token_dispatcher_type')}",
                ),
                (layout.pp > 1 and layout.vpp <= 1, f"{name} in a pipeline of one chunk a rank"),
                (fact("recompute_granularity") == "full", f"{name} with full recompute"),
                ("moe" in modules, f"{name} with moe recomputed"),
                (not (fact("bf16") or fact("fp16")), f"{name} in fp32"),
                (fact("moe_shared_expert_overlap"), f"{name} with the shared experts overlapped"),
                (depth not in ("0", "1", "None"), f"{name} with more than one further token"),
            ),
        )


def recompute(case: Case) -> Iterator[Finding]:
    fact = case.fact
    kind, method, count = (
        fact(f"recompute_{name}") for name in ("granularity", "method", "num_layers")
    )
    modules, layout = fact("recompute_modules", ()), case.job.layout
    strange = [m for m in modules if m not in MODULES]
    spread = fact("distribute_saved_activations")
    yield from _each(
        case,
        "recompute",
        (
            (kind not in (None, "full", "selective"), f"recompute {kind!r}"),
            (method not in (None, "uniform", "block"), f"recompute method {method!r}"),
            (kind == "full" and method is None, "full recompute without a method"),
            (kind == "full" and count is None, "full recompute without a number of layers"),
            (kind == "selective" and method, "selective recompute with a method"),
            (kind == "selective" and count, "selective recompute with a number of layers"),
            (kind == "selective" and strange, f"recompute of {', '.join(strange)}"),
            (
                kind == "selective" and "moe_act" in modules and not fact("moe_grouped_gemm"),
                f"recompute of moe_act without {case.name('moe_grouped_gemm')}",
            ),
            (
                kind == "selective"
                and "mla_up_proj" in modules
                and not fact("multi_latent_attention"),
                "recompute of mla_up_proj without latent attention",
            ),
            (
                kind == "selective"
                and "shared_experts" in modules
                and fact("moe_shared_expert_overlap"),
                "recompute of shared_experts that are overlapped",
            ),
            (spread and layout.tp <= 1, "saved activations spread without tensor parallelism"),
            (spread and kind != "full", "saved activations spread without full recompute"),
            (spread and layout.sequence_parallel, "saved activations spread beside "
             "sequence parallelism"),
        ),
    )  # fmt: skip
    if kind is None and (method or count):
        message = f"{case.name('recompute_method')} without {case.name('recompute_granularity')} "
        yield case.changed("recompute-idle", f"{message}recomputes nothing")


def mixtures(case: Case) -> Iterator[Finding]:
    """The router's options."""
    fact = case.fact
    count = fact("num_experts")
    width = fact("moe_ffn_hidden_size")
    if not count:
        if width and case.said("hidden_size") and not fact("hybrid_layer_pattern"):
            message = f"{case.name('moe_ffn_hidden_size')} without {case.name('num_experts')}"
            yield case.refused("no-experts", message)
        return
    score, topk = fact("moe_router_score_function"), fact("moe_router_topk")
    kinds = fact("moe_router_load_balancing_type", ())
    groups, best = fact("moe_router_num_groups"), fact("moe_router_group_topk")
    capacity, dispatcher = fact("moe_expert_capacity_factor"), fact("moe_token_dispatcher_type")
    own = [k for k in kinds if k in ("sinkhorn", "quantile_balancing")]
    layout = case.job.layout
    yield from _each(
        case,
        "router",
        (
            (
                topk == 1
                and score == "softmax"
                and not fact("moe_router_pre_softmax")
                and "sinkhorn" not in kinds,
                f"top-1 of a softmax needs {case.name('moe_router_pre_softmax')}",
            ),
            (
                fact("moe_router_enable_expert_bias") and score not in ("sigmoid", "sqrtsoftplus"),
                f"{case.name('moe_router_enable_expert_bias')} with {score} scores; it takes "
                "sigmoid or sqrtsoftplus",
            ),
            (
                capacity is not None and capacity >= 0 and own,
                f"{case.name('moe_expert_capacity_factor')} with {', '.join(own)}",
            ),
            (
                fact("moe_pad_expert_input_to_capacity") and capacity is None,
                f"{case.name('moe_pad_expert_input_to_capacity')} without "
                f"{case.name('moe_expert_capacity_factor')}",
            ),
            (best and not groups, "groups to choose without groups"),
            (groups and best and count % groups, f"{groups} groups do not divide {count} experts"),
            (groups and best and best > groups, f"{best} of {groups} groups"),
            (topk is not None and topk > count, f"{topk} of {count} experts for a token"),
            (
                own and fact("moe_aux_loss_coeff", 0) > 0,
                f"{', '.join(own)} with {case.name('moe_aux_loss_coeff')}",
            ),
            (
                fact("moe_shared_expert_overlap") and dispatcher not in ("alltoall", "flex"),
                f"{case.name('moe_shared_expert_overlap')} with dispatcher {dispatcher}",
            ),
            (
                fact("moe_shared_expert_intermediate_size") and fact("add_bias_linear"),
                "biases in shared experts",
            ),
            (
                dispatcher == "flex" and layout.etp * layout.ep <= 1,
                "dispatcher flex needs ETP x EP above 1",
            ),
            (
                fact("moe_enable_deepep") and dispatcher != "flex",
                f"{case.name('moe_enable_deepep')} with dispatcher {dispatcher}",
            ),
        ),
    )


def checkpoints(case: Case) -> Iterator[Finding]:
    fact, layout = case.fact, case.job.layout
    kind = fact("ckpt_format")
    alone = layout.tp == 1 and layout.pp == 1
    yield from _each(
        case,
        "checkpoint",
        (
            (
                kind == "torch_dcp" and not fact("use_torch_fsdp2"),
                f"checkpoints torch_dcp without {case.name('use_torch_fsdp2')}",
            ),
            (kind == "torch_dcp" and not alone, "checkpoints torch_dcp with TP or PP"),
            (
                kind == "fsdp_dtensor" and not fact("use_megatron_fsdp"),
                f"checkpoints fsdp_dtensor without {case.name('use_megatron_fsdp')}",
            ),
            (
                kind not in (None, "torch", "torch_dist", "torch_dcp", "fsdp_dtensor"),
                f"checkpoints {kind!r}",
            ),
        ),
    )
    if fact("async_save") and not fact("use_persistent_ckpt_worker") and kind != "torch":
        message = f"{case.name('async_save')} is switched off without "
        message += case.name("use_persistent_ckpt_worker")
        yield case.changed("async-save", message)


OPTIONS = (
    gone, dtypes, torch_fsdp, megatron_fsdp, overlaps, recompute, mixtures, checkpoints,
)  # fmt: skip
