"""Megatron-Bridge's own validation, beside Megatron's (training/config.py, comm_overlap.py)."""

from collections.abc import Iterator
from typing import Any

from plait.dialects.launch import AT_START, changed, note, refused
from plait.dialects.megatron_bridge.fields import TARGET, Container
from plait.spec.findings import Finding
from plait.spec.job import Job


def bridge_rules(c: Container, job: Job, environment: dict[str, str], facts: Any) -> list[Finding]:
    """What Bridge says to a job.

    Args:
        c: the launch's container. facts: "finetunes", "peft", "synchronized" of its recipe and
            launcher.
    """
    found: list[Finding] = []
    for rule in (_fsdp, _checkpoint, _packing, _finetuning, _overlap, _context):
        found += rule(c, job, environment, facts)
    return found


def _no(rule: str, message: str, value: Any = None, **suggest: Any) -> Finding:
    return refused(TARGET, f"megatron-bridge-{rule}", AT_START, message, value, **suggest)


def _saves(c: Container) -> bool:
    """Whether checkpoints are written or read. Recipes write them, unless they say null."""
    return any(
        c.settings[name].value is not None if name in c.settings else True
        for name in ("checkpoint.save", "checkpoint.load")
    )


def _fsdp(c: Container, job: Job, environment: dict[str, str], facts: Any) -> Iterator[Finding]:
    if not c.on("ddp.use_megatron_fsdp"):
        return
    if c.on("dist.use_torch_fsdp2"):
        yield _no("two-fsdp", "use_megatron_fsdp and use_torch_fsdp2 exclude each other")
    if c.value("ddp.megatron_fsdp_version", int, 1) == 2:
        yield from _fsdp_v2(c, job)
        return
    kind = c.value("checkpoint.ckpt_format", str, "torch_dist")
    if kind != "fsdp_dtensor" and _saves(c):
        yield _no("fsdp-checkpoint", "Megatron-FSDP saves and loads checkpoint.ckpt_format="
                  f"fsdp_dtensor only, not {kind}", kind)  # fmt: skip
    if c.on("dist.use_tp_pp_dp_mapping"):
        yield _no("fsdp-mapping", "Megatron-FSDP does not go with dist.use_tp_pp_dp_mapping")
    if c.on("ddp.fsdp_manual_registration") and not c.on("ddp.nccl_ub"):
        yield _no("fsdp-registration", "ddp.fsdp_manual_registration needs ddp.nccl_ub")


def _fsdp_v2(c: Container, job: Job) -> Iterator[Finding]:
    """Refusals of version 2 (_validate_and_apply_megatron_fsdp_v2_configs)."""
    layout = job.layout

    def no(what: str, value: Any = None, **suggest: Any) -> Finding:
        return _no("fsdp-v2", f"Megatron-FSDP version 2 does not take {what}", value, **suggest)

    for name in ("tp", "pp", "cp", "ep"):
        degree = getattr(layout, name)
        if degree > 1:
            yield no(f"{name.upper()} {degree}", degree, **{f"layout__{name}": 1})
    outer = c.value("ddp.outer_dp_sharding_strategy", str, "no_shard")
    checks: tuple[tuple[bool, str], ...] = (
        (job.model.moe is not None, "mixtures of experts"),
        (layout.vpp > 1, "several chunks a rank"),
        (c.value("ddp.num_distributed_optimizer_instances", int, 1) != 1, "HSDP"),
        (outer != "no_shard", "sharded replicas"),
        (
            c.value("optimizer.clip_grad", float, 1.0) > 0,
            "gradient clipping",
        ),
        (c.on("model.calculate_per_token_loss"), "a loss per token"),
        (c.on("optimizer.use_precision_aware_optimizer"), "a precision-aware optimizer"),
        (c.on("optimizer.optimizer_cpu_offload"), "an optimizer on the CPU"),
        (_saves(c), "checkpoints yet (checkpoint.save=null checkpoint.load=null)"),
        (c.on("model.fp16"), "fp16: it trains in bf16"),
        (c.on("dist.use_tp_pp_dp_mapping"), "dist.use_tp_pp_dp_mapping"),
        (c.value("model.cuda_graph_impl", str, "none") != "none", "CUDA graphs"),
    )
    for wrong, what in checks:
        if wrong:
            yield no(what)


def _checkpoint(
    c: Container, job: Job, environment: dict[str, str], facts: Any
) -> Iterator[Finding]:
    kind = c.value("checkpoint.ckpt_format", str, "torch_dist")
    if kind == "fsdp_dtensor" and _saves(c) and not c.on("ddp.use_megatron_fsdp"):
        yield _no("fsdp-dtensor", "checkpoint.ckpt_format=fsdp_dtensor needs Megatron-FSDP", kind)
    if c.on("checkpoint.async_save") and kind not in ("torch_dist", "fsdp_dtensor"):
        yield _no("async-save", f"checkpoint.async_save does not write {kind}", kind)


def _packing(c: Container, job: Job, environment: dict[str, str], facts: Any) -> Iterator[Finding]:
    micro = job.layout.micro_batch
    if c.on("dataset.enable_offline_packing") and micro > 1:
        yield _no("packed-micro-batch", f"packed samples go one by one, not in micro batches of "
                  f"{micro}", micro, layout__micro_batch=1)  # fmt: skip
    if c.on("dataset.enable_in_batch_packing") and micro == 1:
        yield _no("in-batch-packing", "dataset.enable_in_batch_packing packs the samples of a "
                  "micro batch: it must hold at least 2", micro, layout__micro_batch=2)  # fmt: skip


def _finetuning(
    c: Container, job: Job, environment: dict[str, str], facts: Any
) -> Iterator[Finding]:
    if facts.get("peft") or "peft" in c.said:
        message = "only adapters are trained; gradients and states are counted of all parameters"
        yield changed(TARGET, "megatron-bridge-peft", message)
        setting = c.settings.get("checkpoint.pretrained_checkpoint")
        if setting is None or setting.value is None:
            yield _no("peft-checkpoint", "adapters need checkpoint.pretrained_checkpoint")
    if facts.get("finetunes") and job.layout.cp > 1 and not facts.get("synchronized"):
        if not c.on("model.calculate_per_token_loss"):
            yield _no(
                "finetune-cp", "fine-tuning with CP needs model.calculate_per_token_loss=true"
            )
        if c.on("ddp.average_in_collective"):
            yield _no("finetune-cp", "fine-tuning with CP needs ddp.average_in_collective=false")


def _overlap(c: Container, job: Job, environment: dict[str, str], facts: Any) -> Iterator[Finding]:
    """Overlap of the experts' all-to-all (comm_overlap.py)."""
    layout = job.layout
    on = c.on("comm_overlap.overlap_moe_expert_parallel_comm")
    if c.on("comm_overlap.delay_wgrad_compute") and not on:
        yield _no("late-wgrad", "comm_overlap.delay_wgrad_compute needs "
                  "overlap_moe_expert_parallel_comm")  # fmt: skip
    if not on:
        return
    dispatcher = c.value("model.moe_token_dispatcher_type", str, "alltoall")
    checks: tuple[tuple[bool, str], ...] = (
        (layout.ep <= 1, "EP above 1"),
        (job.model.moe is None, "experts"),
        (dispatcher not in ("alltoall", "flex"), "the dispatcher alltoall or flex"),
        (job.train.dtype not in ("bfloat16", "float16"), "bf16 or fp16"),
        (layout.pp > 1 and layout.vpp <= 1, "virtual stages where PP is above 1"),
        (c.value("model.recompute_granularity", str) == "full", "no full recomputation"),
        (c.on("model.moe_shared_expert_overlap"), "model.moe_shared_expert_overlap=false"),
        (c.value("model.mtp_num_layers", int, 0) > 1, "at most one layer of MTP"),
    )
    for wrong, what in checks:
        if wrong:
            yield _no("ep-overlap", f"overlap_moe_expert_parallel_comm needs {what}")


def _context(c: Container, job: Job, environment: dict[str, str], facts: Any) -> Iterator[Finding]:
    if facts.get("encoder"):
        message = "counted is the language model; its encoder of images or sound is not"
        yield note(TARGET, "megatron-bridge-encoder", message)
