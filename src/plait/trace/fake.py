"""A program without other ranks, data and memory: torch's fake process group, where collectives
return at once, and fake tensors, which have shapes and no storage."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from plait.cost.expert import spread
from plait.models.moe import mixtures
from plait.parallel.mesh import make_mesh
from plait.spec.job import Job
from plait.train.optimizer import apply_update
from plait.train.program import MicroBatch, Program


@contextmanager
def fake_program(job: Job, rank: int, experts: int) -> Iterator[Program]:
    """The program of a rank after its first step; within it tensors are made fake.

    experts: of which rank of ep it has the experts, as `cost.expert.spread` counts them.
    """
    dist.init_process_group("fake", rank=rank, world_size=job.layout.world, store=FakeStore())
    try:
        mesh = make_mesh(job.layout, job.model, rank)
        with FakeTensorMode(allow_non_fake_inputs=True):
            program = Program(job, mesh)
            _route(program, experts)
            _settle(program)
            yield program
    finally:
        dist.destroy_process_group()


def fake_batch(job: Job) -> MicroBatch:
    """A micro batch of a data-parallel rank."""
    shape = (job.layout.micro_batch, job.train.seq_len)
    tokens = torch.zeros(shape, dtype=torch.int64)
    # Documents have no lengths without data; one a sample is what the formulas take.
    documents = [(shape[1],)] * shape[0] if job.data.document_mask else None
    return MicroBatch(tokens, tokens, torch.arange(shape[0]), documents)


def _route(program: Program, experts: int) -> None:
    """Where sizes depend on data, the table that the formulas take: `cost.expert.spread`."""
    job = program.job
    for module in program.modules.values():
        for moe in mixtures(module):
            counts = list(spread(job))
            each = len(counts) // job.layout.ep
            first = experts * each
            come = [[counts[first : first + each]] * job.layout.ep] * job.layout.etp
            moe.dispatch.read = lambda *_, told=(counts, come): told


def _settle(program: Program) -> None:
    """What a first step leaves behind: states of the optimizer, weights that are under way."""
    train, segments = program.job.train, program.engine.segments
    norm = torch.ones((), dtype=torch.float64)
    apply_update(program.optimizer, segments, norm, train.clip, 1.0, train.learning_rate)
    program.engine.publish()
