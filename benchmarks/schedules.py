"""How fast schedules are built and simulated, and how good the searched one is.

    python benchmarks/schedules.py [--quick] [--all] [--json]

Two tables. Milliseconds of processor time for a table of 16 ranks and 128 micro batches, each
number the median of several in one run. And a grid of pipelines, times and memory caps: makespan
of the best named schedule that keeps the cap over that of "auto" (win), and that of "auto" over the
lower bound (gap; the bound may itself be out of reach); a line for every (ranks, micro batches,
chunks a rank, cap), over the times of passes and messages, even chunks and uneven ones.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from itertools import product
from math import inf
from statistics import median
from time import perf_counter, process_time

from rich.console import Console
from rich.table import Table as Printed

from plait.schedules.auto import auto
from plait.schedules.bound import lower_bound
from plait.schedules.build import build
from plait.schedules.check import check
from plait.schedules.simulate import Times, peak_activations, simulate
from plait.schedules.transfers import with_transfers
from plait.spec.findings import UserError
from plait.spec.schedule import SCHEDULES

#: F, I, W of a rank's share: all alike, and as Qi et al. measured them (arXiv 2401.10241, Table 9:
#: 18.5 : 18.1 : 9.3 ms), in units of a third of their sum.
PASSES = ((1.0, 1.0, 1.0), (1.21, 1.18, 0.61))
MESSAGES = (0.0, 0.1)


def speed(quick: bool) -> list[dict]:
    """Milliseconds to build, simulate and check each schedule, and to put in its transfers."""
    pp, micro_batches, often = (4, 8, 1) if quick else (16, 128, 5)
    rows = []
    for name, schedule in SCHEDULES.items():
        if name == "auto":
            continue
        vpp = 2 if schedule.vpp[1] > 1 else 1
        table = build(name, pp, micro_batches, vpp)
        times = Times.even(table)
        rows.append(
            {
                "schedule": name,
                "chunks": vpp,
                "actions": sum(map(len, table.ranks)),
                "build": timed(lambda n=name, v=vpp: build(n, pp, micro_batches, v), often),
                "simulate": timed(lambda a=table, t=times: simulate(a, t), often),
                "check": timed(lambda a=table: check(a), often),
                "transfers": timed(lambda a=table: with_transfers(a), often),
            }
        )
    return rows


def timed(call: Callable[[], object], often: int) -> float:
    """Median milliseconds of processor time of a call."""
    seconds = []
    for _ in range(often):
        start = process_time()
        call()
        seconds.append(process_time() - start)
    return 1000 * median(seconds)


def uneven(times: Times) -> Times:
    """The last chunk a quarter longer (the head), the second a tenth shorter."""

    def some(of: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(t * {len(of) - 1: 1.25, 1: 0.9}.get(c, 1.0) for c, t in enumerate(of))

    return Times(
        some(times.forward), some(times.input_grad), some(times.weight_grad), times.transfer
    )


def grid(quick: bool) -> Iterator[dict]:
    """A line for every question of the grid."""
    sizes = ((2, 4),) if quick else ((4, 8), (8, 32))
    every = (PASSES, MESSAGES) if not quick else (PASSES[:1], MESSAGES[-1:])
    for (pp, m), vpp, part in product(sizes, (1, 2), (0.5, 1, inf)):
        cap = max(1, pp * part)
        for passes, comm, even in product(*every, (True, False)):
            times = Times.even((pp * vpp, pp), *passes, comm)
            times = times if even else uneven(times)
            yield question(pp, m, vpp, times, cap) | {"passes": passes, "comm": comm, "even": even}


def question(pp: int, m: int, vpp: int, times: Times, cap: float) -> dict:
    """The best named schedule, "auto" and the bound."""
    named = []
    for name, schedule in SCHEDULES.items():
        least, most = schedule.vpp
        if name == "auto" or schedule.placement == "both" or not least <= vpp <= most:
            continue
        try:
            table = build(name, pp, m, vpp, times=times, cap=cap)
        except UserError:
            continue
        if max(peak_activations(table)) <= cap + 1e-9:
            named.append((simulate(table, times).makespan, name))
    start = perf_counter()
    found = simulate(auto(pp, m, vpp, times, cap), times).makespan
    seconds = perf_counter() - start
    loop = tuple(range(pp)) * vpp
    there_and_back = (*range(pp), *reversed(range(pp)))
    placements = [loop, there_and_back] if vpp == 2 else [loop]
    bound = min(lower_bound({homes: m}, times, cap) for homes in placements)
    best, name = min(named, default=(None, "none"))
    return {
        "pp": pp, "micro_batches": m, "chunks": vpp, "cap": cap if cap < inf else None,
        "best_named": name, "win": best and best / found, "gap": found / bound, "seconds": seconds,
    }  # fmt: skip


def summary(rows: list[dict]) -> list[dict]:
    """The rows of each (pp, micro batches, chunks, cap) in one."""
    keys = ("pp", "micro_batches", "chunks", "cap")
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in keys), []).append(row)
    result = []
    for key, group in groups.items():
        wins = [row["win"] for row in group if row["win"]]
        names = [row["best_named"] for row in group]
        gaps = [row["gap"] for row in group]
        result.append(
            dict(zip(keys, key, strict=True))
            | {
                "best_named": max(sorted(set(names)), key=names.count),
                "win": median(wins) if wins else None,
                "most": max(wins, default=None),
                "gap": median(gaps),
                "furthest": max(gaps),
                "at_bound": sum(gap < 1 + 1e-6 for gap in gaps) / len(gaps),
                "seconds": median(row["seconds"] for row in group),
            }
        )
    return result


def printed(title: str, rows: list[dict]) -> Printed:
    table = Printed(title=title)
    for key in rows[0]:
        table.add_column(key.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    return table


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return "-" if value is None else str(value)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="little ones: does it run?")
    parser.add_argument("--all", action="store_true", help="every line of the grid")
    parser.add_argument("--json", action="store_true", help="the numbers on stdout")
    args = parser.parse_args(arguments)
    speeds, questions = speed(args.quick), list(grid(args.quick))
    lines = questions if args.all else summary(questions)
    if args.json:
        print(json.dumps({"speed": speeds, "grid": lines}))
        return 0
    out = Console()
    out = out if out.is_terminal else Console(width=150)
    out.print(printed("milliseconds", speeds))
    out.print(printed("makespan: best named / auto (win), auto / lower bound (gap)", lines))
    wins = [row["win"] for row in questions if row["win"]]
    out.print(
        f"{len(questions)} questions; auto is faster than the best named one in "
        f"{sum(win > 1 + 1e-6 for win in wins)}, by {median(wins) - 1:.1%} in the median and "
        f"{max(wins) - 1:.1%} at most; it is at the bound in "
        f"{sum(row['gap'] < 1 + 1e-6 for row in questions)}, above it by "
        f"{median(row['gap'] for row in questions) - 1:.1%} in the median and "
        f"{max(row['gap'] for row in questions) - 1:.1%} at most"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
