"""The dry run: a step of a rank of each stage, without other ranks, data and memory.

The program is the one that trains, over torch's fake process group (collectives return at once)
and fake tensors (shapes and no storage), so what it sends and holds can be measured for any
layout on any machine, and held against the formulas.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from plait.cost.context import fullest
from plait.cost.expert import even
from plait.cost.ledger import (
    NOTHING,
    Amount,
    StageMemory,
    TrafficLedger,
    differences,
    memory_differences,
)
from plait.cost.memory import memory
from plait.cost.traffic import traffic
from plait.models.moe import mixtures
from plait.parallel.mesh import make_mesh
from plait.report.build import report
from plait.spec.findings import Finding
from plait.spec.grid import dense_grid
from plait.spec.job import Job
from plait.trace.memory import MemoryTracker
from plait.trace.recorder import Recorder
from plait.train.optimizer import apply_update
from plait.train.program import MicroBatch, Program


@dataclass(frozen=True)
class Measured:
    """What one rank of each stage sends in a step of the steady state, and holds, a row for each
    stage and moment."""

    traffic: TrafficLedger
    memory: list[StageMemory]


def dryrun(job: Job, findings: Sequence[Finding], full: bool = False) -> dict[str, Any]:
    """The report of a job, with what its program really did beside it.

    Args:
        job: complete and legal; "auto" dtypes have been resolved.
        findings: what the rules said of it.
        full: run every micro batch (see `measure`).

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
    """Runs a step of a rank of each stage dry, all layers of it (0.05 to 0.1 s a layer and
    micro batch).

    Without a pipeline, of many micro batches one and two are run: the traffic of each one more is
    the same, and what is held is the same from the second on. With `full`, or with a pipeline,
    where what is held depends on how many there are, all are run.
    """
    ledger, held = TrafficLedger(), []
    for stage in range(job.layout.pp):
        measured = _measure(job, stage, full)
        ledger.entries |= measured.traffic.entries
        held += measured.memory
    return Measured(ledger, held)


def _measure(job: Job, stage: int, full: bool) -> Measured:
    n = job.train.accumulation
    with _program(job, stage) as program:
        _settle(program)
        if full or n <= 2 or job.layout.pp > 1:
            return _step(program, n)
        one, two = _step(program, 1), _step(program, 2)
    return Measured(_repeated(one.traffic, two.traffic, n), two.memory)


@contextmanager
def _program(job: Job, stage: int) -> Iterator[Program]:
    """The program of one of a stage's ranks, all its tensors fake; within it tensors are made fake.

    The first one; of a ring the one that holds most."""
    world = job.layout.world
    rank = stage * (world // job.layout.pp)
    rank += dense_grid(job.layout).rank(cp=fullest(job.layout) * job.layout.ulysses)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        mesh = make_mesh(job.layout, job.model, rank)
        with FakeTensorMode(allow_non_fake_inputs=True):
            program = Program(job, mesh)
            _route_evenly(program)
            yield program
    finally:
        dist.destroy_process_group()


def _route_evenly(program: Program) -> None:
    """Where sizes depend on data, the table that the formulas take: `cost.expert.even`."""
    job = program.job
    for module in program.modules.values():
        for moe in mixtures(module):
            counts = list(even(job))
            mine = counts[: len(counts) // job.layout.ep]  # on the first rank, from each
            come = [[mine] * job.layout.ep] * job.layout.etp
            moe.dispatch.read = lambda *_, told=(counts, come): told


def _settle(program: Program) -> None:
    """What a first step leaves behind: states of the optimizer, weights that are under way."""
    train, segments = program.job.train, program.engine.segments
    norm = torch.ones((), dtype=torch.float64)
    apply_update(program.optimizer, segments, norm, train.clip, 1.0, train.learning_rate)
    program.engine.publish()


def _step(program: Program, micro_batches: int) -> Measured:
    """A step of so many micro batches."""
    shape = (program.job.layout.micro_batch, program.job.train.seq_len)
    tokens = torch.zeros(shape, dtype=torch.int64)
    # Documents have no lengths without data; one a sample is what the formulas take.
    documents = [(shape[1],)] * shape[0] if program.job.data.document_mask else None
    batch = MicroBatch(tokens, tokens, torch.arange(shape[0]), documents)
    with MemoryTracker(program) as tracker, Recorder(program.mesh) as recorder:
        program.step([batch] * micro_batches, 1)
    return Measured(recorder.ledger, [StageMemory(**row) for row in tracker.rows()])


def _repeated(one: TrafficLedger, two: TrafficLedger, micro_batches: int) -> TrafficLedger:
    """The ledger of a step of so many micro batches, from those of one and of two."""
    ledger = TrafficLedger()
    for entry in one.entries | two.entries:
        first, second = (x.entries.get(entry, NOTHING) for x in (one, two))
        ledger.entries[entry] = Amount(
            *(a + (micro_batches - 1) * (b - a) for a, b in zip(first, second, strict=True))
        )
    return ledger
