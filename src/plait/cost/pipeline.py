"""What pipeline parallelism sends. It mirrors `parallel/pipeline.py`.

With t rows of the residual stream on a rank (the tokens of a micro batch; under sequence
parallelism a tp-th of them), a border between two chunks on different ranks is crossed by t h
elements of the compute dtype for each micro batch, once forward, once backward (GPipe 1811.06965
section 2.3; with v chunks a rank v times as often, Megatron-LM 2104.04473 section 2.2). Parameters
that the pipeline holds more than once, a tied table in the first and the last chunk, everything
under DualPipe, have their gradients summed at the end of a step: each rank sends what it owns of
them to the one that holds the other copy.
"""

from collections import Counter

from plait.cost.data import buckets_of
from plait.cost.dtypes import dtypes_of, size_of
from plait.cost.ledger import TrafficLedger
from plait.cost.shapes import local_seq
from plait.schedules.job import table_of
from plait.schedules.table import Table
from plait.spec.buckets import Bucket, shards_of, zero_stage
from plait.spec.chunks import TABLE
from plait.spec.job import Job


def pipeline_traffic(job: Job, ledger: TrafficLedger) -> None:
    """Enters what the pp axis sends in one step."""
    layout, dtypes = job.layout, dtypes_of(job)
    if layout.pp == 1:
        return
    table = table_of(job)
    rows = layout.micro_batch * local_seq(job)
    rows //= layout.tp if layout.sequence_parallel else 1
    message = size_of(dtypes.compute, rows, job.model.hidden)

    def add(stage: int, phase: str, dtype: str, bytes: int, count: int) -> None:
        ledger.add(stage, "pp", "send", phase, dtype, bytes, layout.pp, count)

    crossed: Counter[tuple[int, str]] = Counter()
    for (chunk, micro), rank in table.place.items():
        following = table.place.get((chunk + 1, micro), rank)
        if following != rank:
            crossed[rank, "forward"] += 1
            crossed[following, "backward"] += 1
    for (rank, phase), count in crossed.items():
        add(rank, phase, dtypes.compute, message, count)
    for stage, held in enumerate(table.held):
        for bucket, others in shared(job, table, stage, held):
            sharded = zero_stage(layout, bucket.expert) > 0
            own = bucket.size // (shards_of(layout, bucket.expert) if sharded else 1)
            bytes = size_of(dtypes.grad, own)
            add(stage, "backward", dtypes.grad, bytes, others)


def shared(job: Job, table: Table, stage: int, held: tuple[int, ...]) -> list[tuple[Bucket, int]]:
    """The buckets of which other stages hold a copy, and how many do; of two copies on this stage
    one."""
    ends = {0, table.chunks - 1} if job.model.tied else set()
    found, tables = [], []
    for chunk in held:
        for bucket in buckets_of(job, chunk):
            is_table = bool(ends) and bucket.entries[0].parameter.name == TABLE
            chunks = ends if is_table else {chunk}
            others = sum(not chunks.isdisjoint(h) for h in table.held) - 1
            if others:
                (tables if is_table else found).append((bucket, others))
    return found + tables[:1]
