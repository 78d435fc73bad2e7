"""What DeepSpeed says to a job: refusals and silent changes of its configuration and engines.

Sources, of DeepSpeed 0.19.6: runtime/config.py (_set_batch_related_parameters, _do_error_check),
runtime/pipe/engine.py, runtime/engine.py (get_data_types, _do_optimizer_sanity_check, the checks
of MoE under ZeRO 3), module_inject/auto_ep_folding.py, runtime/sequence_parallel/ulysses_sp.py,
utils/groups.py.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from plait.dialects.launch import AT_START, FIRST_STEP, changed, refused
from plait.spec.findings import Finding
from plait.spec.job import Job
from plait.spec.layout import divisors, nearest

_TARGET = "DeepSpeed"


def rules(facts: Mapping[str, Any], job: Job, target: str = _TARGET) -> list[Finding]:
    """Findings on a job.

    Args:
        facts: of `config.understand`; {} for a job that no file says.
    """
    found: list[Finding] = []
    for rule in (_batch, _zero, _precision, _pipeline, _ulysses, _autotp, _experts, _groups):
        found += rule(facts, job, target)
    return found


def _batch(facts: Mapping[str, Any], job: Job, target: str) -> Iterator[Finding]:
    """All three are given, or derived by integer division and then multiplied again."""
    batch, micro = facts.get("batch"), facts.get("micro")
    accumulation, dp = facts.get("accumulation"), max(1, job.layout.dp)
    if facts.get("elastic"):
        if (batch or micro or accumulation) and not facts.get("elastic_ignores"):
            message = "elasticity and a batch of one's own: it wants "
            message += "elasticity.ignore_non_elastic_batch_info"
            yield refused(target, "deepspeed-elastic-batch", AT_START, message)
        asked, worlds = facts.get("elasticity"), facts.get("elastic_worlds", ())
        if asked is not None and worlds and dp not in worlds:
            legal = nearest(dp, list(worlds))
            ranks = legal * job.layout.tp * job.layout.cp * job.layout.pp
            if asked.version < 0.2:
                message = f"its elastic batch does not divide over dp {dp}"
                yield refused(target, "deepspeed-elastic-world", AT_START, message, dp, ranks=ranks)
            else:
                message = f"dp {dp} does not divide the elastic batch: it takes another one"
                yield changed(target, "deepspeed-elastic-world", message, dp, ranks=ranks)
        return
    if "batch" not in facts:
        return
    for name, value, path in (
        ("train_batch_size", batch, "train__global_batch"),
        ("train_micro_batch_size_per_gpu", micro, "layout__micro_batch"),
        ("gradient_accumulation_steps", accumulation, "train__accumulation"),
    ):
        if value is not None and value < 1:
            message = f"{name} {value} is not above 0"
            yield refused(target, "deepspeed-batch", AT_START, message, value, **{path: 1})
            return
    if batch is None and micro is None:
        if facts.get("batch_elsewhere"):
            return
        message = "neither train_batch_size nor train_micro_batch_size_per_gpu is given"
        yield refused(target, "deepspeed-batch", AT_START, message, None, layout__micro_batch=1)
        return
    if batch is None:
        return
    if micro is not None and accumulation is None:
        accumulation = batch // micro // dp
    elif micro is None:
        accumulation = accumulation or 1
        micro = batch // dp // accumulation
    product = micro * accumulation * dp
    if product != batch:
        message = (
            f"train_batch_size {batch} is not micro batch {micro} x accumulation {accumulation} x "
            f"dp {dp} = {product}"
        )
        unit = max(1, micro) * dp
        whole = max(unit, round(batch / unit) * unit)
        if facts.get("accumulation"):
            whole = max(1, micro) * dp * accumulation
        yield refused(target, "deepspeed-batch", AT_START, message, batch,
                      train__global_batch=whole)  # fmt: skip


def _zero(facts: Mapping[str, Any], job: Job, target: str) -> Iterator[Finding]:
    stage = facts.get("stage")
    if stage is not None and not 0 <= stage <= 3:
        message = f"there is no ZeRO stage {stage}"
        yield refused(target, "deepspeed-zero-stage", AT_START, message, stage,
                      layout__zero=3 if stage > 3 else 0)  # fmt: skip
    if stage is None:
        return
    if facts.get("offload_param") and stage != 3:
        message = f"offload_param is for ZeRO 3; under stage {stage} parameters stay where they are"
        yield changed(target, "deepspeed-offload-param", message, stage)
    if facts.get("offload_optimizer") and stage == 0:
        message = "offload_optimizer does nothing without ZeRO"
        yield changed(target, "deepspeed-offload-optimizer", message, stage)
    if facts.get("allreduce_op") == "sum" and stage == 3:
        message = "gradient_allreduce_op sum does not go with ZeRO 3"
        yield refused(target, "deepspeed-allreduce-op", AT_START, message)


def _precision(facts: Mapping[str, Any], job: Job, target: str) -> Iterator[Finding]:
    if facts.get("fp16") and facts.get("bf16"):
        message = "fp16 and bf16 are both on"
        yield refused(target, "deepspeed-two-dtypes", AT_START, message)
    grad, dtype = facts.get("grad"), facts.get("dtype")
    if facts.get("grad_said") and grad != dtype and facts.get("stage") == 0:
        message = f"without ZeRO gradients are of the dtype of the model ({dtype}), not {grad}"
        yield refused(target, "deepspeed-grad-dtype", AT_START, message, grad,
                      train__grad_dtype=dtype)  # fmt: skip


def _pipeline(facts: Mapping[str, Any], job: Job, target: str) -> Iterator[Finding]:
    layout = job.layout
    engine = facts.get("pipeline_engine", layout.pp > 1)
    if engine and layout.zero >= 2:
        message = f"its pipeline engine takes ZeRO 0 or 1, not {layout.zero}"
        yield refused(target, "deepspeed-pipeline-zero", AT_START, message, layout.zero,
                      layout__zero=1)  # fmt: skip
    if layout.vpp > 1 and layout.pp > 1:
        message = "its pipeline engine has one chunk a stage"
        yield refused(target, "deepspeed-chunks", AT_START, message, layout.vpp, layout__vpp=1)


def _ulysses(facts: Mapping[str, Any], job: Job, target: str) -> Iterator[Finding]:
    layout, model = job.layout, job.model
    ulysses = layout.ulysses
    if ulysses <= 1:
        return
    if model.heads % ulysses:
        message = f"{model.heads} heads do not divide over sequence parallel {ulysses}"
        legal = nearest(ulysses, divisors(max(1, model.heads)))
        yield refused(target, "deepspeed-ulysses-heads", AT_START, message, ulysses,
                      layout__cp=legal, layout__ulysses=legal)  # fmt: skip
    kv = max(1, model.kv_heads)
    if model.mla is None and kv % ulysses and ulysses % kv:
        message = f"{kv} KV heads neither divide by sequence parallel {ulysses} nor divide it"
        legal = nearest(ulysses, divisors(kv))
        yield refused(target, "deepspeed-ulysses-kv", AT_START, message, ulysses,
                      layout__cp=legal, layout__ulysses=legal)  # fmt: skip
    length = job.train.seq_len or model.seq
    if length % ulysses:
        message = f"sequences of {length} tokens do not divide over sequence parallel {ulysses}"
        yield refused(target, "deepspeed-ulysses-length", FIRST_STEP, message, length,
                      train__seq_len=max(1, length // ulysses) * ulysses)  # fmt: skip


def _autotp(facts: Mapping[str, Any], job: Job, target: str) -> Iterator[Finding]:
    tp, kv = facts.get("autotp", 1), job.model.kv_heads
    if tp > 1 and job.model.mla is None and 0 < kv < tp:
        message = (
            f"AutoTP gives ranks beyond the {kv} KV heads no attention at all (plait copies the "
            "KV heads)"
        )
        yield changed(target, "deepspeed-autotp-kv", message, tp, layout__tp=kv)


def _experts(facts: Mapping[str, Any], job: Job, target: str) -> Iterator[Finding]:
    layout, moe = job.layout, job.model.moe
    if facts.get("autoep") and facts.get("balance") is not None:
        message = "expert_parallel.load_balance_coeff: AutoEP has no aux-free balancing"
        yield refused(target, "deepspeed-autoep-balance", AT_START, message)
    ep = layout.ep
    if ep <= 1 or facts.get("legacy_moe"):
        return
    stage_ranks = max(1, layout.world // max(1, layout.pp))
    if stage_ranks % ep:
        message = f"EP {ep} does not divide the {stage_ranks} ranks of a stage"
        yield refused(target, "deepspeed-autoep-grid", AT_START, message, ep,
                      layout__ep=nearest(ep, divisors(stage_ranks)))  # fmt: skip
    if moe is not None and moe.experts % ep:
        message = f"{moe.experts} experts do not divide over EP {ep}"
        yield refused(target, "deepspeed-autoep-experts", AT_START, message, ep,
                      layout__ep=nearest(ep, divisors(max(1, moe.experts))))  # fmt: skip
    if layout.etp > 1:
        message = "AutoEP keeps experts whole (expert_tensor_parallel_size is 1)"
        yield refused(target, "deepspeed-autoep-etp", AT_START, message, layout.etp, layout__etp=1)
    if layout.tp > 1 and layout.ulysses > 1:
        message = "AutoEP goes with AutoTP or with Ulysses, not with both"
        yield refused(target, "deepspeed-autoep-ulysses", AT_START, message, layout.ulysses,
                      layout__cp=1, layout__ulysses=1)  # fmt: skip
    if layout.pp > 1 and layout.tp > 1:
        message = "AutoEP with AutoTP has no pipeline"
        yield refused(target, "deepspeed-autoep-pipeline", AT_START, message, layout.pp,
                      layout__pp=1)  # fmt: skip
    if layout.zero == 3:
        for on, name, cure in (
            (layout.tp > 1, "AutoTP", {"layout__zero": 2}),
            (layout.ulysses > 1, "Ulysses", {"layout__zero": 2}),
            (layout.dp_replicate > 1, "MiCS or hpZ", {"layout__dp_replicate": 1}),
        ):
            if on:
                message = f"AutoEP under ZeRO 3 does not go with {name}"
                yield refused(target, "deepspeed-autoep-zero3", AT_START, message, 3, **cure)


def _groups(facts: Mapping[str, Any], job: Job, target: str) -> Iterator[Finding]:
    """MiCS and hpZ: groups of so many ranks, under ZeRO 3."""
    mics, hpz, stage = facts.get("mics", -1), facts.get("hpz", 1), facts.get("stage")
    if stage is None:
        return
    # The job is a stand-in where its degrees do not go together: its world is not the launch's.
    world, layout = facts.get("world") or job.layout.world, job.layout
    ranks = max(1, world // max(1, layout.tp * layout.pp))
    for name, size in (("mics_shard_size", mics), ("zero_hpz_partition_size", hpz)):
        if not size or size <= (0 if name == "mics_shard_size" else 1):
            continue
        if stage != 3:
            message = f"{name} {size} does nothing under ZeRO {stage}: it is of ZeRO 3"
            yield changed(target, "deepspeed-shard-groups", message, size)
        elif size > ranks and name == "zero_hpz_partition_size":
            message = f"{name} {size} is above the {ranks} ranks: it becomes {ranks}"
            yield changed(target, "deepspeed-shard-groups", message, size)
        elif ranks % size:
            message = f"{name} {size} does not divide the {ranks} ranks that share the states"
            legal = nearest(size, divisors(ranks))
            shard = max(1, legal // max(1, job.layout.cp))
            yield refused(target, "deepspeed-shard-groups", AT_START, message, size,
                          layout__dp_shard=shard)  # fmt: skip
