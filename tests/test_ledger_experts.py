"""Mixtures and latent attention: predicted traffic and memory against dry runs of random layouts,
and traffic against what real ranks send, with the rows that their routers chose."""

import random
from dataclasses import replace

import pytest

from harness import micro_batches
from plait.cost.expert import own_tokens, spread
from plait.cost.ledger import differences
from plait.cost.memory import memory
from plait.cost.traffic import traffic
from plait.parallel.mesh import make_mesh
from plait.spec.findings import UserError
from plait.spec.job import Job, Train
from plait.spec.layout import Layout
from plait.spec.model import MLA, Model, MoE
from plait.trace.dryrun import measure
from plait.trace.recorder import Recorder
from plait.trace.routed import RoutedRecorder
from plait.train.program import Program
from ranks import run_ranks

WIDE = Model.of("wide", layers=2, hidden=64, heads=8, kv_heads=4, vocab=97, ffn=96)

MIXTURE = {
    "topk": (1, 2, 3),
    "shared": (0, 1, 2),
    "first_dense": (0, 1),
    "bias": (False, True),
    "router_bias": (False, True),
    "topk_first": (False, True),
    "score": ("softmax", "sigmoid"),
    "groups": (1, 2),
    "correction": (False, True),
    "aux_loss": (0.0, 0.01),
    "aux_form": ("sequence", "batch", "global"),
    "z_loss": (0.0, 0.001),
    "capacity": (None, 1.25),
    "drop": ("position", "probability"),
}
LATENT = {"q_rank": (None, 48), "v_dim": (8, 16)}
LAYOUT = {
    "tp": (1, 2, 4),
    "pp": (1, 1, 2),
    "cp": (1, 1, 1, 2, 4),
    "ulysses": (1, 1, 2),
    "cp_method": ("ring", "all-gather"),
    "ep": (1, 2, 4, 8),
    "etp": (1, 1, 2),
    "zero": (0, 1, 2, 3),
    "dp_replicate": (None, None, 2),
    "micro_batch": (1, 2),
    "recompute": ("none", "full", "selective", "selective:attention", "selective:attention,mlp"),
    "schedule": ("1f1b", "zb-h1"),
}


def draw(rng: random.Random, space: dict) -> dict:
    return {name: rng.choice(values) for name, values in space.items()}


def random_job(seed: int, seq: int = 16) -> Job:
    rng = random.Random(seed)
    moe = MoE(experts=8, ffn=48, topk_groups=2, **draw(rng, MIXTURE))
    moe = replace(moe, topk_groups=moe.groups)
    mla = MLA(kv_rank=32, nope_dim=16, rope_dim=8, **draw(rng, LATENT))
    model = replace(
        WIDE,
        moe=moe,
        mla=rng.choice((None, mla)),
        norm_at=rng.choice(("input", "input", "both")),
        dropout=rng.choice((0.0, 0.0, 0.1)),
        tied=rng.choice((False, True)),
    )
    while True:
        given = draw(rng, LAYOUT)
        if given["pp"] == 1:
            given["schedule"] = "1f1b"
        sequence = given["tp"] > 1 and rng.random() < 0.5
        try:
            layout = Layout.fill(8, sequence_parallel=sequence, **given)
            break
        except UserError:
            continue
    accumulation = rng.choice((2, 3))
    train = Train(
        seq_len=seq,
        dtype=rng.choice(("float32", "bfloat16")),
        bucket_mib=rng.choice((0.02, 25.0)),
        accumulation=accumulation,
        global_batch=layout.dp * layout.micro_batch * accumulation,
    )
    return Job(model, layout, train)


@pytest.mark.parametrize("seed", range(8))
def test_random_layouts(seed):
    job = random_job(seed)
    assert differences(traffic(job), measure(job, full=True).traffic) == []


@pytest.mark.sweep
@pytest.mark.parametrize("seed", [*range(8, 12), *range(1000, 1600)])
def test_many_random_layouts(seed):
    job = random_job(seed)
    assert differences(traffic(job), measure(job, full=True).traffic) == []


def far_off(job: Job) -> list[str]:
    """Moments whose peak is not within a hundredth."""
    found = []
    for said, was in zip(memory(job), measure(job, full=True).memory, strict=True):
        if abs(said.total - was.total) > 0.01 * was.total:
            found.append(f"{was.stage} {was.moment}: {said.total} for {was.total}")
    return found


@pytest.mark.parametrize("seed", range(5))
def test_memory_of_random_layouts(seed):
    assert far_off(random_job(seed, seq=256)) == []


@pytest.mark.sweep
@pytest.mark.parametrize("seed", [*range(5, 8), *range(2000, 2300)])
def test_memory_of_many_random_layouts(seed):
    assert far_off(random_job(seed, seq=256)) == []


@pytest.mark.parametrize(
    ("v_dim", "dtype", "layout"),
    [
        (8, "float32", {"cp": 2}),
        (24, "bfloat16", {"cp": 2, "recompute": "full"}),
        (16, "bfloat16", {"cp": 2, "cp_method": "all-gather"}),
        (8, "bfloat16", {"cp": 4, "ulysses": 2, "micro_batch": 2}),
        (16, "float32", {"cp": 2, "ulysses": 2, "tp": 2, "recompute": "selective:attention"}),
        (8, "float32", {"cp": 2, "pp": 2, "schedule": "zb-h1"}),
    ],
    ids=str,
)
def test_latent_attention_over_ranks(v_dim, dtype, layout):
    """Whose keys and values are of two widths, narrower or equal."""
    mla = MLA(kv_rank=32, nope_dim=16, rope_dim=8, v_dim=v_dim, q_rank=48)
    filled = Layout.fill(4, **layout)
    batch = 2 * filled.dp * filled.micro_batch
    train = Train(seq_len=512, dtype=dtype, accumulation=2, global_batch=batch)
    job = Job(replace(WIDE, seq=512, mla=mla), filled, train)
    assert differences(traffic(job), measure(job, full=True).traffic) == []
    assert far_off(job) == []


def recorded(rank: int, job: Job) -> tuple[list[str], int]:
    program = Program(job, mesh := make_mesh(job.layout, job.model, rank))
    program.initialize()
    program.step(micro_batches(job, mesh, 0), 0)
    with Recorder(mesh) as recorder, RoutedRecorder(program) as routed:
        program.step(micro_batches(job, mesh, 1), 1)
    predicted = traffic(job, routed.rows).of_stage(mesh.coordinate["pp"])
    chosen = sum(r.chosen for rows in routed.rows.values() for r in rows)
    return differences(predicted, recorder.ledger), chosen


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "ep": 2, "etp": 2},
        {"tp": 2, "ep": 4, "recompute": "full", "sequence_parallel": False},
        {"pp": 2, "ep": 2, "schedule": "zb-h1", "zero": 2},
        {"ep": 2, "zero": 3},
    ],
    ids=str,
)
def test_each_rank_sends_what_its_router_chose(layout):
    filled = Layout.fill(4, micro_batch=1, **layout)
    moe = MoE(8, 2, 48, shared=1, aux_loss=0.01)
    train = Train(seq_len=16, dtype="float32", accumulation=2, global_batch=2 * filled.dp)
    job = Job(replace(WIDE, moe=moe), filled, train)
    answers = run_ranks(4, recorded, job)
    assert [found for found, _ in answers] == [[]] * 4
    # 16 tokens of 2 x dp samples in 2 layers, 2 choices each; nobody's are lost.
    assert sum(chosen for _, chosen in answers) == 16 * 2 * filled.dp * 2 * 2


def test_an_even_share():
    job = random_job(0)
    layout = Layout.fill(2, tp=2)
    model = replace(job.model, moe=MoE(experts=8, topk=3, ffn=48))
    job = Job(model, layout, replace(job.train, seq_len=20))
    assert own_tokens(job) == 10
    assert spread(job) == (4, 4, 4, 4, 4, 4, 3, 3)  # 30 choices
    tight = replace(job, model=replace(model, moe=replace(model.moe, capacity=0.5)))
    assert spread(tight) == (2,) * 8  # half of 3.75, rounded up


def test_shares_that_are_given():
    """The fullest rank of ep first; a token chooses an expert once; nothing is lost."""
    job = random_job(0)
    layout = Layout.fill(4, ep=4, micro_batch=1)
    model = replace(job.model, moe=MoE(experts=8, topk=2, ffn=48))
    train = replace(job.train, seq_len=20, expert_shares=(1, 1, 1, 1, 6, 4, 1, 1))
    job = Job(model, layout, train)
    assert spread(job) == (15, 10, 3, 3, 3, 2, 2, 2)  # 40 choices, 2.5 a share
    greedy = replace(job, train=replace(train, expert_shares=(0, 0, 0, 1, 0, 0, 0, 0)))
    first, fourth, *rest = spread(greedy)  # all tokens choose the fourth, and something else
    assert fourth == 20
    assert {first, *rest} == {2, 3}
    assert sum(spread(greedy)) == 40


@pytest.mark.parametrize("layout", [{"ep": 4}, {"tp": 2, "ep": 2, "etp": 2}, {"pp": 2, "ep": 2}])
def test_a_dry_run_under_given_shares(layout):
    filled = Layout.fill(4, micro_batch=1, **layout)
    shares = (5.0, 1.0, 1.0, 0.5, 0.5, 3.0, 0.0, 1.0)
    train = Train(
        seq_len=64, accumulation=2, global_batch=2 * filled.dp, dtype="float32",
        expert_shares=shares,
    )  # fmt: skip
    job = Job(replace(WIDE, moe=MoE(8, 2, 48)), filled, train)
    measured, evenly = measure(job), replace(job, train=replace(train, expert_shares=None))
    assert differences(traffic(job), measured.traffic) == []
    assert far_off(job) == []
    if layout.get("ep", 1) > 1:
        assert max(row.total for row in memory(job)) > max(row.total for row in memory(evenly))
