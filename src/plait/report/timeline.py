"""The step of a pipeline that a report draws."""

from dataclasses import replace

from plait.schedules.job import chunk_times, table_of
from plait.schedules.simulate import Timeline, Times, simulate
from plait.spec.findings import UserError
from plait.spec.job import Job
from plait.spec.schedule import is_file

#: Actions that a page draws, some 200 bytes each; that a rank has where text draws it.
IN_A_PAGE, OF_A_RANK = 2500, 32


def for_text(job: Job) -> Timeline | None:
    """`drawn` for the columns of a terminal: two dozen micro batches are legible there."""
    layout = job.layout
    return drawn(job, layout.pp * layout.vpp * max(OF_A_RANK, 2 * layout.pp))


def drawn(job: Job, most: int = IN_A_PAGE) -> Timeline | None:
    """The step of a legal job with pp above 1, in units of 10^12 operations.

    Args:
        most: where it has more actions than this, the same schedule with as many micro batches as
            it allows; None where it has none so short (a table in a file).
    """
    layout, train = job.layout, job.train
    for micro_batches in _fewer(train.accumulation, layout.pp):
        # Two actions a chunk and micro batch at least, so that a long table is not built in vain.
        if 2 * layout.pp * layout.vpp * micro_batches > most:
            continue
        whole = micro_batches == train.accumulation
        if is_file(layout.schedule) and not whole:
            return None
        try:
            table = table_of(replace(job, train=replace(train, accumulation=micro_batches)))
        except UserError:  # too few for this schedule
            continue
        if sum(map(len, table.ranks)) <= most:
            return simulate(table, _scaled(chunk_times(job.model, layout, train.seq_len)))
    return None


def _fewer(micro_batches: int, pp: int) -> list[int]:
    """All micro batches, then fewer of them: first multiples of pp."""
    multiples = range(min(micro_batches - 1, 64 * pp) // pp * pp, 0, -pp)
    return [micro_batches, *multiples, *(n for n in (pp // 2, pp // 4, pp // 8, 1) if n > 0)]


def _scaled(times: Times) -> Times:
    rows = (times.forward, times.input_grad, times.weight_grad)
    return Times(*(tuple(t / 1e12 for t in row) for row in rows), transfer=times.transfer)
