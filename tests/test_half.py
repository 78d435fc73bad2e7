"""Half precision: the loss scale, steps that overflow, and layouts in bfloat16."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cases
from harness import Case, held_weights, micro_batches, on_rank, one_process
from plait.models.layers import RMSNorm
from plait.parallel.mesh import make_mesh
from plait.parallel.tensor import ShardedNorm
from plait.spec.job import Job, Train
from plait.spec.layout import Layout
from plait.spec.model import Model
from plait.train import checkpoint
from plait.train.program import Program
from ranks import run_ranks

#: A width of 20, so that vectors end between multiples of the alignment.
MODEL = replace(cases.MODELS["qwen3"], hidden=20, kv_heads=2)


def job_of(dtype: str, layout: Layout, model=MODEL, **train) -> Job:
    job = Case(model, layout, accumulation=2, train=Train(**train)).job
    return replace(job, train=replace(job.train, dtype=dtype))


def layout_of(zero: int) -> Layout:
    return Layout.fill(2, zero=zero, dp_replicate=2 if zero == 0 else 1, micro_batch=2)


def program_of(rank: int, job: Job) -> Program:
    program = Program(job, make_mesh(job.layout, job.model, rank))
    program.initialize()
    return program


def step(program: Program, number: int, loss_scale: float = 1.0) -> float:
    """A step; returns its gradient norm."""
    batches = micro_batches(program.job, program.mesh, number)
    return program.step(batches, number, loss_scale).grad_norm.item()


def bad_step(program: Program, number: int, value: float, loss_scale: float = 1.0) -> float:
    """A step in which one gradient of rank 0 is `value` everywhere."""
    weight = program.engine.parameters["layers.0.attention.q_norm.weight"]
    handle = weight.register_hook(
        lambda g: torch.full_like(g, value) if program.mesh.rank == 0 else g
    )
    norm = step(program, number, loss_scale)
    handle.remove()
    return norm


def assert_same(a: list, b: list) -> None:
    for (name, *_, x), (_, *_, y) in zip(a, b, strict=True):
        assert torch.equal(x, y), f"{name} off by {(x - y).abs().max().item()}"


# ------------------------------------------------------------------------------------------
# The loss scale


def three_steps(rank: int, job: Job, loss_scale: float) -> tuple[list[float], list]:
    program = program_of(rank, job)
    return [step(program, n, loss_scale) for n in range(3)], held_weights(program)


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("zero", [0, 3])
def test_the_loss_scale_drops_out(zero, clip):
    """eps as large as the gradients, so that Adam does not hide a wrong scale of them."""
    job = job_of("float32", layout_of(zero), eps=1e-2)
    job = replace(job, train=replace(job.train, clip=clip))
    plain, scaled = (run_ranks(2, three_steps, job, scale) for scale in (1.0, 1024.0))
    for (norms, weights), (norms_scaled, weights_scaled) in zip(plain, scaled, strict=True):
        assert min(norms) > clip, "the case must be one that is clipped"
        assert norms_scaled == pytest.approx(norms, rel=1e-6)
        for (name, *_, a), (_, *_, b) in zip(weights, weights_scaled, strict=True):
            error = (a - b).abs().max().item()
            assert error <= 1e-6 * a.abs().max().item(), f"{name} off by {error}"


# ------------------------------------------------------------------------------------------
# Steps that overflow


def with_bad_steps(rank: int, job: Job) -> list[tuple[list, list]]:
    """Pairs of weights that must be the same."""
    same = []
    clean, program = program_of(rank, job), program_of(rank, job)
    norms = [step(clean, n) for n in range(2)]
    assert step(program, 0) == norms[0]
    before = held_weights(program)
    for value in (float("nan"), float("inf")):
        assert not torch.tensor(bad_step(program, 7, value)).isfinite()
        same.append((held_weights(program), before))
    assert step(program, 1) == norms[1], "the next good step"
    same.append((held_weights(program), held_weights(clean)))
    return same


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_overflow_changes_nothing(zero, dtype):
    for same in run_ranks(2, with_bad_steps, job_of(dtype, layout_of(zero))):
        for a, b in same:
            assert_same(a, b)


def saved_after_a_bad_step(rank: int, job: Job, folder: str) -> tuple[dict, list, list]:
    program = program_of(rank, job)
    step(program, 0, 1024.0)
    bad_step(program, 1, float("inf"), 1024.0)
    where = checkpoint.save(program, job, 2, Path(folder), {"loss_scale": 512.0})
    fresh = program_of(rank, job)
    about = checkpoint.load(fresh, where)
    for p in (program, fresh):
        step(p, about["step"], about["loss_scale"])
    return about, held_weights(program), held_weights(fresh)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_skipped_step_is_remembered(zero, tmp_path):
    """Adam has made fewer updates than there were steps, also after a resume."""
    job = job_of("float16", layout_of(zero))
    for about, a, b in run_ranks(2, saved_after_a_bad_step, job, str(tmp_path)):
        assert (about["step"], about["updates"], about["loss_scale"]) == (2, 1, 512.0)
        assert_same(a, b)


# ------------------------------------------------------------------------------------------
# bfloat16

#: The most that rounding to the 8 bits of a bfloat16 takes from a number. Sums of many rounded
#: terms are off by little more of their size, and so are gradients as vectors.
BFLOAT16 = 2.0**-8


@pytest.mark.parametrize("name", ["qwen2", "olmo2"])
@pytest.mark.parametrize(
    "layout",
    [Layout.fill(2, tp=2, micro_batch=4), Layout.fill(2, zero=3, micro_batch=2)],
    ids=["tp", "zero3"],
)
def test_a_layout_in_bfloat16_is_as_good_as_one_rank(layout, name):
    hold(layout, replace(cases.MODELS[name], norm_offset=name == "olmo2"))


@pytest.mark.parametrize("name", ["mixtral", "deepseek", "gpt-oss", "mla"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout.fill(2, tp=2, etp=2, micro_batch=4),
        Layout.fill(2, zero=3, ep=2, micro_batch=2),
        Layout.fill(2, cp=2, ep=2, micro_batch=4),
    ],
    ids=["etp", "ep", "cp"],
)
def test_mixtures_too(layout, name):
    """Every expert serves every token: which are chosen may depend on the last digit."""
    model = cases.MIXTURES[name]
    if model.moe is None:
        layout = replace(layout, ep=1, etp=1)
    else:
        every = replace(model.moe, experts=4, topk=4, groups=1, topk_groups=1)
        model = replace(model, moe=every)
    hold(layout, model)


def hold(layout: Layout, model: Model) -> None:
    """Both against float64: no layout loses more than rounding does anyhow."""
    alone = job_of("bfloat16", Layout.fill(1, micro_batch=4), model)
    oracle = one_process(alone)
    (one,) = run_ranks(1, on_rank, alone)
    ranks = run_ranks(2, on_rank, job_of("bfloat16", layout, model))
    for trace in ranks:
        assert trace.losses == pytest.approx(one.losses, rel=BFLOAT16)
        assert trace.norms == pytest.approx(one.norms, rel=4 * BFLOAT16)
    for label, traces in (("one rank", [one]), ("layout", ranks)):
        far, size = {}, {}
        for trace in traces:
            for parameter, offset, shape, values in trace.gradients:
                box = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
                expected = oracle.gradients[parameter][box]
                error = (values.view(shape) - expected).square().sum().item()
                far[parameter] = far.get(parameter, 0.0) + error
                size[parameter] = size.get(parameter, 0.0) + expected.square().sum().item()
        for parameter, error in far.items():
            off = (
                f"{label}: gradient of {parameter} off by {error**0.5} of {size[parameter] ** 0.5}"
            )
            assert error**0.5 <= 6 * BFLOAT16 * size[parameter] ** 0.5, off


def norm_over_ranks(rank: int, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    """This rank's half of an RMS norm over all columns of x."""
    model = cases.MODELS["olmo2"]
    axis = make_mesh(Layout.fill(2, tp=2), model, rank)["tp"]
    n = x.shape[1] // 2
    part = RMSNorm(n, norm.eps, norm.offset)
    part.weight.data = norm.weight.data[rank * n : (rank + 1) * n]
    return ShardedNorm(part, axis, 1)(x[:, rank * n : (rank + 1) * n]).detach()


@pytest.mark.parametrize("offset", [False, True])
def test_a_norm_over_ranks_rounds_once(offset):
    """As the norm of one rank does: weights of 1 + a thousandth are not ones."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 32, generator=generator).bfloat16()
    norm = RMSNorm(32, 1e-6, offset)
    norm.weight.data = (torch.randn(32, generator=generator) * 0.01 + (not offset)).bfloat16()
    y = torch.cat(run_ranks(2, norm_over_ranks, x, norm), 1)
    wide, weight = x.double(), norm.weight.detach().double() + offset
    exact = wide * (wide.square().mean(1, keepdim=True) + 1e-6).rsqrt() * weight
    excess = (y.double() - exact).abs() - exact.abs() * (BFLOAT16 + 1e-6)
    assert excess.max().item() <= 0
