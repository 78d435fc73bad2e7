"""Pipelines: which are illegal, and which cost more than they need."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from plait.cost.flops import chunk_flops
from plait.cost.ledger import MEMORY_TOLERANCE, StageMemory
from plait.cost.memory import memory_by_stage
from plait.planner.partition import by_cost, placement
from plait.rules.numbers import element_bytes, in_bytes
from plait.schedules.build import problems
from plait.schedules.check import check
from plait.schedules.job import TIMED, split_name, table_of, timeline
from plait.spec.chunks import balanced
from plait.spec.findings import Finding, UserError, error
from plait.spec.job import Job
from plait.spec.layout import divisors
from plait.spec.parameters import parameter_count
from plait.spec.schedule import SCHEDULES, is_file

# ------------------------------------------------------------------------------------------
# Illegal


def chunks_have_layers(job: Job) -> Iterator[Finding]:
    """Every chunk has a layer; the first has the embedding and the last the head instead."""
    model, layout = job.model, job.layout
    chunks, most = layout.pp * layout.vpp, model.layers + 2
    if layout.pp == 1 or chunks <= most:
        return
    message = f"pp {layout.pp} x vpp {layout.vpp} = {chunks} chunks of {model.layers} layers"
    low, high = SCHEDULES[name].vpp if (name := _name(job)) else (1, layout.vpp)
    fewer = min(most // layout.pp, high)
    if fewer >= low:
        yield error("layout.vpp", layout.vpp, message, fewer, "chunks")
        return
    vpp = low if name else layout.vpp
    also = {} if vpp == layout.vpp else {"layout.vpp": vpp}
    # Of the degrees that suit the ranks.
    fits = [p for p in divisors(layout.pp * layout.dp) if p * vpp <= most]
    found = _with_batch(job, "chunks", "layout.pp", layout.pp, message, max(fits, default=1))
    yield replace(found, suggest=found.suggest | also)


def stages_partition(job: Job) -> Iterator[Finding]:
    """Layers that were given to chunks are those of the model."""
    model, layout = job.model, job.layout
    stages, chunks = layout.stages, layout.pp * layout.vpp
    if stages is None or len(stages) != chunks or chunks > model.layers + 2:
        return  # said elsewhere
    shown, even = _shown(stages), _shown(balanced(model.layers, chunks))
    if sum(stages) != model.layers:
        message = f"{shown} are {sum(stages)} layers, {model.name} has {model.layers}"
        yield error("layout.stages", shown, message, even, "stages")
    elif 0 in stages[1:-1]:
        chunk = stages.index(0, 1)
        message = f"chunk {chunk} of {shown} has no layer, and neither embedding nor head"
        yield error("layout.stages", shown, message, even, "stages")


def schedule_suits(job: Job) -> Iterator[Finding]:
    """The schedule can be built for these stages, chunks and micro batches."""
    layout, m = job.layout, job.train.accumulation
    if layout.pp == 1 or not (name := _name(job)):
        return
    group = split_name(layout.schedule)[1]
    for found in problems(name, layout.pp, m, layout.vpp, group):
        yield _SUITED[found.where](job, found)


def _pp(job: Job, found: Finding) -> Finding:
    """Another pp: one that the ranks can be divided by."""
    layout, (name, group) = job.layout, split_name(job.layout.schedule)
    legal = [
        p
        for p in divisors(layout.pp * layout.dp)
        if p > 1 and not problems(name, p, job.train.accumulation, layout.vpp, group)
    ]
    if not legal:
        # No pp suits, so the schedule is what has to change.
        where, suggest = "layout.schedule", {"layout.schedule": "1f1b", "layout.vpp": 1}
        return Finding("error", "schedule", found.message, where, layout.schedule, suggest)
    pp = min(legal, key=lambda p: abs(p - layout.pp))
    return _with_batch(job, "schedule", "layout.pp", layout.pp, found.message, pp)


def _vpp(job: Job, found: Finding) -> Finding:
    return error("layout.vpp", job.layout.vpp, found.message, found.nearest, "schedule")


def _micro_batches(job: Job, found: Finding) -> Finding:
    """Another number of micro batches, and so another global batch."""
    where, m = "train.accumulation", job.train.accumulation
    suggest = {}
    if found.nearest is not None:
        samples = job.layout.micro_batch * job.layout.dp * found.nearest
        suggest = {where: found.nearest, "train.global_batch": samples}
    return Finding("error", "schedule", found.message, where, m, suggest)


def _group(job: Job, found: Finding) -> Finding:
    where, said = "layout.schedule", job.layout.schedule
    legal = None if found.nearest is None else f"{split_name(said)[0]}:{found.nearest}"
    return error(where, said, found.message, legal, "schedule")


_SUITED: dict[str, Callable[[Job, Finding], Finding]] = {
    "pp": _pp,
    "vpp": _vpp,
    "microbatches": _micro_batches,
    "group": _group,
}


def table_in_file(job: Job) -> Iterator[Finding]:
    """A table that was given is one for these stages, chunks and micro batches, and is sound."""
    layout, m, where = job.layout, job.train.accumulation, "layout.schedule"
    if layout.pp == 1 or not is_file(layout.schedule):
        return
    try:
        table = table_of(job)
    except UserError as problem:
        for f in problem.findings:
            yield error(where, layout.schedule, f"{f.where}: {f.message}", rule="unreadable")
        return
    ranks = len(table.ranks)
    vpp = None if table.chunks % ranks else table.chunks // ranks
    if ranks != layout.pp:
        message = f"{layout.schedule} is a table of {ranks} ranks, not of pp {layout.pp}"
        yield error("layout.pp", layout.pp, message, ranks, "schedule")
    elif table.chunks != layout.pp * layout.vpp:
        message = (
            f"{layout.schedule} has {table.chunks} chunks, "
            f"not pp {layout.pp} x vpp {layout.vpp} = {layout.pp * layout.vpp}"
        )
        yield error("layout.vpp", layout.vpp, message, vpp, "schedule")
    elif table.micro_batches != m:
        message = f"{layout.schedule} is for {table.micro_batches} micro batches, not {m}"
        yield _micro_batches(job, error("", m, message, table.micro_batches))
    else:
        for f in check(table, micro_batches=m, chunks=table.chunks):
            said = f"{layout.schedule}, {f.where}: {f.message}"
            yield error(where, layout.schedule, said, rule="schedule")


def _name(job: Job) -> str | None:
    """The schedule's own name; None where it is in a file."""
    name = split_name(job.layout.schedule)[0]
    return None if is_file(name) else name


def _with_batch(job: Job, rule: str, where: str, value: int, message: str, pp: int) -> Finding:
    """An error whose cure is another pp; the global batch follows the ranks that are left."""
    layout = job.layout
    suggest: dict[str, Any] = {where: pp}
    dp = layout.pp * layout.dp // pp
    batch = layout.micro_batch * dp * job.train.accumulation
    if batch != job.train.global_batch:
        suggest["train.global_batch"] = batch
    return Finding("error", rule, message, where, value, suggest)


def _shown(stages: tuple[int, ...]) -> str:
    return ",".join(map(str, stages))


RULES = (chunks_have_layers, stages_partition, schedule_suits, table_in_file)


def recompute_frees(job: Job) -> Iterator[Finding]:
    """Where weight gradients are put off, recomputation has to free something by then.

    Asked of jobs that are legal otherwise, with a dtype. A weight gradient needs its map's input:
    from I to W that is held whether it was kept since the forward or made again. What recomputation
    frees is held from F to I alone.
    """
    layout = job.layout
    if layout.pp == 1 or layout.recompute == "none" or not table_of(job).split:
        return
    kept = replace(job, layout=replace(layout, recompute="none"))
    passing = []
    for rows in zip(memory_by_stage(job), memory_by_stage(kept), strict=True):
        with_, without = map(_most, rows)
        if with_ < (1 - MEMORY_TOLERANCE) * without:
            return
        passing.append((with_, without))
    with_, without = most = max(passing)
    stage = passing.index(most)
    message = (
        f"recompute {layout.recompute} frees nothing under {layout.schedule}, which puts weight "
        f"gradients off and holds what they need: beside the states stage {stage} has "
        f"{in_bytes(with_)} with it and {in_bytes(without)} without"
    )
    where = "layout.recompute"
    yield error(where, layout.recompute, message, "none", "recompute-frees-nothing")


def _most(rows: Sequence[StageMemory]) -> int:
    """The most that a stage holds beside parameters, gradients, optimizer states."""
    return max(
        row.total - row.parameters - row.gradients - row.optimizer
        for row in rows
        if row.moment != "optimizer"
    )


# ------------------------------------------------------------------------------------------
# A pity

#: A bubble below this part of a step, or an uneven rank by less, is not worth a word.
_WORTH = 0.1


def legal(job: Job) -> bool:
    """Whether there is a pipeline, and none of the rules above speaks against it."""
    return job.layout.pp > 1 and not any(True for rule in RULES for _ in rule(job))


def bubble(job: Job) -> Iterator[Finding]:
    """Few micro batches: ranks wait for the pipeline to fill and to empty."""
    layout, m = job.layout, job.train.accumulation
    if m >= 4 * layout.pp or not legal(job):
        return
    idle = timeline(job).bubble["step_total"]
    if idle < _WORTH:
        return
    message = f"with {m} micro batches over pp {layout.pp} a rank idles {idle:.0%} of a step"
    more, samples = 4 * layout.pp, layout.micro_batch
    if samples > 1:  # the same samples in smaller pieces
        more = m * samples
        suggest = {"layout.micro_batch": 1, "train.accumulation": more}
    else:
        batch = layout.dp * more
        suggest = {"train.accumulation": more, "train.global_batch": batch}
    other = replace(
        job,
        layout=replace(layout, micro_batch=1),
        train=replace(job.train, accumulation=more, global_batch=layout.dp * more),
    )
    if is_file(layout.schedule) or not legal(other):
        suggest = {}
    elif _name(job) not in TIMED:
        message += f", with {more} {timeline(other).bubble['step_total']:.0%}"
    looped = replace(job, layout=replace(layout, schedule="interleaved-1f1b", vpp=2, stages=None))
    if layout.schedule == "1f1b" and legal(looped):
        then = timeline(looped).bubble["step_total"]
        message += f"; interleaved-1f1b with vpp 2 {then:.0%}, for twice the messages"
    where = "train.accumulation"
    yield Finding("warning", "pipeline-bubble", message, where, m, suggest)


def uneven_stages(job: Job) -> Iterator[Finding]:
    """The slowest rank sets the pace: layers by what they and the head cost."""
    model, layout = job.model, job.layout
    if layout.stages is not None or not legal(job) or is_file(layout.schedule):
        return
    better = by_cost(model, layout, job.train.seq_len)

    def slowest(stages: tuple[int, ...] | None) -> float:
        """Of all work, the part of the rank that has most, times the ranks."""
        costs = [
            sum(f) for f in chunk_flops(model, replace(layout, stages=stages), job.train.seq_len)
        ]
        ranks = [sum(costs[c] for c in held) for held in placement(layout)]
        return max(ranks) * len(ranks) / sum(ranks)

    now, then = slowest(None) - 1, slowest(better) - 1
    if now - then > _WORTH:
        message = (
            f"the slowest rank has {now:.0%} more to do than the mean one, the head included; "
            f"with layers by cost {then:.0%}"
        )
        where, suggest = "layout.stages", {"layout.stages": _shown(better)}
        yield Finding("note", "uneven-stages", message, where, None, suggest)


def two_copies(job: Job) -> Iterator[Finding]:
    """DualPipe holds two chunks on each rank: all model states twice."""
    layout = job.layout
    if layout.pp == 1 or layout.schedule != "dualpipe":
        return
    weights = parameter_count(job.model) / (layout.pp * layout.tp) * element_bytes(job)
    message = (
        f"dualpipe holds two copies of the model: about {in_bytes(2 * weights)} of weights on a "
        f"rank instead of {in_bytes(weights)}, gradients and optimizer alike; dualpipev holds one"
    )
    suggest = {"layout.schedule": "dualpipev", "layout.vpp": 2}
    if not legal(replace(job, layout=replace(layout, schedule="dualpipev", vpp=2))):
        suggest = {}
    yield Finding("warning", "two-copies", message, "layout.schedule", "dualpipe", suggest)


PITFALLS = (bubble, uneven_stages, two_copies)
