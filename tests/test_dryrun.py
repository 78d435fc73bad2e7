"""A dry run that repeats against one that runs everything; one rank for many against each of them;
and ranks of a group that do not issue the same collectives."""

import json
import random
from dataclasses import asdict, replace

import pytest

from plait.cli.main import main
from plait.cost.ledger import MEMORY_CLASSES
from plait.parallel.collectives import Axis, Done
from plait.parallel.pipeline import _Run
from plait.spec.job import Job
from plait.spec.layout import Layout
from plait.spec.model import MoE
from plait.spec.schedule import SCHEDULES
from plait.trace import dryrun as dry
from plait.trace.dryrun import dryrun, measure
from test_ledger_dry import random_context, random_job
from test_ledger_experts import random_job as random_experts
from test_ledger_pipeline import LLAMA, legal_job, make_job


def same(job: Job) -> None:
    """To the byte, in every class and moment of every stage."""
    repeated, whole = measure(job), measure(job, full=True)
    assert repeated.traffic == whole.traffic
    assert repeated.memory == whole.memory
    assert repeated.unlike == whole.unlike == []


def with_micro_batches(job: Job, m: int) -> Job:
    batch = job.layout.dp * job.layout.micro_batch * m
    return replace(job, train=replace(job.train, accumulation=m, global_batch=batch))


# ------------------------------------------------------------------------------------------
# Repeated and run


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_actions_are_repeated_to_the_byte(schedule):
    job = legal_job(2, schedule)
    same(with_micro_batches(job, job.train.accumulation + job.layout.pp))


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(3, 13))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_actions_of_many_pipelines(schedule, seed):
    same(legal_job(seed, schedule))


RANDOM = pytest.mark.parametrize("make", [random_job, random_context, random_experts])


def repeats(job: Job) -> None:
    same(with_micro_batches(job, job.train.accumulation + (4 if job.layout.pp == 1 else 0)))


@RANDOM
def test_micro_batches_are_repeated_to_the_byte(make):
    repeats(make(0))


@pytest.mark.sweep
@RANDOM
@pytest.mark.parametrize("seed", range(1, 20))
def test_micro_batches_of_many_jobs(make, seed):
    repeats(make(seed))


def deep(seed: int) -> Job:
    """Of more layers than are run, alike or in a pattern, buckets of a layer's own or not."""
    rng, job = random.Random(seed), random_job(seed)
    model = replace(
        job.model,
        layers=rng.randint(9, 16),
        window=rng.choice((None, 8)),
        full_every=rng.choice((None, 2)),
    )
    train = replace(job.train, bucket_mib=rng.choice((0.0, 0.0, 0.02)))
    return replace(job, model=model, train=train)


@pytest.mark.parametrize("seed", range(2))
def test_layers_are_repeated_to_the_byte(seed):
    same(deep(seed))


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(2, 100))
def test_layers_of_many_models(seed):
    same(deep(seed))


@pytest.fixture
def run(monkeypatch):
    """The depths of the models that are run."""
    depths, real = [], dry.fake_program
    monkeypatch.setattr(
        dry, "fake_program", lambda job, *at: depths.append(job.model.layers) or real(job, *at)
    )
    return depths


MIXED = MoE(experts=4, topk=2, ffn=16, first_dense=1)
DEEP = {
    "dense": (LLAMA.with_layers(8), [5, 6]),
    "dense, then mixtures": (replace(LLAMA, moe=MIXED, layers=9), [6, 7]),
    "windows in every second": (replace(LLAMA, window=8, full_every=2, layers=16), [10, 12]),
}


@pytest.mark.parametrize(("name", "zero"), [(n, z) for n, z in zip(DEEP, (1, 3, 3), strict=True)])
def test_a_deep_model_is_run_in_few_layers(name, zero, run):
    model, short = DEEP[name]
    job = make_job(model, 1, "bfloat16", 0.0, pp=1, world=2, zero=zero)
    measured = measure(job)
    assert run == short
    whole = measure(job, full=True)
    assert measured.traffic == whole.traffic
    assert measured.memory == whole.memory


def test_buckets_in_another_rhythm_are_not_repeated(run):
    """Here a bucket reaches over the border of two layers: all have to be run."""
    job = replace(deep(0), layout=Layout.fill(2, zero=1))
    job = replace(
        job, train=replace(job.train, bucket_mib=0.1, global_batch=job.train.global_batch)
    )
    job = with_micro_batches(job, 1)
    same(job)
    assert set(run) == {job.model.layers}


def test_stages_that_are_alike_are_run_once(run):
    measure(make_job(LLAMA.with_layers(8), 16, pp=8))
    assert len(run) == 3  # the first, one in the middle, the last


# ------------------------------------------------------------------------------------------
# One rank for many

#: A layout for each axis along which ranks might differ.
WORLDS = {
    "zero-3": {"world": 4, "tp": 2, "zero": 3},
    "hsdp": {"world": 4, "zero": 2, "dp_replicate": 2},
    "ulysses": {"world": 2, "cp": 2, "ulysses": 2},
    "pipeline": {"world": 4, "pp": 2, "tp": 2, "schedule": "zb-h1"},
}


@pytest.mark.parametrize("name", WORLDS)
def test_every_rank_is_of_its_kind(name):
    """The same is sent. In forward and backward as much is held, but for what the docstring of
    `measure` names: optimizer states of padding and a number a stretch, a byte a token."""
    layout = {"pp": 1} | WORLDS[name]
    job = make_job(LLAMA.with_layers(2), 4 if layout["pp"] > 1 else 1, **layout)
    said = measure(job)
    tokens = job.layout.micro_batch * job.train.seq_len
    per_stage = job.layout.world // job.layout.pp
    for rank in range(job.layout.world):
        mine, stage = measure(job, rank=rank), rank // per_stage
        assert mine.traffic == said.traffic.of_stage(stage)
        for row, its in zip(mine.memory, [r for r in said.memory if r.stage == stage], strict=True):
            for kind in MEMORY_CLASSES:
                allowed = {"optimizer": 1024, "activations": tokens}.get(kind, 0)
                assert abs(getattr(row, kind) - getattr(its, kind)) <= allowed, (rank, row, its)


@pytest.mark.parametrize("zero", [0, 3])
def test_no_rank_of_a_ring_holds_more_than_the_one_that_is_run(zero):
    job = make_job(LLAMA.with_layers(1), 1, pp=1, world=4, cp=4, zero=zero)
    measured = measure(job)
    said = {row.moment: row.total for row in measured.memory}
    for rank in range(4):
        mine = measure(job, rank=rank)
        assert mine.traffic == measured.traffic
        for row in mine.memory:
            assert row.total <= said[row.moment] + 1024
        assert dryrun(job, [], rank=rank)["differences"] == []


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_rank_of_a_later_stage(schedule):
    vpp = 2 if schedule == "zbv" else 1
    job = make_job(LLAMA.with_layers(8), 8, pp=4, vpp=vpp, world=8, tp=2, schedule=schedule)
    answer, whole = dryrun(job, [], rank=4), measure(job)
    assert answer["agree"]
    assert answer["measured"]["memory"] == [asdict(r) for r in whole.memory if r.stage == 2]
    sent = [asdict(r) for r in whole.traffic.rows() if r.stage == 2]
    assert answer["measured"]["traffic"] == sent


# ------------------------------------------------------------------------------------------
# Ranks of a group

TWO = {"pp": 2, "world": 8, "tp": 2, "zero": 1}


def mutate(monkeypatch, wrong) -> None:
    """`wrong(axis, tensor)`: whether this all-reduce is left out."""
    real = Axis.all_reduce

    def all_reduce(axis, x, *args, **kwargs):
        return Done() if wrong(axis, x) else real(axis, x, *args, **kwargs)

    monkeypatch.setattr(Axis, "all_reduce", all_reduce)


@pytest.mark.parametrize("full", [False, True])
def test_a_rank_that_leaves_out_a_collective_is_named(monkeypatch, full):
    """The last tp rank does not take part in the maximum of the loss, of which there is one a
    token: [128] of float32."""
    job = make_job(LLAMA, 4, **TWO)
    tokens = job.train.seq_len
    mutate(
        monkeypatch,
        lambda axis, x: axis.name == "tp" and axis.rank == 1 and x.shape == (tokens,),
    )
    answer = dryrun(job, [], full=full)
    assert not answer["agree"]
    (line,) = answer["differences"]
    assert "over tp differs: rank 4: all-reduce of 512 bytes (float32) over tp" in line
    assert "rank 7: all-reduce of 1024 bytes (float32) over tp" in line


@pytest.mark.parametrize("full", [False, True])
def test_a_stage_that_leaves_out_a_sum_over_all_ranks_is_named(monkeypatch, full):
    job = make_job(LLAMA, 4, **TWO)
    mutate(monkeypatch, lambda axis, x: axis.name == "world" and axis.rank >= 4 and x.numel() > 1)
    lines = dryrun(job, [], full=full)["differences"]
    assert any(
        line.startswith("collective 2 over world differs: rank 0: all-reduce of 16 bytes (float64)")
        and line.endswith("rank 4: nothing more")
        for line in lines
    )


def test_collectives_in_another_order_are_named(monkeypatch):
    """The last rank gathers its first two buckets in the other order."""
    job = make_job(LLAMA, 1, bucket_mib=0.1, pp=1, world=4, zero=1)
    real = dry.trace

    def trace(program, *args):
        if program.mesh.rank == 3:
            program.engine.buckets[-2:] = program.engine.buckets[-2:][::-1]
        return real(program, *args)

    assert dryrun(job, [])["agree"]
    monkeypatch.setattr(dry, "trace", trace)
    (line,) = dryrun(job, [])["differences"]
    assert "over fsdp differs: rank 0: all-gather of" in line
    assert "rank 3: all-gather of" in line


@pytest.mark.parametrize("full", [False, True])
def test_a_message_that_is_not_sent_is_named(monkeypatch, full):
    job = make_job(LLAMA, 4, pp=2)
    real = _Run.send

    def send(run, action, last):
        if str(action) != "1SEND_B0":
            return real(run, action, last)
        run.gradients.pop((1, 0))

    monkeypatch.setattr(_Run, "send", send)
    lines = dryrun(job, [], full=full)["differences"]
    # Where actions of a kind are taken for one, the one that is unlike the others is named.
    said = "over pp differs: rank 1: nothing more; rank 0: receive" if full else "1SEND_B0"
    assert any(said in line for line in lines)


# ------------------------------------------------------------------------------------------
# The command


@pytest.fixture
def plait(capsys):
    """Runs a command line here: (exit code, stdout, stderr)."""
    return lambda *argv: (main(list(argv)), *capsys.readouterr())


ASK = ("dryrun", "tiny", "--gpus", "h100:4", "--tp", "2", "--seq-len", "64")


@pytest.mark.parametrize("extra", [(), ("--full",), ("--rank", "3"), ("--full", "--rank", "3")])
def test_the_command(plait, extra):
    code, out, _ = plait(*ASK, *extra, "--accumulation", "5")
    assert code == 0
    assert "traffic agrees" in out


def test_what_does_not_fit_is_answered_with_1(plait):
    code, out, _ = plait("dryrun", "llama3.1-8b", "--gpus", "h100:1", "--seq-len", "64", "--json")
    answer = json.loads(out)
    assert (code, answer["agree"], answer["fits"]) == (1, True, False)


@pytest.mark.parametrize(("rank", "nearest"), [("4", "3"), ("-1", "0"), ("x", "0")])
def test_a_rank_that_is_not_there(plait, rank, nearest):
    code, out, err = plait(*ASK, "--rank", rank)
    assert (code, out) == (2, "")
    assert "rank" in err
    assert nearest in err


def test_progress_goes_to_stderr(plait, monkeypatch):
    monkeypatch.setattr("plait.cli.dryrun._QUIET", 0.0)
    _, out, err = plait(*ASK, "--json")
    assert "dry run: running rank 0" in err
    assert "dry run" not in out
