"""What data parallelism sends: DDP, ZeRO 1 to 3, FSDP, HSDP. It mirrors `parallel/data.py`.

With e_g bytes of a gradient and e_w of a weight, and P elements of a chunk before sharding,
padding included, an optimizer step in which m micro batches pass through it sends

    ZeRO 0      all-reduce of P e_g, once
    ZeRO 1      reduce-scatter of P e_g, all-gather of P e_w, once each
    ZeRO 2      reduce-scatter of P e_g for each micro batch, all-gather of P e_w once
    ZeRO 3      reduce-scatter of P e_g and two all-gathers of P e_w for each micro batch
    HSDP        moreover an all-reduce over the replicas of the shard, P e_g / shards, once
    CP          its ranks shard model states with the others (fsdp = dp_shard x cp); under ZeRO 0
                they all-reduce P e_g among themselves, and then over the replicas
    experts     the same over edp, the ranks that hold the same experts

in messages of a bucket each (1910.02054 section 7; FSDP 2304.11277 section 3.2).
"""

from functools import lru_cache

from plait.cost.dtypes import dtypes_of, size_of
from plait.cost.ledger import TrafficLedger
from plait.cost.parts import Part
from plait.spec.buckets import Bucket, make_buckets, shards_of, zero_stage
from plait.spec.job import DTYPE_BYTES, Job
from plait.spec.parameters import kv_copies


def buckets_of(job: Job, chunk: int = 0) -> list[Bucket]:
    """The flat buffers that the engine makes for a chunk of a job."""
    grad_bytes = DTYPE_BYTES[dtypes_of(job).grad]
    return _buckets(job.model, job.layout, job.train.bucket_mib * 2**20, grad_bytes, chunk)


_buckets = lru_cache(maxsize=512)(make_buckets)


def data_traffic(job: Job, ledger: TrafficLedger, stage: int, part: Part) -> None:
    """Enters what data parallelism sends in one step for a part of the model on a stage."""
    layout, dtypes = job.layout, dtypes_of(job)
    micro_batches = part.micro_batches
    groups = {"tp": layout.tp, "kv": kv_copies(job.model, layout), "etp": layout.etp}
    for bucket in buckets_of(job, part.chunk):
        zero, shards = zero_stage(layout, bucket.expert), shards_of(layout, bucket.expert)
        reductions = micro_batches if zero >= 2 else 1
        sharers, replicas = "edp" if bucket.expert else "fsdp", layout.dp_replicate
        if bucket.expert and layout.zero == 0:
            replicas = 1  # then edp is all of them
        grads = size_of(dtypes.grad, bucket.size)
        weights = size_of(dtypes.compute, bucket.size)

        def add(
            axis: str,
            collective: str,
            phase: str,
            dtype: str,
            bytes: int,
            size: int,
            count: int = 1,
        ) -> None:
            ledger.add(stage, axis, collective, phase, dtype, bytes, size, count)

        # Gradients of which each tensor-parallel rank has a part are summed there first.
        for partial, start, stop in bucket.partial_runs():
            bytes, axis = size_of(dtypes.grad, stop - start), "etp" if bucket.expert else "tp"
            add(axis, "all-reduce", "backward", dtypes.grad, bytes, groups[partial], reductions)

        if zero == 0:
            for axis, size in ((sharers, shards), ("dp_replicate", replicas)):
                add(axis, "all-reduce", "backward", dtypes.grad, grads, size)
            continue
        add(sharers, "reduce-scatter", "backward", dtypes.grad, grads, shards, reductions)
        add("dp_replicate", "all-reduce", "backward", dtypes.grad, grads // shards, replicas)
        if zero < 3:
            add(sharers, "all-gather", "optimizer", dtypes.compute, weights, shards)
        else:
            for phase in ("forward", "backward"):
                add(sharers, "all-gather", phase, dtypes.compute, weights, shards, micro_batches)
