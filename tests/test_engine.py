"""A step depends on weights and data only: not on what was begun, or failed, before it."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import cases
from harness import Case, compare, held_weights, micro_batches, on_rank, one_process
from plait.parallel.mesh import make_mesh
from plait.spec.job import Job, Train
from plait.spec.layout import Layout
from plait.spec.model import Model
from plait.train.program import Program
from ranks import run_ranks

#: A width of 20, so that vectors end between multiples of the alignment.
MODEL = replace(cases.MODELS["qwen3"], hidden=20, kv_heads=2)


class Interrupted(Exception):
    """What the tests raise inside a step."""


def _interrupt_at(call: int) -> Callable:
    """A hook that raises when it is called for the `call`-th time (from 0)."""
    calls = itertools.count()

    def hook(*_: object) -> None:
        if next(calls) == call:
            raise Interrupted

    return hook


def evaluation(program: Program, step: int) -> None:
    (batch, *_) = micro_batches(program.job, program.mesh, step)
    with torch.no_grad():
        program.modules[0](batch.tokens, batch.targets, batch.index)


def forward_thrown_away(program: Program, step: int) -> None:
    (batch, *_) = micro_batches(program.job, program.mesh, step)
    program.modules[0](batch.tokens, batch.targets, batch.index)


def _fails(program: Program, step: int) -> None:
    with pytest.raises(Interrupted):
        program.step(micro_batches(program.job, program.mesh, step), step)


def error_in_forward(program: Program, step: int) -> None:
    """In the second micro batch, between two layers."""
    handle = program.modules[0].layers["1"].register_forward_pre_hook(_interrupt_at(1))
    _fails(program, step)
    handle.remove()


def error_in_first_backward(program: Program, step: int) -> None:
    """When some gradients of the first micro batch have come, and some of that layer's not."""
    q = program.engine.parameters["layers.1.attention.q.weight"]
    handle = q.register_hook(_interrupt_at(0))
    _fails(program, step)
    handle.remove()


def error_in_last_backward(program: Program, step: int) -> None:
    """When reductions are under way."""
    down = program.engine.parameters["layers.0.mlp.down.weight"]
    handle = down.register_hook(_interrupt_at(1))
    _fails(program, step)
    handle.remove()


def disturbed(rank: int, job: Job, disturb: Callable | None) -> tuple[list[float], list]:
    """Norms of two steps and the weights after them, each step after a disturbance."""
    program = Program(job, make_mesh(job.layout, job.model, rank))
    program.initialize()
    norms = []
    for step in range(2):
        if disturb is not None:
            # The data of another step: nothing of it may be left.
            disturb(program, step + 5)
        result = program.step(micro_batches(job, program.mesh, step), step)
        norms.append(result.grad_norm.item())
    return norms, held_weights(program)


def both(rank: int, job: Job, disturb: Callable) -> tuple:
    return disturbed(rank, job, None), disturbed(rank, job, disturb)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "disturb",
    [
        evaluation,
        forward_thrown_away,
        error_in_forward,
        error_in_first_backward,
        error_in_last_backward,
    ],
)
def test_a_step_does_not_see_what_came_before(disturb, zero):
    replicate = 2 if zero == 0 else 1
    layout = Layout.fill(2, zero=zero, dp_replicate=replicate, micro_batch=2)
    job = Case(MODEL, layout, accumulation=2, train=Train(bucket_mib=0.005)).job
    for alone, after in run_ranks(2, both, job, disturb):
        assert after[0] == alone[0], "gradient norms"
        for (name, *_, a), (_, *_, b) in zip(alone[1], after[1], strict=True):
            assert torch.equal(a, b), f"{name} off by {(a - b).abs().max().item()}"


@pytest.mark.parametrize("zero", [1, 2])
def test_ranks_that_own_nothing_train_along(zero):
    """Every bucket is one parameter of at most 14 elements: the eighth rank gets padding only."""
    model = Model.of(
        "tiny", layers=1, hidden=2, heads=1, head_dim=2, vocab=7, ffn=3, seq=8, tied=True
    )
    layout = Layout.fill(8, zero=zero)
    job = Case(model, layout, seq_len=8, train=Train(bucket_mib=1e-9)).job
    traces = run_ranks(8, on_rank, job)
    assert not traces[7].weights, "the case must be one where a rank owns nothing"
    compare(traces, one_process(job))
