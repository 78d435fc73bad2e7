"""Predicted traffic against what real ranks send over gloo, on each of them."""

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import cases
from harness import micro_batches
from plait.cost.ledger import TrafficLedger, differences
from plait.cost.traffic import traffic
from plait.parallel.mesh import make_mesh
from plait.spec.job import Job
from plait.spec.layout import Layout
from plait.spec.model import Model
from plait.trace.memory import MemoryTracker
from plait.trace.recorder import Recorder
from plait.train.program import Program
from ranks import run_ranks
from test_ledger_pipeline import LLAMA, make_job

POINTS = [
    cases.random_point(random.Random(seed), **fixed)
    for seed, fixed in enumerate(
        (
            {"world": 2, "tp": 1, "zero": 0},
            {"world": 2, "tp": 2, "sequence_parallel": True, "recompute": "full"},
            {"world": 4, "tp": 2, "zero": 1, "accumulation": 2},
            {"world": 4, "tp": 1, "zero": 2, "accumulation": 2, "dp_replicate": 1},
            {"world": 4, "tp": 2, "zero": 3, "tied": True, "sequence_parallel": True},
            {"world": 4, "tp": 4, "kv_heads": 2, "model": "olmo2", "recompute": "selective"},
            {"world": 4, "tp": 1, "zero": 3, "dp_replicate": 2, "model": "gpt2"},
        )
    )
]
POINTS += [
    cases.random_point(random.Random(seed), cases.CONTEXT, **fixed)
    for seed, fixed in enumerate(
        (
            {"world": 4, "cp": 4, "ulysses": 1, "cp_method": "ring", "recompute": "full"},
            {"world": 4, "cp": 4, "ulysses": 2, "kv_heads": 1, "model": "mistral"},
            {"world": 4, "cp": 2, "ulysses": 2, "tp": 2, "recompute": "selective:attention"},
            {"world": 4, "cp": 4, "cp_method": "all-gather", "zero": 0},
        )
    )
]


def recorded(rank: int, job: Job) -> TrafficLedger:
    mesh = make_mesh(job.layout, job.model, rank)
    program = Program(job, mesh)
    program.initialize()
    program.step(micro_batches(job, mesh, 0), 0)
    with Recorder(mesh) as recorder:
        program.step(micro_batches(job, mesh, 1), 1)
    return recorder.ledger


@pytest.mark.parametrize("point", POINTS, ids=cases.name)
def test_each_rank_sends_what_was_predicted(point):
    job = cases.case(point).job
    predicted = traffic(job)
    for ledger in run_ranks(point["world"], recorded, job):
        assert differences(predicted, ledger) == []


def others(rank: int) -> TrafficLedger:
    mesh = make_mesh(Layout.fill(2), Model.of("any", layers=1, hidden=8, heads=1, vocab=8), rank)
    linear, devices = nn.Linear(8, 8), init_device_mesh("cpu", (2,))
    fully_shard(linear, mesh=devices)
    cut = distribute_tensor(torch.ones(6, 4), devices, [Shard(0)])
    with Recorder(mesh) as recorder:
        y = linear(torch.ones(4, 8))
        with mesh.scope.during("backward"):
            y.sum().backward()
        with mesh.scope.during("optimizer"):
            dist.all_reduce(y.detach(), async_op=True).wait()
        with mesh.scope.during("loss"):
            (cut + cut).redistribute(devices, [Replicate()]).to_local()
    return recorder.ledger


def test_what_others_send_is_seen():
    """FSDP2 gathers 72 weights and reduces as many gradients; torch's own call; DTensor."""
    for ledger in run_ranks(2, others):
        rows = {(r.collective, r.phase): (r.count, r.bytes) for r in ledger.rows()}
        assert rows == {
            ("all-gather", "forward"): (1, 288),
            ("reduce-scatter", "backward"): (1, 288),
            ("all-reduce", "optimizer"): (1, 128),
            ("all-gather", "loss"): (1, 96),
        }


def first_step(rank: int, job: Job) -> list[dict]:
    program = Program(job, mesh := make_mesh(job.layout, job.model, rank))
    program.initialize()
    with MemoryTracker(program) as tracker:
        program.step(micro_batches(job, mesh, 0), 0)
    return tracker.rows()


def test_what_the_optimizer_makes_first_is_not_there_in_forward():
    """A first step begins without the states of Adam, and ends with them."""
    (rows,) = run_ranks(1, first_step, make_job(LLAMA, 1, pp=1))
    held = {row["moment"]: row["optimizer"] for row in rows}
    assert held["optimizer"] > 0
    assert held["forward"] == held["loss"] == held["backward"] == 0
