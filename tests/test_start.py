"""Parameters start bit-identical in every layout, and a rank makes only what it holds."""

import random

import pytest
import torch

import cases
from plait.models.random import initial
from plait.parallel.mesh import make_mesh
from plait.spec.parameters import parameters
from plait.train.program import Program
from ranks import run_ranks

RNG = random.Random(7)
POINTS = [cases.random_point(RNG, world=world) for world in (1, 2, 2, 4, 4, 4, 8, 8)]


def start(rank: int, job):
    program = Program(job, make_mesh(job.layout, job.model, rank))
    made = 0

    def value(piece):
        nonlocal made
        made += torch.Size(piece.size).numel()
        return initial(piece.parameter, job.train.seed, piece.offset, piece.size)

    program.engine.initialize(value)
    engine = program.engine
    held = [
        (p.parameter.name, p.offset, p.size, engine.segments[i].weight[s].clone())
        for p, i, s in engine.held()
    ]
    return held, made, sum(b.master.numel() for b in engine.buckets)


@pytest.mark.parametrize("point", POINTS, ids=cases.name)
def test_every_layout_starts_from_the_same_bits(point):
    job = cases.case(point).job
    whole = {
        p.name: initial(p, job.train.seed, (0,) * len(p.shape), p.shape)
        for p in parameters(job.model)
    }
    seen = {name: torch.zeros(t.shape, dtype=torch.bool) for name, t in whole.items()}
    for held, made, own in run_ranks(point["world"], start, job):
        assert made <= own
        for name, offset, size, values in held:
            box = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
            assert torch.equal(values.view(size), whole[name][box].to(values.dtype))
            seen[name][box] = True
    assert all(mask.all() for mask in seen.values())
