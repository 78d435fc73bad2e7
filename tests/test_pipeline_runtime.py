"""A pipeline beside its training steps: tables from files, evaluation, copies of weights,
checkpoints, half precision."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import cases
from harness import Case, compare, global_batch, held_weights, micro_batches, on_rank, one_process
from plait.models.random import initial
from plait.models.transformer import Transformer
from plait.parallel.mesh import make_mesh
from plait.schedules.build import build
from plait.schedules.csvfile import write_table
from plait.schedules.job import table_of
from plait.schedules.table import Action, Table
from plait.spec import saved
from plait.spec.job import Job
from plait.spec.layout import Layout
from plait.spec.parameters import parameters
from plait.spec.schedule import SCHEDULES
from plait.train import checkpoint
from plait.train.program import MicroBatch, Program
from ranks import run_ranks
from tables import everywhere

MODEL = replace(cases.MODELS["llama"], layers=8, kv_heads=2)


def job_of(schedule: str, world: int, micro: int, model=MODEL, **layout: Any) -> Job:
    return Case(model, Layout.fill(world, schedule=schedule, **layout), micro).job


def program_of(rank: int, job: Job) -> Program:
    program = Program(job, make_mesh(job.layout, job.model, rank))
    program.initialize()
    return program


def step(program: Program, number: int) -> float:
    batches = micro_batches(program.job, program.mesh, number)
    return program.step(batches, number).grad_norm.item()


# ------------------------------------------------------------------------------------------
# Tables that no builder makes


def mixed(pp: int, micro: int) -> Table:
    """GPipe with every other backward cut in two, all W at the end."""
    ranks = []
    for actions in build("gpipe", pp, micro).ranks:
        row = [a._replace(kind="I") if a.kind == "B" and a.micro % 2 else a for a in actions]
        ranks.append((*row, *(a._replace(kind="W") for a in row if a.kind == "I")))
    return Table("mixed", tuple(ranks))


def anywhere(pp: int, micro: int) -> Table:
    """A micro batch at a time through 2 pp chunks, of which rank r holds r - 1 and 2 pp - 1 - r
    (rank 0 pp - 1): no loop and no V."""
    rank = {c: c + 1 for c in range(pp - 1)} | {pp - 1: 0} | {2 * pp - 1 - r: r for r in range(pp)}
    ranks: list[list[Action]] = [[] for _ in range(pp)]
    for i in range(micro):
        for kind, order in (("F", range(2 * pp)), ("B", reversed(range(2 * pp)))):
            for c in order:
                ranks[rank[c]].append(Action(kind, c, i))
    return Table("anywhere", tuple(map(tuple, ranks)))


@pytest.mark.parametrize("make", [mixed, anywhere, everywhere])
@pytest.mark.parametrize("pp", [2, 4])
def test_a_table_in_a_file_equals_one_process(make, pp, tmp_path):
    table = make(pp, 5)
    write_table(table, tmp_path / "table.csv")
    layout = {"pp": pp, "vpp": table.chunks // pp, "zero": 2}
    job = job_of(str(tmp_path / "table.csv"), 4, 5, **layout)
    compare(run_ranks(4, on_rank, job, True), one_process(job))


# ------------------------------------------------------------------------------------------
# Evaluation

BATCHES = (1, 2, 3, 5, 8)
DROPS = replace(cases.MODELS["gpt2"], layers=8)


def eval_batches(job: Job, program: Program, count: int) -> list[MicroBatch]:
    """`count` micro batches of one sample of each data-parallel rank."""
    whole, n = _whole(job, count), count
    at = program.mesh.dp_rank
    return [
        MicroBatch(whole.tokens[s], whole.targets[s], whole.index[s])
        for i in range(n)
        for s in [slice(i * job.layout.dp + at, i * job.layout.dp + at + 1)]
    ]


def _whole(job: Job, count: int) -> MicroBatch:
    train = replace(job.train, global_batch=count * job.layout.dp)
    return global_batch(replace(job, train=train), 50 + count)


@cache
def oracle(job: Job) -> list[float]:
    """Mean losses before any step, without dropout, of each number of batches."""
    module = Transformer(job.model).double().eval()
    table, named = {p.name: p for p in parameters(job.model)}, dict(module.named_parameters())
    losses = []
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(initial(table[name], job.train.seed, (0,) * p.dim(), p.shape))
        for count in BATCHES:
            batch = _whole(job, count)
            loss = module(batch.tokens, batch.targets, batch.index)
            losses.append((loss / (batch.targets >= 0).sum()).item())
    return losses


def evaluated(rank: int, job: Job, between: bool) -> tuple[list[float], list[float], list]:
    """Losses of evaluations, twice each, before the first step; norms of two steps, with
    evaluations before and between them or without; weights."""
    program, losses, norms = program_of(rank, job), [], []
    for number in range(2):
        for count in BATCHES if between else ():
            for _ in range(2):
                loss = program.evaluate(eval_batches(job, program, count)).item()
                losses += [loss] if number == 0 else []
        norms.append(step(program, number))
    return losses, norms, held_weights(program)


def with_and_without(rank: int, job: Job) -> tuple:
    return evaluated(rank, job, True), evaluated(rank, job, False)


@pytest.mark.parametrize(("schedule", "pp"), [(s, 2 + i % 2 * 2) for i, s in enumerate(SCHEDULES)])
def test_evaluation_is_the_mean_loss_and_changes_nothing(schedule, pp):
    job = job_of(schedule, 4, 8, DROPS, pp=pp, zero=3 if pp == 2 else 1)
    expected = [loss for loss in oracle(job) for _ in range(2)]
    for (losses, norms, weights), (_, plain_norms, plain) in run_ranks(4, with_and_without, job):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert losses[::2] == losses[1::2]
        assert norms == plain_norms
        for (name, *_, a), (_, *_, b) in zip(weights, plain, strict=True):
            assert torch.equal(a, b), name


# ------------------------------------------------------------------------------------------
# Copies of the same weights


def copies(rank: int, job: Job) -> dict[str, list[torch.Tensor]]:
    """After three steps all that this rank holds of each parameter, as whole buckets have it."""
    program, held = program_of(rank, job), {}
    for number in range(3):
        step(program, number)
    program.engine.publish(wait=True)
    for chunk in program.engine.chunks.values():
        for b in chunk.buckets:
            b.ready()
            for e in b.bucket.entries:
                held.setdefault(e.parameter.name, []).append(b.full[e.start : e.stop].clone())
    return held


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("schedule", "pp"), [("1f1b", 2), ("zbv", 2), ("dualpipe", 4)])
def test_copies_stay_the_same_to_the_bit(schedule, pp, zero):
    """Of a tied table at both ends (in a V both on one rank), of everything under DualPipe."""
    job = job_of(schedule, 4, 8, replace(MODEL, tied=True), pp=pp, zero=zero, tp=1)
    seen: dict[str, list[torch.Tensor]] = {}
    for held in run_ranks(4, copies, job):
        for name, values in held.items():
            seen.setdefault(name, []).extend(values)
    several = 4 // pp
    assert len(seen["embed.tokens.weight"]) == several * (4 if schedule == "dualpipe" else 2)
    for name, values in seen.items():
        assert schedule != "dualpipe" or len(values) >= 2 * several
        assert all(torch.equal(v, values[0]) for v in values), name


# ------------------------------------------------------------------------------------------
# Checkpoints

LAYOUTS = {
    "no pipeline": Layout.fill(2, zero=3),
    "1f1b": Layout.fill(2, pp=2),
    "interleaved x zero 2": Layout.fill(4, pp=2, schedule="interleaved-1f1b", zero=2),
    "zbv x tp": Layout.fill(4, pp=2, tp=2, schedule="zbv"),
    "dualpipe": Layout.fill(4, pp=4, schedule="dualpipe"),
    "uneven": Layout.fill(4, pp=4, stages=(0, 5, 3, 0), zero=0),
}


def kept(layout: Layout) -> Job:
    """A global batch of 16 samples in every layout."""
    layout = replace(layout, micro_batch=1)
    return Case(replace(MODEL, tied=True), layout, 16 // layout.dp).job


def save_after_one(rank: int, job: Job, folder: str) -> None:
    program = program_of(rank, job)
    step(program, 0)
    checkpoint.save(program, job, 1, Path(folder), {"loss_scale": 1.0})


def go_on(rank: int, job: Job, folder: str) -> tuple[list[float], list[float], list]:
    program = Program(job, make_mesh(job.layout, job.model, rank))
    about = checkpoint.load(program, saved.find(folder))
    results = [
        program.step(micro_batches(job, program.mesh, n), n) for n in range(about["step"], 3)
    ]
    losses, norms = ([getattr(r, k).item() for r in results] for k in ("loss", "grad_norm"))
    return losses, norms, held_weights(program)


@cache
def straight_through() -> Any:
    return one_process(kept(LAYOUTS["no pipeline"]))


_NAMES = list(LAYOUTS)


@pytest.mark.parametrize(
    ("before", "after"),
    [(a, b) for i, a in enumerate(_NAMES) for b in (_NAMES[i - 1], _NAMES[i - 2], _NAMES[i - 3])],
    ids=lambda name: name.replace(" ", "_"),
)
def test_a_run_goes_on_under_another_pipeline(before, after, tmp_path):
    run_ranks(LAYOUTS[before].world, save_after_one, kept(LAYOUTS[before]), str(tmp_path))
    job, oracle = kept(LAYOUTS[after]), straight_through()
    traces = []
    for losses, norms, weights in run_ranks(job.layout.world, go_on, job, str(tmp_path)):
        gradients = [(n, (0,) * g.dim(), g.shape, g) for n, g in oracle.gradients.items()]
        losses, norms = oracle.losses[:1] + losses, oracle.norms[:1] + norms
        traces.append(
            replace(oracle, losses=losses, norms=norms, gradients=gradients, weights=weights)
        )
    compare(traces, oracle)


# ------------------------------------------------------------------------------------------
# Other precisions

BFLOAT16 = 2.0**-8


def norms_of_three(rank: int, job: Job, scale: float) -> tuple[list[float], list[float]]:
    program = program_of(rank, job)
    results = [
        program.step(micro_batches(job, program.mesh, n), n, scale) for n in range(job.train.steps)
    ]
    return [r.loss.item() for r in results], [r.grad_norm.item() for r in results]


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-h1", "v-min", "dualpipe"])
@pytest.mark.parametrize(
    ("dtype", "scale", "loss_far", "norm_far"),
    [("float32", 1024.0, 1e-5, 1e-4), ("bfloat16", 1.0, BFLOAT16, 4 * BFLOAT16)],
)
def test_other_precisions_are_as_good_as_they_can_be(schedule, dtype, scale, loss_far, norm_far):
    """Against float64: no more is lost than the dtype's rounding takes; the loss scale drops
    out."""
    job = job_of(schedule, 4, 8, pp=4, zero=1)
    expected = one_process(job)
    job = replace(job, train=replace(job.train, dtype=dtype))
    for losses, norms in run_ranks(4, norms_of_three, job, scale):
        assert losses == pytest.approx(expected.losses, rel=loss_far)
        assert norms == pytest.approx(expected.norms, rel=norm_far)


# ------------------------------------------------------------------------------------------
# What a rank says it is at


def at_work(rank: int, job: Job) -> list[str]:
    """What was last noted whenever a chunk of this rank began its forward."""
    mesh = make_mesh(job.layout, job.model, rank)
    program = Program(job, mesh)
    program.initialize()
    notes, seen = [""], []
    mesh.scope.note = notes.append
    for module in program.modules.values():
        module.register_forward_pre_hook(lambda *_: seen.append(notes[-1]))
    program.step(micro_batches(job, mesh, 0), 0)
    return [*seen, notes[-1]]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_rank_that_computes_does_not_say_that_it_waits(schedule):
    model = replace(cases.MODELS["llama"], layers=4)
    job = Case(model, Layout.fill(2, pp=2, schedule=schedule), 4).job
    forwards = [[a for a in actions if a.kind == "F"] for actions in table_of(job).ranks]
    for said, actions in zip(run_ranks(2, at_work, job), forwards, strict=True):
        assert said[:-1] == [f"in {action}" for action in actions]
        assert "optimizer" in said[-1]
