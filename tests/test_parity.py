"""The loss, every gradient, the gradient norm and the weights after three steps do not depend on
the layout: each held, in float64, against plain torch in one process."""

import random
from dataclasses import replace
from functools import cache

import pytest

import cases
from harness import Case, Trace, compare, on_rank, one_process
from plait import rules
from plait.schedules.job import table_of
from plait.spec.layout import Layout
from plait.spec.model import Model
from ranks import RankFailed, run_ranks

SAMPLE = cases.sample()
PIPELINES = cases.sample(cases.PIPELINES)
CONTEXT = cases.sample(cases.CONTEXT)
EXPERTS = cases.sample(cases.EXPERTS)


@cache
def _oracle(model: Model, batch: int) -> Trace:
    return one_process(Case(model, Layout.fill(1, micro_batch=batch)).job)


def oracle(point: cases.Point) -> Trace:
    """What the point's model and batch give in one process."""
    job = cases.case(point).job
    return _oracle(job.model, job.train.global_batch)


def check(point: cases.Point) -> None:
    job = cases.case(point).job
    if point["pp"] > 1:
        table_of(job)  # searched for once, here, and not by each rank
    compare(run_ranks(point["world"], on_rank, job, point["check"]), oracle(point))


@pytest.mark.parametrize("point", SAMPLE, ids=cases.name)
def test_layout_equals_one_process(point):
    check(point)


@pytest.mark.parametrize("point", PIPELINES, ids=cases.name)
def test_pipeline_equals_one_process(point):
    check(point)


@pytest.mark.parametrize("point", CONTEXT, ids=cases.name)
def test_samples_over_ranks_equal_one_process(point):
    check(point)


@pytest.mark.parametrize("point", EXPERTS, ids=cases.name)
def test_mixture_equals_one_process(point):
    check(point)


@pytest.mark.parametrize(
    ("form", "layout"),
    [
        ("batch", {"world": 2, "ep": 2}),
        ("batch", {"world": 4, "tp": 2, "ep": 2, "etp": 2, "sequence_parallel": False}),
        ("batch", {"world": 4, "cp": 2, "ep": 2, "recompute": "full"}),
        ("batch", {"world": 4, "pp": 2, "ep": 2, "schedule": "zbv"}),
        # Not with a pipeline: what has passed backward then depends on the schedule.
        ("global", {"world": 2, "ep": 2}),
        ("global", {"world": 4, "tp": 2, "ep": 4}),
        ("global", {"world": 4, "tp": 2, "etp": 2, "sequence_parallel": False, "zero": 0}),
        ("global", {"world": 8, "cp": 2, "tp": 2, "ep": 2, "zero": 3, "recompute": "full"}),
    ],
    ids=str,
)
def test_losses_that_depend_on_who_shares_a_micro_batch(form, layout):
    """Held against one process whose micro batches hold the same tokens: for the form "batch" one
    rank's, for "global" those of all data-parallel ranks, and what passed before them."""
    model = cases.MIXTURES["mixtral"]
    model = replace(model, layers=4, moe=replace(model.moe, aux_form=form, aux_loss=0.1))
    layout = dict(layout)
    case = Case(model, Layout.fill(layout.pop("world"), **layout), accumulation=4)
    pieces = 4 if form == "global" else 4 * case.layout.dp
    compare(run_ranks(case.layout.world, on_rank, case.job), one_process(case.job, pieces))


_GEMMA2 = replace(cases.MODELS["gemma"], attention_softcap=2.0, window=6, full_every=2)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama", {"world": 2, "cp": 2, "micro_batch": 2}),
        ("llama", {"world": 4, "cp": 4, "cp_method": "all-gather", "micro_batch": 2, "zero": 3}),
        ("gpt2", {"world": 4, "cp": 2, "ulysses": 2, "tp": 2}),  # learned positions, dropout
        ("qwen3", {"world": 8, "cp": 4, "ulysses": 2, "pp": 2, "schedule": "zbv"}),
        ("gemma2", {"world": 4, "cp": 4, "recompute": "full"}),  # windows, soft caps
        ("gpt-oss", {"world": 4, "cp": 2, "tp": 2, "recompute": "selective:attention"}),
        ("deepseek", {"world": 4, "cp": 2, "ep": 2, "pp": 2, "schedule": "zb-h1"}),
        ("llama", {"world": 2, "tp": 2}),
    ],
    ids=str,
)
def test_documents_of_a_sample_do_not_see_each_other(model, layout):
    layout = dict(layout)
    models = cases.MODELS | cases.MIXTURES | {"gemma2": _GEMMA2}
    model = replace(models[model], layers=4)
    layout = Layout.fill(layout.pop("world"), **layout)
    case = Case(model, layout, accumulation=2, document_mask=True)
    compare(run_ranks(layout.world, on_rank, case.job), one_process(case.job))


@pytest.mark.parametrize("point", cases.UNEVEN, ids=cases.name)
def test_uneven_layout_equals_one_process(point):
    assert cases.legal(point)
    check(point)


@pytest.mark.parametrize(
    ("space", "sample"),
    [
        (cases.SPACE, SAMPLE),
        (cases.PIPELINES, PIPELINES),
        (cases.CONTEXT, CONTEXT),
        (cases.EXPERTS, EXPERTS),
    ],
)
def test_the_sample_holds_every_pair(space, sample):
    held = set().union(*map(cases.pairs, sample))
    rng = random.Random(1)
    for _ in range(3000):
        assert cases.pairs(cases.random_point(rng, space)) <= held


@pytest.mark.parametrize("sample", [SAMPLE, PIPELINES, CONTEXT, EXPERTS])
def test_the_rules_allow_what_is_tried(sample):
    for point in sample:
        errors = [f for f in rules.check(cases.case(point).job, "explain") if f.level == "error"]
        # Legal arithmetic that is refused because it has no use.
        wrong = [f.line() for f in errors if f.rule != "recompute-frees-nothing"]
        assert wrong == [], cases.name(point)


@pytest.mark.sweep
@pytest.mark.parametrize("point", list(cases.all_points()), ids=cases.name)
def test_every_layout_equals_one_process(point):
    check(point)


_WIDE = cases.PIPELINES | {"tp": (1, 2, 4)}
_TURNING = ("model", "bucket_mib", "kv_heads", "tied", "recompute", "check", "stages")


@pytest.mark.sweep
@pytest.mark.parametrize("point", list(cases.all_points(_WIDE, _TURNING)), ids=cases.name)
def test_every_pipeline_equals_one_process(point):
    check(point)


_MANY = [
    cases.random_point(random.Random(i), cases.EXPERTS | {"world": (8, 16)}, world=world)
    for world, first, last in ((8, 0, 400), (16, 400, 440))
    for i in range(first, last)
]


@pytest.mark.sweep
@pytest.mark.parametrize("point", _MANY, ids=cases.name)
def test_random_mixture_equals_one_process(point):
    check(point)


def test_the_comparison_sees_a_wrong_gradient():
    """The harness itself: a rank whose gradient is off by 1e-8 of its size is found."""
    point = cases.random_point(random.Random(0), world=1)
    job = cases.case(point).job
    (trace,) = run_ranks(1, on_rank, job)
    name, offset, size, values = trace.gradients[0]
    trace.gradients[0] = (name, offset, size, values * (1 + 1e-8))
    with pytest.raises(AssertionError, match="gradients"):
        compare([trace], oracle(point))


def _dies(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one has had enough")


def test_a_rank_that_raises_is_reported():
    with pytest.raises(RankFailed, match="rank one has had enough"):
        run_ranks(2, _dies)
