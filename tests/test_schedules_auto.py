"""Greedy and searched schedules, and the bound that nothing beats."""

import json
import math
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.schedules.auto import auto
from plait.schedules.bound import lower_bound, routes
from plait.schedules.build import build
from plait.schedules.check import check
from plait.schedules.greedy import greedy_tables, zb_auto
from plait.schedules.search import HASTE, Filler
from plait.schedules.simulate import Times, peak_activations, simulate
from plait.schedules.table import Table
from plait.spec.findings import UserError
from plait.spec.schedule import SCHEDULES
from tables import tables, times_of

LITTLE = 20_000  # actions simulated in a search: enough to see that it is right


def makespan(table: Table, times: Times) -> float:
    return simulate(table, times).makespan


def named(pp, m, vpp):
    """Every named table with so many chunks; for None with one to four."""
    for (name, schedule), v in product(SCHEDULES.items(), (1, 2, 3, 4) if vpp is None else (vpp,)):
        least, most = schedule.vpp
        if name in ("auto", "zb-auto") or not least <= v <= most:
            continue
        if schedule.placement == "both" and vpp is not None:
            continue
        try:
            yield build(name, pp, m, v)
        except UserError:
            continue


@given(st.data())
def test_no_table_is_below_the_bound(data):
    t = data.draw(tables())
    times = data.draw(times_of(t.chunks))
    peak = max(peak_activations(t))
    assert makespan(t, times) >= lower_bound(routes(t), times, peak) - 1e-9
    assert lower_bound(routes(t), times) <= lower_bound(routes(t), times, peak)


@given(st.data())
def test_no_builder_is_below_the_bound(data):
    pp, m = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 14))
    vpp = data.draw(st.sampled_from([1, 2, 3]))
    for t in named(pp, m, vpp):
        times = data.draw(times_of(t.chunks))
        bound = lower_bound(routes(t), times, max(peak_activations(t)))
        assert makespan(t, times) >= bound - 1e-9


@pytest.mark.parametrize("comm", [0.0, 0.5])
@pytest.mark.parametrize("cap", [1, 1.5, 2, math.inf])
@pytest.mark.parametrize(("f", "b", "w"), [(1, 1, 1), (1, 2, 1), (2, 1, 3)])
@pytest.mark.parametrize(("pp", "vpp", "m"), [(2, 1, 3), (3, 1, 3), (2, 2, 2)])
def test_auto_is_the_best_of_all(pp, vpp, m, f, b, w, comm, cap):
    """Against every order that there is, in a loop and there and back."""
    times = Times.even((pp * vpp, pp), f, b, w, comm)
    bests = []
    for homes in [tuple(range(pp)) * vpp, *v_shape(pp, vpp)]:
        bests.append(exhaustive(homes, m, times, cap))
        assert lower_bound({homes: m}, times, cap) <= bests[-1] + 1e-9
    found = makespan(auto(pp, m, vpp, times, None if cap == math.inf else cap), times)
    assert found == pytest.approx(min(bests))


def exhaustive(homes, m, times, cap) -> float:
    """The least makespan over all orders in which micro batches pass each chunk in their order:
    all of them, but for what is in every respect later than something seen before."""
    pp, chunks = 1 + max(homes), len(homes)
    room = min(cap * chunks / pp, chunks * m) + 1e-9
    f, i, w = times.forward, times.input_grad, times.weight_grad
    best = math.inf
    seen: dict = {}

    def visit(counts, clocks, ends, held):
        nonlocal best
        if max(clocks) >= best:
            return
        if counts[2] == (m,) * chunks:
            best = max(clocks)
            return
        key = (counts, held)
        point = (*clocks, *(ends[k][c] for k in range(2) for c in range(chunks)))
        front = seen.setdefault(key, [])
        if any(all(a <= b for a, b in zip(old, point, strict=True)) for old in front):
            return
        front.append(point)
        for c in range(chunks):
            rank = homes[c]
            for k in range(3):
                j = counts[k][c]
                if j == m:
                    continue
                if k == 0:
                    need = None if c == 0 else (0, c - 1)
                elif k == 1:
                    need = (0, c) if c == chunks - 1 else (1, c + 1)
                else:
                    need = (1, c)
                if (need and counts[need[0]][need[1]] <= j) or (k == 0 and held[rank] + 1 > room):
                    continue
                there = 0.0
                if need and need[0] < 2:
                    lag = times.transfer if homes[need[1]] != rank else 0.0
                    there = ends[need[0]][need[1]][j] + lag
                end = max(clocks[rank], there) + (f, i, w)[k][c]
                grown = tuple(
                    tuple(n + ((kk, cc) == (k, c)) for cc, n in enumerate(row))
                    for kk, row in enumerate(counts)
                )
                after = ends
                if k < 2:
                    after = tuple(
                        tuple((*e, end) if (kk, cc) == (k, c) else e for cc, e in enumerate(row))
                        for kk, row in enumerate(ends)
                    )
                change = {0: 1, 1: 0, 2: -1}[k]
                visit(
                    grown,
                    tuple(end if r == rank else t for r, t in enumerate(clocks)),
                    after,
                    tuple(h + change * (r == rank) for r, h in enumerate(held)),
                )

    zero = (0,) * chunks
    visit((zero, zero, zero), (0.0,) * pp, (((),) * chunks, ((),) * chunks), (0,) * pp)
    return best


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("m", [1, 5, 16])
def test_zb_auto_is_zb_h1_at_its_memory(pp, m):
    """F = I = W: nothing with one chunk a rank is faster."""
    times = Times.even((pp, pp))
    t = zb_auto(pp, m)
    assert not check(t, cap=pp, micro_batches=m, chunks=pp)
    assert makespan(t, times) == makespan(build("zb-h1", pp, m), times)


@settings(deadline=None)
@given(st.data())
def test_greedy_tables_keep_every_cap(data):
    pp, vpp, m = (data.draw(st.integers(1, n)) for n in (4, 3, 6))
    cap = data.draw(st.integers(vpp, vpp * (m + 1))) / vpp
    homes = data.draw(st.sampled_from([tuple(range(pp)) * vpp, *v_shape(pp, vpp)]))
    for t in greedy_tables("any", homes, m, data.draw(times_of(pp * vpp)), cap):
        assert not check(t, cap=cap, micro_batches=m, chunks=pp * vpp)


def v_shape(pp, vpp):
    return [(*range(pp), *reversed(range(pp)))] if vpp == 2 else []


@given(st.data())
def test_filling_keeps_order_and_cap(data):
    t = data.draw(tables())
    times, cap = data.draw(times_of(t.chunks)), max(peak_activations(t))
    filler = Filler(t.chunks, t.micro_batches, len(t.ranks), times, cap)
    filled = filler.fill(filler.order(t), data.draw(st.sampled_from(HASTE)))
    assert filled is not None  # what keeps the cap once can keep it again
    other = filler.table("other", filled)
    assert not check(other, cap=cap, micro_batches=t.micro_batches, chunks=t.chunks)
    assert filler.order(other) == filler.order(t)
    assert makespan(other, times) == pytest.approx(filled.makespan)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_auto_is_never_worse_than_a_named_one(data):
    pp, m, vpp = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 12)), None
    if data.draw(st.booleans()):
        vpp = data.draw(st.integers(1, 3))
        uneven = data.draw(times_of(pp * vpp))
        times = {pp * vpp: uneven}
    else:
        times = {pp * v: data.draw(times_of(pp * v)) for v in (1, 2, 3, 4)}
    cap = data.draw(st.sampled_from([None, 1, 1.5, 2, pp]))
    given_ = times.__getitem__ if vpp is None else uneven
    t = auto(pp, m, vpp, given_, cap, effort=LITTLE)
    assert t.name == "auto"
    assert not check(t, cap=cap, micro_batches=m, chunks=t.chunks)
    assert vpp is None or all(len(held) == vpp for held in t.held)
    mine = makespan(t, times[t.chunks])
    for other in named(pp, m, vpp):
        if cap is None or max(peak_activations(other)) <= cap:
            assert mine <= makespan(other, times[other.chunks]) + 1e-9


@pytest.mark.parametrize(("cap", "w", "comm"), [(8, 1, 0), (None, 0.5, 0), (10, 1, 0.02)])
def test_more_chunks_a_rank_are_tried_where_their_number_is_open(cap, w, comm):
    """Without messages a named schedule is shorter with four chunks than with two."""

    def of(chunks):
        return Times.even((chunks, 8), 1, 1, w, comm)

    mine = auto(8, 32, times=of, cap=cap, effort=LITTLE)
    for other in named(8, 32, None):
        if cap is None or max(peak_activations(other)) <= cap:
            assert makespan(mine, of(mine.chunks)) <= makespan(other, of(other.chunks)) + 1e-9


@pytest.mark.parametrize(
    ("pp", "vpp", "m", "profile", "cap"),
    [
        (8, 1, 32, (1, 1, 1, 0.2), 8),
        (8, 1, 32, (1, 1.5, 0.7, 0.1), 8),
        (8, 2, 32, (1, 1, 1, 0), 8),
        (4, 1, 9, (1, 1, 1, 0), 4),
    ],
)
def test_auto_reaches_the_bound(pp, vpp, m, profile, cap):
    times = Times.even((pp * vpp, pp), *profile)
    t = auto(pp, m, vpp, times, cap)
    bound = min(
        lower_bound({homes: m}, times, cap) for homes in [tuple(range(pp)) * vpp, *v_shape(pp, vpp)]
    )
    assert makespan(t, times) == pytest.approx(bound)


def test_the_same_question_has_the_same_answer():
    times = Times.even((8, 4), 1, 2, 1, 0.05)
    assert auto(4, 8, 2, times, 2, LITTLE) == auto(4, 8, 2, times, 2, LITTLE)


def test_what_no_schedule_keeps():
    with pytest.raises(UserError, match=r"0.5 micro batches.*nearest: 1"):
        auto(4, 8, cap=0.5)
    with pytest.raises(UserError, match="nearest: 1"):
        zb_auto(4, 8, cap=0.5)


def test_the_benchmark_runs():
    script = Path(__file__).parents[1] / "benchmarks" / "schedules.py"
    command = [sys.executable, script, "--quick", "--json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    for row in json.loads(run.stdout)["grid"]:
        assert row["win"] is None or row["win"] >= 1 - 1e-9
        assert row["gap"] >= 1 - 1e-9
