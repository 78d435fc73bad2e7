"""The loss, every gradient, the gradient norm and the weights after three steps do not depend on
the layout: each held, in float64, against plain torch in one process."""

import random
from functools import cache

import pytest

import cases
from harness import Trace, compare, on_rank, one_process
from ranks import RankFailed, run_ranks

SAMPLE = cases.sample()


@cache
def _oracle(choices: tuple[tuple[str, object], ...]) -> Trace:
    point = {key: values[0] for key, values in cases.SPACE.items()}
    return one_process(cases.case(point | dict(choices)).job)


def oracle(point: cases.Point) -> Trace:
    """What the point's model and batch give in one process."""
    choices = ("model", "heads", "kv_heads", "tied", "global_batch")
    return _oracle(tuple((key, point[key]) for key in choices))


def check(point: cases.Point) -> None:
    compare(run_ranks(point["world"], on_rank, cases.case(point).job), oracle(point))


@pytest.mark.parametrize("point", SAMPLE, ids=cases.name)
def test_layout_equals_one_process(point):
    check(point)


@pytest.mark.parametrize("point", cases.UNEVEN, ids=cases.name)
def test_uneven_layout_equals_one_process(point):
    assert cases.legal(point)
    check(point)


def test_the_sample_holds_every_pair():
    held = set().union(*map(cases.pairs, SAMPLE))
    rng = random.Random(1)
    for _ in range(3000):
        assert cases.pairs(cases.random_point(rng)) <= held


@pytest.mark.sweep
@pytest.mark.parametrize("point", list(cases.all_points()), ids=cases.name)
def test_every_layout_equals_one_process(point):
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
