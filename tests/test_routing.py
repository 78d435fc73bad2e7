"""What routers chose, as a run tells it."""

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import cases
from harness import Case, micro_batches
from plait.parallel.mesh import make_mesh
from plait.spec.job import Job
from plait.spec.layout import Layout
from plait.train.metrics import Metrics
from plait.train.program import Program
from plait.train.routing import Routing, routing_of
from ranks import run_ranks

LAYOUTS = {
    "one": Layout.fill(1, micro_batch=4),
    "ep": Layout.fill(2, ep=2, micro_batch=2),
    "tp": Layout.fill(2, tp=2, ep=2, micro_batch=4, sequence_parallel=False),
    "cp": Layout.fill(4, cp=2, tp=2, ep=2, etp=2, micro_batch=4),
    "pp": Layout.fill(4, pp=2, ep=2, schedule="dualpipev", zero=2),
    "recompute": Layout.fill(2, ep=2, micro_batch=2, recompute="full"),
}


def job_of(name: str, model: str, capacity: float | None) -> Job:
    model = replace(cases.MIXTURES[model], layers=4)
    model = replace(model, moe=replace(model.moe, capacity=capacity))
    layout = LAYOUTS[name]
    return Case(model, layout, 16 // (layout.dp * layout.micro_batch)).job


def routings(rank: int, job: Job) -> list[Routing]:
    program = Program(job, make_mesh(job.layout, job.model, rank))
    program.initialize()
    found = []
    for step in range(2):
        result = program.step(micro_batches(job, program.mesh, step), step)
        found.append(routing_of(job.model, result.routed, int(result.tokens)))
    return found


@pytest.mark.parametrize("capacity", [None, 0.75])
@pytest.mark.parametrize("model", ["mixtral", "qwen2-moe"])
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "one"])
def test_every_choice_is_told_once_whatever_the_layout(name, model, capacity):
    (one,) = run_ranks(1, routings, job_of("one", model, capacity))
    job = job_of(name, model, capacity)
    for ranks in run_ranks(job.layout.world, routings, job):
        for found, expected in zip(ranks, one, strict=True):
            assert (found.layers, found.sent) == (expected.layers, expected.sent)
            assert found.received == expected.received
            assert found.aux_loss == pytest.approx(expected.aux_loss, rel=1e-12)
            assert found.z_loss == pytest.approx(expected.z_loss, rel=1e-12)
    topk, tokens = job.model.moe.topk, 16 * 16
    for routing in one:
        assert all(sum(row) == topk * tokens for row in routing.sent)
        assert (routing.dropped > 0) == (capacity is not None)


def test_numbers_of_a_routing():
    routing = Routing((1, 3), ((4, 4, 4, 4), (8, 4, 2, 2)), ((4, 4, 4, 4), (6, 2, 2, 2)), 0.1, 0)
    assert routing.imbalance == 2.0
    assert routing.dropped == 0.125


def test_experts_that_nobody_chose_are_no_division_by_zero():
    routing = routing_of(cases.MIXTURES["mixtral"], torch.zeros(2 * 18), 1)
    assert (routing.imbalance, routing.dropped) == (0, 1)


def test_a_model_of_which_only_dense_layers_are_left_trains():
    job = job_of("one", "mixtral", None)
    job = replace(job, model=replace(job.model, moe=replace(job.model.moe, first_dense=4)))
    assert run_ranks(1, routings, job) == [[None, None]]


def test_the_metrics_say_it(tmp_path):
    job = job_of("one", "mixtral", 0.75)
    job = replace(job, metrics=str(tmp_path / "m.jsonl"))
    routing = Routing((0,), ((90, 10) * 4,), ((60, 10) * 4,), 0.5, 0.25)
    with Metrics(job) as report:
        report.console, report.out = (Console(file=io.StringIO(), width=120) for _ in range(2))
        report.start()
        report.step(0, 1.0, 2.0, 1e-3, 0.1, 2**20, routing=routing)
        report.summary([])
    assert "imbalance 1.71  dropped 30.0%" in report.console.file.getvalue()
    table = report.out.file.getvalue()
    assert "90 10 90 10" in table
    assert "60 10 60 10" in table
    line = json.loads((tmp_path / "m.jsonl").read_text())
    assert (line["aux_loss"], line["z_loss"]) == (0.5, 0.25)
    assert line["imbalance"] == pytest.approx(60 / 35)
    assert line["dropped"] == pytest.approx(0.3)
