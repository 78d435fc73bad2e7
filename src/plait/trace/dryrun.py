"""The dry run: a step of one rank, run without the other ranks, without data and without memory.

The program is the one that trains, over torch's fake process group (collectives return at once)
and fake tensors (shapes and no storage), so what it sends and holds can be measured for any
layout on any machine, and held against the formulas.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from plait.cost.ledger import (
    MEMORY_CLASSES,
    NOTHING,
    Amount,
    StageMemory,
    TrafficLedger,
    differences,
    memory_differences,
)
from plait.cost.memory import memory
from plait.cost.traffic import traffic
from plait.parallel.mesh import make_mesh
from plait.report.build import report
from plait.spec.findings import Finding
from plait.spec.job import Job
from plait.trace.memory import MemoryTracker
from plait.trace.recorder import Recorder
from plait.train.program import MicroBatch, Program


@dataclass(frozen=True)
class Measured:
    """What rank 0 sends in a step of the steady state, and holds, a row for each moment."""

    traffic: TrafficLedger
    memory: list[StageMemory]


def dryrun(job: Job, findings: Sequence[Finding], full: bool = False) -> dict[str, Any]:
    """The report of a job, with what its program really did beside it.

    Args:
        job: complete and legal; "auto" dtypes have been resolved.
        findings: what the rules said of it.
        full: run every layer and micro batch (see `measure`).

    Returns:
        REPORT and moreover "measured": {"traffic", "memory"} with rows as in REPORT, "agree":
        whether traffic is exactly, and each moment's peak of memory nearly (see
        `MEMORY_TOLERANCE`), what was predicted, and "differences": a line each.
    """
    answer, measured = report(job, findings), measure(job, full)
    far = {row["axis"] for row in answer["traffic"] if row["inter_node"]}
    rows = [asdict(row) for row in measured.traffic.rows(inter_node=far)]
    found = differences(traffic(job), measured.traffic)
    found += memory_differences(memory(job), measured.memory)
    return answer | {
        "measured": {"traffic": rows, "memory": [asdict(row) for row in measured.memory]},
        "agree": not found,
        "differences": found,
    }


def measure(job: Job, full: bool = False) -> Measured:
    """Runs a step dry.

    A large job is measured on parts of it, for a layer more costs the same as the one before, and
    so does a micro batch: a few layers are run, and one and two micro batches. What does not grow
    by equal steps is the packing of parameters into buckets; the engine of all layers is run by
    itself for that. With `full`, all is run as it is (about 0.1 s a layer and micro batch).
    """
    layers, model = job.model.layers, job.model
    # With windows, layers differ, and repeat after `full_every`.
    period = model.full_every or 1
    few = 4 * period + layers % period
    if full or layers <= few + period:
        with _program(job) as program:
            return _run(program, full)
    parts = []
    for n in (few, few + period):
        with _program(replace(job, model=model.with_layers(n))) as program:
            whole = _run(program, full)
            parts.append((whole, _run_engine(program)))
    with _program(job) as program:
        engine = _run_engine(program)
    (a, engine_a), (b, engine_b) = parts
    more = (layers - few) // period
    # What layers send is a step without what its engine sends: a - engine_a, b - engine_b.
    sent = _sum(
        (1, engine),
        (1 - more, a.traffic),
        (more - 1, engine_a),
        (more, b.traffic),
        (-more, engine_b),
    )
    return Measured(sent, _extended(a.memory, b.memory, more))


@contextmanager
def _program(job: Job) -> Iterator[Program]:
    """The program of rank 0, all its tensors fake; within it tensors are made fake."""
    world = job.layout.world
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        mesh = make_mesh(job.layout, job.model, 0)
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield Program(job, mesh)
    finally:
        dist.destroy_process_group()


def _run(program: Program, full: bool) -> Measured:
    layout, train = program.job.layout, program.job.train
    shape = (layout.micro_batch, train.seq_len)
    tokens = torch.zeros(shape, dtype=torch.int64)
    batch = MicroBatch(tokens, tokens, torch.arange(shape[0]))
    held: list[StageMemory] = []

    def step(micro_batches: int) -> TrafficLedger:
        with MemoryTracker(program) as tracker, Recorder(program.mesh) as recorder:
            program.step([batch] * micro_batches, 1)
        held[:] = (StageMemory(**row) for row in tracker.rows())
        return recorder.ledger

    program.step([batch], 0)  # the optimizer makes its states in the first step
    sent = _repeated(step, train.accumulation, full)
    return Measured(sent, held)


def _run_engine(program: Program) -> TrafficLedger:
    """What the data-parallel engine sends by itself: gradients that never come are zeros."""
    engine, scope = program.engine, program.mesh.scope

    def step(micro_batches: int) -> TrafficLedger:
        with Recorder(program.mesh) as recorder:
            engine.begin()
            with scope.during("backward"):
                for i in range(micro_batches):
                    engine.begin_micro_batch(last=i == micro_batches - 1)
                    engine.end_micro_batch()
                engine.finish()
            with scope.during("optimizer"):
                engine.publish()
        return recorder.ledger

    return _repeated(step, program.job.train.accumulation, full=False)


def _repeated(
    step: Callable[[int], TrafficLedger], micro_batches: int, full: bool
) -> TrafficLedger:
    """The ledger of a step of so many micro batches, from those of one and of two."""
    if full or micro_batches <= 2:
        return step(micro_batches)
    one, two = step(1), step(2)
    return _sum((2 - micro_batches, one), (micro_batches - 1, two))


def _sum(*terms: tuple[int, TrafficLedger]) -> TrafficLedger:
    """Ledgers added up, each so many times."""
    total = TrafficLedger()
    for times, ledger in terms:
        for entry, amount in ledger.entries.items():
            before = total.entries.get(entry, NOTHING)
            total.entries[entry] = Amount(
                *(x + times * y for x, y in zip(before, amount, strict=True))
            )
    total.entries = {e: a for e, a in total.entries.items() if a != NOTHING}
    return total


def _extended(
    first: Sequence[StageMemory], second: Sequence[StageMemory], times: int
) -> list[StageMemory]:
    """The memory of a model as much deeper than the first as `times` the second is."""
    rows = []
    for a, b in zip(first, second, strict=True):
        held = {c: _line(getattr(a, c), getattr(b, c), times) for c in (*MEMORY_CLASSES, "total")}
        rows.append(StageMemory(a.stage, a.moment, **held))
    return rows


def _line(first: int, second: int, times: int) -> int:
    return first + times * (second - first)
