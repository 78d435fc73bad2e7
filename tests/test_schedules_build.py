"""The builders: closed forms, published numbers, and what must hold for every table."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.schedules.bound import lower_bound
from plait.schedules.build import build, problems
from plait.schedules.check import check
from plait.schedules.simulate import Timeline, Times, simulate
from plait.spec.findings import UserError
from plait.spec.schedule import SCHEDULES

NAMED = [name for name in SCHEDULES if name not in ("auto", "zb-auto")]
LOOPED = ("interleaved-1f1b", "looped-bfs", "zb-h1")
SEVERAL = [(1, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1.2, 0.8), (3, 5, 2)]  # F, I, W
#: W above I, above F, above both.
LONG_W = [(2, 1, 1.5), (1, 2, 1.5), (1, 1, 3), (2, 1, 3)]


def timeline(name, pp, m, vpp=None, times=(1, 1, 1), comm=0.0) -> Timeline:
    table = build(name, pp, m, vpp)
    return simulate(table, Times.even(table, *times, comm=comm))


def step_bubble(line: Timeline) -> float:
    """Idle time of the rank that idles least, until the step ends."""
    return line.makespan - max(line.busy)


def span_bubble(line: Timeline) -> float:
    """Idle time between a rank's first action and its last, of the rank that idles most."""
    spans = zip(line.spans, line.busy, strict=True)
    return max(actions[-1].end - actions[0].start - busy for actions, busy in spans)


def peak(line: Timeline) -> float:
    return max(line.peak_activations)


# F = I = W = 1, messages for nothing: bubble of the step, of a rank's span (None: not given), and
# peak, for (p, m) = (8, 32) and (4, 16), by simulations of the published programs.
SIMULATED = {
    ("gpipe", 1): [(21, 21, 32), (9, 9, 16)],
    ("1f1b", 1): [(21, 21, 8), (9, 9, 4)],
    ("interleaved-1f1b", 2): [(10.5, 10.5, 11.5), (4.5, 4.5, 5.5)],
    ("interleaved-1f1b", 4): [(5.25, 5.25, 9.75), (2.25, 2.25, 4.75)],
    ("looped-bfs", 2): [(10.5, None, 32), None],
    ("zb-h1", 1): [(7, 7, 8), (3, 3, 4)],
    ("zb-h1", 2): [(3.5, 3.5, 8), (1.5, 1.5, 4)],
    ("zb-h2", 1): [(7, 0, 15), (3, 0, 7)],
    ("zbv", 2): [(3.5, 0, 8), (1.5, 0, 4)],
    ("v-half", 2): [(8.5, None, 5), (2.5, None, 3)],
    ("v-min", 2): [(13.5, None, 4), (5.5, None, 2)],
    ("dualpipev", 2): [(3.5, None, 8.5), (1.5, None, 4.5)],
    ("dualpipe", 1): [(3, None, 9), (1, None, 5)],
}


@pytest.mark.parametrize(("name", "vpp"), SIMULATED)
def test_what_the_published_programs_give(name, vpp):
    for (pp, m), expected in zip([(8, 32), (4, 16)], SIMULATED[name, vpp], strict=True):
        if expected is None:
            continue
        line, (step, span, most) = timeline(name, pp, m, vpp), expected
        assert step_bubble(line) == pytest.approx(step, abs=1e-9)
        assert span is None or span_bubble(line) == pytest.approx(span, abs=1e-9)
        assert peak(line) == most


def test_zbv_holds_the_same_on_every_rank():
    assert timeline("zbv", 8, 32).peak_activations == (8.0,) * 8


# Qi et al. 2023, tables 5 and 9: p, m, vpp; F, B, W and message in ms; bubble rates as printed.
PROFILED = [
    (8, 24, 3, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1055, 0.1585, 0.1083)),
    (8, 32, 3, (18.513, 18.086, 9.331, 0.626), (0.1985, 0.0818, 0.1242, 0.0837)),
    (8, 64, 3, (18.546, 18.097, 9.321, 0.762), (0.1240, 0.0443, 0.0674, 0.0444)),
    (8, 24, 4, (29.718, 29.444, 19.927, 0.527), (0.2347, 0.0808, 0.1323, 0.0698)),
    (8, 32, 4, (29.802, 29.428, 19.530, 0.577), (0.1898, 0.0628, 0.1045, 0.0559)),
    (8, 64, 4, (29.935, 29.621, 19.388, 0.535), (0.1091, 0.0320, 0.0554, 0.0294)),
    (16, 48, 3, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1104, 0.1397, 0.0672)),
    (16, 64, 3, (11.307, 11.254, 8.101, 0.379), (0.2082, 0.0852, 0.1088, 0.0516)),
    (16, 128, 3, (11.325, 11.308, 8.109, 0.378), (0.1251, 0.0445, 0.0576, 0.0266)),
    (32, 96, 2, (10.419, 10.207, 7.715, 0.408), (0.2646, 0.1493, 0.1421, 0.0641)),
    (32, 128, 2, (10.408, 10.204, 7.703, 0.408), (0.2168, 0.1164, 0.1106, 0.0490)),
    (32, 256, 2, (10.402, 10.248, 7.698, 0.460), (0.1352, 0.0624, 0.0594, 0.0257)),
]


@pytest.mark.parametrize(("pp", "m", "vpp", "times", "rates"), PROFILED)
def test_bubble_rates_of_the_zero_bubble_paper(pp, m, vpp, times, rates):
    def rate(name, vpp=None):
        line = timeline(name, pp, m, vpp, times[:3], times[3])
        cost = max(spans[-1].end - spans[0].start for spans in line.spans)
        return (cost - m * sum(times[:3])) / cost

    one, interleaved, h1, h2 = rates
    assert [round(rate(name), 4) for name in ("1f1b", "zb-h1", "zb-h2")] == [one, h1, h2]
    # The paper's simulation has other messages where the last rank sends to the first.
    assert interleaved <= rate("interleaved-1f1b", vpp) <= interleaved + 0.004


@pytest.mark.parametrize("pp", range(2, 17))
def test_closed_forms(pp):
    for f, b, w in SEVERAL + LONG_W:
        full, saved = (pp - 1) * (f + b + w), (pp - 1) * (f + b - min(f, b, w))
        for m in (pp, pp + 1, 2 * pp + 1, 128):
            for name, bubble in [("gpipe", full), ("1f1b", full), ("zb-h1", saved)]:
                line = timeline(name, pp, m, times=(f, b, w))
                assert step_bubble(line) == pytest.approx(bubble, rel=1e-9)
        for vpp in (2, 3):
            for m in (pp, 2 * pp, 4 * pp):
                for name, bubble in zip(LOOPED, (full, full, saved), strict=True):
                    line = timeline(name, pp, m, vpp, (f, b, w))
                    assert step_bubble(line) == pytest.approx(bubble / vpp, rel=1e-9)
        if w <= min(f, b):
            for m in (2 * pp - 1, 3 * pp):
                line = timeline("zb-h2", pp, m, times=(f, b, w))
                idle = [spans[-1].end - spans[0].start - m * (f + b + w) for spans in line.spans]
                expected = [(pp - 1 - rank) * (f + b - 2 * w) for rank in range(pp)]
                assert idle == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_no_order_idles_less_than_zb_h1_with_its_memory_and_a_long_w(pp):
    for times in LONG_W:
        even = Times.even((pp, pp), *times)
        bound = lower_bound({tuple(range(pp)): 4 * pp}, even, pp)
        assert timeline("zb-h1", pp, 4 * pp, times=times).makespan == pytest.approx(bound)


@pytest.mark.parametrize("pp", [2, 3, 4, 5, 8])
def test_when_v_half_keeps_its_pace(pp):
    """Further micro batches cost no more than their work."""
    for f, b, w in product((1, 1.2, 1.5, 2, 3), repeat=3):
        if w + 2 * f >= 2 * b and (b >= f if pp % 2 else w + 2 * b >= 2 * f):
            lines = (timeline("v-half", pp, n * pp, times=(f, b, w)) for n in (5, 8))
            few, many = map(step_bubble, lines)
            assert few == pytest.approx(many)


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_fewer_micro_batches_than_ranks(pp):
    # Qi et al. 2023, appendix H.
    for m in range(1, pp):
        for f, b, w in [(1, 1, 1), (2, 2, 1), *LONG_W]:
            line = timeline("1f1b", pp, m, times=(f, b, w))
            assert line.makespan == pytest.approx((m + pp - 1) * (f + b + w))
            line = timeline("zb-h1", pp, m, times=(f, b, w))
            longer = (m - 1) * max(0, w - min(f, b))
            assert line.makespan == pytest.approx((m + pp - 1) * (f + b) + w + longer)


def most_held(name: str, pp: int, m: int, vpp: int) -> float:
    """What each family promises to hold at most, in units of a rank's share of a micro batch."""
    return {
        "gpipe": m,
        "1f1b": min(m, pp),
        "interleaved-1f1b": pp * (1 + (pp - 1) / (pp * vpp)),
        "looped-bfs": m,
        "zb-h1": pp,
        "zb-h2": 2 * pp - 1,
        "zbv": pp,
        "v-half": (pp + 2) // 2,
        "v-min": (pp + 4) // 3,
        "dualpipe": pp + 1,
        "dualpipev": (2 * pp + 1) / 2,
    }[name]


@pytest.mark.parametrize("pp", range(2, 17))
def test_peak_activations(pp):
    for name in NAMED:
        for vpp in (2, 3) if name in LOOPED else (SCHEDULES[name].vpp[0],):
            line = timeline(name, pp + pp % 2 if name == "dualpipe" else pp, 4 * pp + 4, vpp)
            assert peak(line) == pytest.approx(most_held(name, len(line.spans), 4 * pp + 4, vpp))
    assert timeline("1f1b", pp, 2 * pp).peak_activations == tuple(range(pp, 0, -1))
    assert peak(timeline("interleaved-1f1b", pp, pp, 2)) == pp


@pytest.mark.parametrize("name", ["zbv", "v-half", "v-min"])
def test_a_v_loses_no_more_with_more_micro_batches(name):
    for pp in (2, 3, 5, 8):
        few, many = (step_bubble(timeline(name, pp, m)) for m in (4 * pp, 64))
        assert few == pytest.approx(many)


@st.composite
def asked(draw):
    """(name, pp, m, vpp, group) that can be built."""
    name = draw(st.sampled_from(NAMED))
    pp, m = draw(st.integers(1, 9)), draw(st.integers(1, 30))
    if name == "dualpipe":
        pp += pp % 2
        m += m % 2
    if name in ("dualpipe", "dualpipev"):
        m += 2 * pp
    least, most = SCHEDULES[name].vpp
    vpp = draw(st.integers(least, min(most, 4)))
    grouped = name == "interleaved-1f1b" and draw(st.booleans())
    return name, pp, m, vpp, draw(st.integers(pp, 2 * pp + 3)) if grouped else None


@given(asked())
def test_every_table_is_right_and_holds_what_it_may(asked):
    name, pp, m, vpp, group = asked
    assert problems(*asked) == []
    table = build(*asked)
    cap = most_held(name, pp, m, vpp)
    if group is not None:  # so many more forwards of each chunk but the last before the first B
        cap += (group - pp) * (vpp - 1) / vpp
    assert check(table, cap=cap, micro_batches=m, chunks=pp * vpp) == []
    assert table.split == SCHEDULES[name].split
    rank = {"loop": lambda c, _: c % pp, "v": lambda c, _: min(c, 2 * pp - 1 - c)}
    rank["both"] = lambda c, micro: c if micro < m // 2 else pp - 1 - c
    place = rank[SCHEDULES[name].placement]
    assert all(r == place(c, micro) for (c, micro), r in table.place.items())


def test_a_group_is_how_many_micro_batches_a_chunk_does_at_once():
    first = build("interleaved-1f1b", 2, 8, 2, group=4).ranks[0]
    forwards = [str(a) for a in first if a.kind == "F"]
    assert forwards[:8] == "0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3".split()


def test_other_names_and_the_default_of_vpp():
    assert build("PipeDream-Flush", 4, 8) == build("1f1b", 4, 8)
    assert build("ScheduleInterleaved1F1B", 4, 8) == build("interleaved-1f1b", 4, 8, vpp=2)


@pytest.mark.parametrize(
    ("asked", "where", "nearest"),
    [
        (("1f2b", 4, 8), "schedule", "1f1b"),
        (("1f1b", 0, 8), "pp", 1),
        (("1f1b", 4, 0), "microbatches", 1),
        (("1f1b", 4, 8, 2), "vpp", 1),
        (("zbv", 4, 8, 1), "vpp", 2),
        (("interleaved-1f1b", 4, 8, 1), "vpp", 2),
        (("interleaved-1f1b", 4, 8, 2, 3), "group", 4),
        (("gpipe", 4, 8, 1, 4), "group", None),
        (("dualpipe", 4, 7), "microbatches", 8),
        (("dualpipe", 4, 11), "microbatches", 12),
        (("dualpipe", 4, 6), "microbatches", 8),
        (("dualpipe", 3, 8), "pp", 4),
        (("dualpipev", 4, 7), "microbatches", 8),
        (("1f1b", 4, 10**9), "microbatches", 250_000),
    ],
)
def test_what_cannot_be_built(asked, where, nearest):
    with pytest.raises(UserError) as raised:
        build(*asked)
    (found,) = raised.value.findings
    assert (found.where, found.nearest) == (where, nearest)
    if nearest is not None and where != "schedule":
        places = ("name", "pp", "microbatches", "vpp", "group")
        mended = [nearest if p == where else a for p, a in zip(places, asked, strict=False)]
        assert problems(*mended) == []


def test_all_that_is_wrong_at_once():
    found = problems("zbv", 0, 0, 3, 2)
    assert [f.where for f in found] == ["pp", "vpp", "group", "microbatches"]
    assert [f.where for f in problems("dualpipe", 3, 5)] == ["pp", "microbatches"]
