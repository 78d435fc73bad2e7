"""Layouts near to one: what a suggestion makes of a job, and what the ledger says of the two.

What is suggested is legal and fits where the job itself does (`fitting`); where the cost is what
the ledger says, it costs less (`better`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from plait.cost.device import context_bytes, fullest, reserved_bytes
from plait.cost.flops import chunk_flops
from plait.cost.ledger import StageMemory
from plait.cost.links import far_axes
from plait.cost.memory import memory
from plait.cost.traffic import traffic
from plait.planner.partition import placement
from plait.rules import context, experts, legality, pipeline
from plait.schedules.job import TIMED, split_name
from plait.spec.findings import Finding, UserError
from plait.spec.job import Job
from plait.spec.layout import Layout

Suggest = Mapping[str, Any]
#: What is illegal about a layout, read off its numbers.
ERRORS = legality.RULES + context.RULES + experts.RULES + pipeline.RULES


def illegal(job: Job) -> list[Finding]:
    """What is illegal about a job with a dtype; what takes a ledger to say is asked last, and of
    jobs that are legal otherwise."""
    found = [finding for rule in ERRORS for finding in rule(job)]
    return found or list(pipeline.recompute_frees(job))


def resolved(job: Job) -> Job:
    """The job with the dtype that its devices take for "auto"."""
    if job.train.dtype != "auto":
        return job
    dtype = "float32" if job.cluster is None else "bfloat16"
    return replace(job, train=replace(job.train, dtype=dtype))


def neighbour(job: Job, suggest: Suggest) -> tuple[Job, dict[str, Any]] | None:
    """The job with some fields changed, and all that has to be said for it; None where illegal.

    dp takes what ranks tp, cp and pp leave, as if it had not been given. The global batch stays,
    or is the nearest above that the data ranks can share.
    """
    said = dict(suggest)
    fields = {k.removeprefix("layout."): v for k, v in said.items() if k.startswith("layout.")}
    told = asdict(job.layout) | fields
    if job.layout.tp == 1 or told["tp"] == 1:
        told["sequence_parallel"] = fields.get("sequence_parallel")
    if not fields.keys() & {"dp_replicate", "dp_shard"}:
        # HSDP's copies were asked for; the rest is derived.
        kept = told["dp_replicate"] if told["zero"] and told["dp_replicate"] > 1 else None
        told |= {"dp_replicate": kept, "dp_shard": None}
    if split_name(told["schedule"])[0] in TIMED:
        # Held to the same activations; each neighbour would be searched for anew.
        told["schedule"] = None
    try:
        layout = Layout.fill(job.layout.world, **told)
    except UserError:
        return None
    for axis in ("dp_replicate", "dp_shard"):  # which may have been given
        if getattr(layout, axis) != getattr(job.layout, axis):
            said[f"layout.{axis}"] = getattr(layout, axis)
    samples, train = layout.micro_batch * layout.dp, job.train
    if "train.accumulation" in said:
        batch = samples * said["train.accumulation"]
    else:
        batch = -(-said.get("train.global_batch", train.global_batch) // samples) * samples
    if batch != train.global_batch:
        said["train.global_batch"] = batch
    train = replace(train, global_batch=batch, accumulation=batch // samples)
    other = replace(job, layout=layout, train=train)
    return None if illegal(other) else (other, said)


def fitting(
    job: Job, options: Iterable[Suggest], good: Callable[[Job], bool] = lambda other: True
) -> tuple[Job, dict[str, Any]] | None:
    """The first of the options that is legal, good, and fits where the job does."""
    for option in options:
        found = neighbour(job, option)
        if found and good(found[0]) and (fits(found[0]) or not fits(job)):
            return found
    return None


def better(
    job: Job, options: Iterable[Suggest], cost: Callable[[Job], float]
) -> tuple[Job, dict[str, Any]] | None:
    """The first of the options that is legal, costs less, and fits where the job does."""
    now = cost(job)
    return fitting(job, options, lambda other: cost(other) < now)


def needed(job: Job) -> int:
    """Bytes of device memory that the fullest rank needs, what no tensor is included."""
    return with_reserve(job, fullest(memory(job)))


def with_reserve(job: Job, peak: StageMemory) -> int:
    """Bytes of device memory that a rank needs which holds `peak` when it holds most."""
    return peak.total + reserved_bytes(peak) + context_bytes(job.layout)


def fits(job: Job) -> bool:
    """Whether every rank's device has room; any has where nothing says how much it holds."""
    return job.cluster is None or needed(job) <= job.cluster.memory


def sent(job: Job, *axes: str) -> int:
    """Bytes that the rank which sends most puts on the wire in a step, over the axes named."""
    by_stage: dict[int, int] = {}
    for row in traffic(job).rows():
        if not axes or row.axis in axes:
            by_stage[row.stage] = by_stage.get(row.stage, 0) + row.wire_bytes
    return max(by_stage.values(), default=0)


def sent_far(job: Job) -> int:
    """As `sent`, over every axis that leaves the fast domain."""
    axes = {entry.axis for entry in traffic(job).entries}
    far = far_axes(job.layout, job.cluster, axes)
    return sent(job, *far) if far else 0


def on_the_way(job: Job) -> float:
    """Seconds that what a rank sends in a step takes, one message after the other, none hidden."""
    cluster, rows = job.cluster, traffic(job).rows()
    assert cluster is not None
    far = far_axes(job.layout, cluster, {row.axis for row in rows})
    by_stage: dict[int, float] = {}
    for row in rows:
        near = cluster.bandwidth(_size(job.layout, row.axis))
        speed = cluster.nic or near if row.axis in far else near
        by_stage[row.stage] = by_stage.get(row.stage, 0.0) + row.wire_bytes / speed
    return max(by_stage.values(), default=0.0)


def _size(layout: Layout, axis: str) -> int:
    return layout.cp // layout.ulysses if axis == "cp" else getattr(layout, axis)


def computing(job: Job) -> float | None:
    """Seconds that the operations of the slowest rank take in a step at the device's peak."""
    peak = None if job.cluster is None else job.cluster.peak_flops.get(job.train.dtype)
    if not peak:
        return None
    chunks = [sum(f) for f in chunk_flops(job.model, job.layout, job.train.seq_len)]
    ranks = [tuple(range(len(chunks)))] if job.layout.pp == 1 else placement(job.layout)
    copies = sum(map(len, ranks)) // len(chunks)  # each of them does its part of a step
    slowest = max(sum(chunks[c] for c in held) for held in ranks)
    return slowest * job.train.accumulation / copies / peak
