"""The learning rate: closed forms at points where they are plain."""

from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.spec.findings import UserError
from plait.spec.job import Train
from plait.train.schedule import SCHEDULES, learning_rate

TRAIN = Train(steps=110, warmup=10, learning_rate=1.0, min_learning_rate=0.2, decay=20)


def rates(schedule: str, **given) -> list[float]:
    train = Train(**(TRAIN.__dict__ | {"schedule": schedule} | given))
    return [learning_rate(step, train) for step in range(train.steps)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_is_a_line_that_ends_at_the_peak(schedule):
    assert rates(schedule)[:10] == pytest.approx([0.1 * k for k in range(1, 11)], rel=1e-12)


def test_cosine():
    got = rates("cosine")
    # 100 steps lie between the peak and the minimum; cos(pi/2) = 0, cos(pi/4) = 1/sqrt(2).
    assert got[59] == pytest.approx(0.6, rel=1e-12)
    assert got[34] == pytest.approx(0.2 + 0.4 * (1 + 1 / sqrt(2)), rel=1e-12)
    assert got[84] == pytest.approx(0.2 + 0.4 * (1 - 1 / sqrt(2)), rel=1e-12)
    assert got[109] == pytest.approx(0.2, rel=1e-12)
    for k in range(50):  # point-symmetric about the middle
        assert got[59 + k] + got[59 - k] == pytest.approx(1.2, rel=1e-12)


def test_wsd_is_flat_and_then_a_line():
    got = rates("wsd")
    assert got[9:90] == [1.0] * 81
    assert got[90:] == pytest.approx([1.0 - 0.04 * k for k in range(1, 21)], rel=1e-12)


def test_constant_stays():
    assert rates("constant")[9:] == [1.0] * 101


def test_without_warm_up_the_first_step_has_left_the_peak_by_one_step():
    assert rates("wsd", warmup=0, steps=4, decay=4) == pytest.approx([0.8, 0.6, 0.4, 0.2])


@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 60),
    st.integers(0, 70),
    st.integers(0, 70),
    st.floats(0, 1),
)
def test_any_run_rises_once_falls_once_and_stays_in_its_bounds(schedule, steps, warmup, decay, low):
    got = rates(schedule, steps=steps, warmup=warmup, decay=decay, min_learning_rate=low)
    assert all(0 <= r <= 1 for r in got)
    rising, falling = got[:warmup], got[max(warmup - 1, 0) :]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert all(r >= low * (1 - 1e-12) for r in got[warmup:])
    if schedule != "constant" and warmup < steps and (decay or schedule == "cosine"):
        assert got[-1] == pytest.approx(low, abs=1e-12)


def test_steps_past_the_last_stay_at_the_minimum():
    for schedule in ("cosine", "wsd"):
        train = Train(**(TRAIN.__dict__ | {"schedule": schedule}))
        assert learning_rate(500, train) == pytest.approx(0.2, rel=1e-12)


def test_an_unknown_schedule_is_answered_with_the_nearest():
    with pytest.raises(UserError) as caught:
        rates("cosin")
    (finding,) = caught.value.findings
    assert (finding.where, finding.nearest) == ("train.schedule", "cosine")
