"""The table of a job: what its pipeline's ranks do in which order."""

from functools import lru_cache
from pathlib import Path

from plait.cost.flops import chunk_flops
from plait.schedules.build import build
from plait.schedules.csvfile import read_table
from plait.schedules.simulate import Timeline, Times, simulate
from plait.schedules.table import Table
from plait.spec.job import Job
from plait.spec.layout import Layout
from plait.spec.model import Model
from plait.spec.schedule import is_file

#: Schedules that depend on how long the actions take.
TIMED = ("auto", "zb-auto")


def table_of(job: Job) -> Table:
    """The table that a job's ranks follow; pp must be above 1.

    Schedules that are made for given times get those of the job's chunks in floating-point
    operations, messages for nothing, and may hold what 1F1B does: activations of pp micro
    batches on a rank.

    Raises:
        UserError: no such table for these stages and micro batches, or none in the file.
    """
    layout, train = job.layout, job.train
    assert layout.pp > 1, "one stage needs no table"
    if is_file(layout.schedule):
        path = Path(layout.schedule)
        return _read(path, path.stat().st_mtime_ns if path.exists() else 0)
    name, group = split_name(layout.schedule)
    if name in TIMED:
        return _timed(name, job.model, layout, train.seq_len, train.accumulation)
    return _named(name, layout.pp, train.accumulation, layout.vpp, group)


def timeline(job: Job) -> Timeline:
    """The simulated step of a job with pp above 1: times as in `table_of`."""
    return simulate(table_of(job), chunk_times(job.model, job.layout, job.train.seq_len))


def chunk_times(model: Model, layout: Layout, seq_len: int) -> Times:
    """The operations of chunks as times of a schedule's actions; messages take none."""
    return Times(*zip(*chunk_flops(model, layout, seq_len), strict=True), transfer=0.0)


def split_name(schedule: str) -> tuple[str, int | None]:
    """ "interleaved-1f1b:8" is a name and the micro batches of a group."""
    name, colon, group = schedule.partition(":")
    return name, int(group) if colon else None


@lru_cache(maxsize=16)
def _named(name: str, pp: int, micro_batches: int, vpp: int, group: int | None) -> Table:
    return build(name, pp, micro_batches, vpp=vpp, group=group)


@lru_cache(maxsize=16)
def _timed(name: str, model: Model, layout: Layout, seq_len: int, micro_batches: int) -> Table:
    times = chunk_times(model, layout, seq_len)
    return build(name, layout.pp, micro_batches, vpp=layout.vpp, times=times, cap=layout.pp)


@lru_cache(maxsize=16)
def _read(path: Path, changed: int) -> Table:
    return read_table(path)
