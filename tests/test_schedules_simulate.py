"""The simulator: by hand, against a slower one, and against published times."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.schedules.build import build
from plait.schedules.simulate import Times, simulate
from plait.schedules.table import Action, Table
from plait.spec.findings import UserError
from tables import tables, times_of


def table(*ranks: str) -> Table:
    """`table("0F0 0B0", "1F0 1B0")`"""
    cells = [[Action(c[1], int(c[0]), int(c[2])) for c in rank.split()] for rank in ranks]
    return Table("by hand", tuple(map(tuple, cells)))


def test_by_hand():
    line = simulate(
        table("0F0 0F1 0I0 0W0 0B1", "1F0 1I0 1W0 1F1 1B1"),
        Times((1, 2), (3, 4), (5, 6), transfer=0.5),
    )
    # rank 1: F from 1.5, I to 7.5, W to 13.5, F to 15.5, B (4 + 6) to 25.5
    # rank 0: F to 1 and 2, I from 7.5 + 0.5 to 11, W to 16, B (3 + 5) from 26 to 34
    first, last = (
        [(str(a), start, end) for a, start, end in spans] for spans in line.spans
    )  # fmt: skip
    assert first == [
        ("0F0", 0, 1), ("0F1", 1, 2), ("0I0", 8, 11), ("0W0", 11, 16), ("0B1", 26, 34),
    ]  # fmt: skip
    assert last == [
        ("1F0", 1.5, 3.5), ("1I0", 3.5, 7.5), ("1W0", 7.5, 13.5), ("1F1", 13.5, 15.5),
        ("1B1", 15.5, 25.5),
    ]  # fmt: skip
    assert line.makespan == 34
    assert line.busy == (18, 24)
    assert line.peak_activations == (2, 1)
    bubble = line.bubble
    assert bubble["step_total"] == pytest.approx((16 / 34 + 10 / 34) / 2)
    assert bubble["step_ideal"] == pytest.approx((16 / 18 + 10 / 24) / 2)
    assert bubble["span_total"] == pytest.approx((16 / 34 + 0) / 2)
    assert bubble["span_ideal"] == pytest.approx((16 / 18 + 0) / 2)


def test_a_chunk_counts_as_its_share_and_messages_stay_on_a_rank():
    v = table("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")
    even = Times.even(v, f=2, b=4, w=6, comm=1)
    assert even == Times.even((4, 2), f=2, b=4, w=6, comm=1)
    assert even == Times((1,) * 4, (2,) * 4, (3,) * 4, 1)
    line = simulate(v, even)
    # F 0 1 | 2 3 3 4 | 5 6, B 6 11 | 12 17 17 22 | 23 28
    assert line.makespan == 28
    assert line.peak_activations == (1, 1)  # two halves


def test_no_time_at_all_has_no_bubble():
    line = simulate(table("0F0 0B0"), Times((0,), (0,), (0,)))
    assert line.makespan == 0
    assert set(line.bubble.values()) == {0}


def test_what_waits_in_a_circle_is_named():
    with pytest.raises(UserError, match=r"0B0 waits for 1I0.*1F1 waits for 0F1"):
        simulate(table("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"), Times.even((2, 2)))


def slowly(t: Table, times: Times) -> dict[Action, float]:
    """The end of each action, by its definition, over and over until nothing changes."""
    where = {a: r for r, actions in enumerate(t.ranks) for a in actions}
    ends = dict.fromkeys(where, 0.0)

    def needs(a):
        if a.kind == "F" and a.chunk:
            yield a._replace(chunk=a.chunk - 1)
        if a.kind == "W":
            yield a._replace(kind="I")
        if a.kind in "IB":
            yield a._replace(kind="F")
            yield from (a._replace(kind=k, chunk=a.chunk + 1) for k in "IB")

    def end(a, before):
        lag = {
            need: times.transfer * (where[need] != where[a]) for need in needs(a) if need in ends
        }
        start = max([before, *(ends[need] + more for need, more in lag.items())])
        parts = {"F": times.forward, "I": times.input_grad, "W": times.weight_grad}
        return start + sum(parts[k][a.chunk] for k in ("IW" if a.kind == "B" else a.kind))

    changed = True
    while changed:
        changed = False
        for actions in t.ranks:
            now = 0.0
            for a in actions:
                now, old = end(a, now), ends[a]
                changed |= now != old
                ends[a] = now
    return ends


@given(st.data())
def test_the_same_as_a_slow_simulator(data):
    t = data.draw(tables())
    times = data.draw(times_of(t.chunks))
    line, expected = simulate(t, times), slowly(t, times)
    assert {a: end for spans in line.spans for a, _, end in spans} == expected
    assert line.makespan == max(expected.values())
    for spans, busy in zip(line.spans, line.busy, strict=True):
        assert sum(end - start for _, start, end in spans) == busy
        assert all(a.end <= b.start for a, b in pairwise(spans))


@given(st.data())
def test_peak_activations_are_what_is_held_in_time(data):
    t = data.draw(tables())
    line = simulate(t, data.draw(times_of(t.chunks, least=1)))
    for spans, peak in zip(line.spans, line.peak_activations, strict=True):
        from_to = [
            (s.start, max(e.end for e in spans if e.action[1:] == s.action[1:]))
            for s in spans
            if s.action.kind == "F"
        ]
        held = [sum(a <= at < b for a, b in from_to) for at, _ in from_to]
        assert peak == max(held) * t.share


@pytest.mark.parametrize(("m", "plain", "zb"), [(2, 3.56, 4.25), (4, 5.74, 6.92), (8, 8.26, 9.90)])
def test_measured_with_few_micro_batches(m, plain, zb):
    """Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), table 12: samples a
    second and GPU of a GPT 1.5B on 8 GPUs, micro batch 6, milliseconds as in table 9; nothing but
    the passes is simulated, so the measured ones are a little slower."""
    for name, measured in (("1f1b", plain), ("zb-h1", zb)):
        t = build(name, 8, m)
        seconds = simulate(t, Times.even(t, 18.522, 18.086, 9.337, 0.601)).makespan / 1000
        assert 6 * m / seconds / 8 == pytest.approx(measured, rel=0.06)


# The example traces of Primus's pipeline visualization (8 ranks, 16 micro batches): mean
# milliseconds of a chunk's forward and backward, and the span of each rank.
TRACES = {
    "1f1b": (
        (57.8, 57.9, 58.0, 60.8, 60.7, 62.0, 61.2, 66.9),
        (71.2, 69.7, 71.0, 68.8, 69.9, 70.0, 69.1, 75.1),
        (3245.8, 3093.7, 2962.8, 2829.8, 2696.0, 2562.2, 2426.9, 2294.2),
    ),
    "interleaved-1f1b": (
        (
            32.0, 29.5, 29.7, 28.3, 28.7, 30.3, 28.3, 32.4,
            33.8, 29.6, 29.2, 28.0, 28.5, 30.0, 28.9, 39.4,
        ),
        (
            34.8, 34.7, 35.9, 34.3, 34.3, 34.3, 34.1, 35.2,
            35.3, 34.5, 35.1, 33.9, 34.2, 34.2, 34.0, 41.4,
        ),
        (2872.9, 2805.3, 2739.0, 2667.6, 2601.8, 2535.3, 2467.1, 2401.1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRACES)
def test_measured_traces(name):
    forward, backward, measured = TRACES[name]
    line = simulate(build(name, 8, 16), Times(forward, backward, (0,) * len(forward)))
    for spans, span in zip(line.spans, measured, strict=True):
        assert spans[-1].end - spans[0].start == pytest.approx(span, rel=0.03)
    assert math.isclose(line.makespan, max(measured), rel_tol=0.025)
