"""The step of a pipeline that a report draws."""

from dataclasses import replace

from plait.schedules.job import chunk_times, table_of
from plait.schedules.simulate import Timeline, Times, simulate
from plait.spec.findings import UserError
from plait.spec.job import Job
from plait.spec.schedule import is_file

#: Actions that a page draws at most, some 200 bytes each; micro batches that text draws at least.
IN_A_PAGE, IN_TEXT = 2500, 16


def drawn(job: Job, most: int = IN_A_PAGE) -> Timeline | None:
    """The step of a legal job with pp above 1, in units of 10^12 operations.

    Where it has more than `most` actions, the same schedule with fewer micro batches: a multiple
    of pp of them, so that every rank gets into its stride. None where none is so short.
    """
    pp, whole = job.layout.pp, job.train.accumulation
    # Two actions a chunk and micro batch at least: a longer table is not built in vain.
    room = most // (2 * pp * job.layout.vpp)
    for n in (whole, *range(min(whole - 1, room) // pp * pp, 0, -pp)):
        step = _step(job, n) if n <= room else None
        if step and sum(map(len, step.table.ranks)) <= most:
            return step
    return None


def for_text(job: Job) -> Timeline:
    """`drawn` with as few micro batches as show the order: that is legible in a terminal."""
    pp, whole = job.layout.pp, job.train.accumulation
    fewer = range(-(-IN_TEXT // pp) * pp, whole, pp)
    steps = (_step(job, n) for n in (*fewer, whole))
    return next(step for step in steps if step)


def _step(job: Job, micro_batches: int) -> Timeline | None:
    """The step with so many micro batches; None where the schedule has none such."""
    layout, train = job.layout, job.train
    if is_file(layout.schedule) and micro_batches != train.accumulation:
        return None
    try:
        table = table_of(replace(job, train=replace(train, accumulation=micro_batches)))
    except UserError:  # the number does not suit the schedule
        return None
    return simulate(table, _scaled(chunk_times(job.model, layout, train.seq_len)))


def _scaled(times: Times) -> Times:
    rows = (times.forward, times.input_grad, times.weight_grad)
    return Times(*(tuple(t / 1e12 for t in row) for row in rows), transfer=times.transfer)
