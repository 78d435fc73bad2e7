"""plait schedule: a pipeline schedule built, simulated and drawn."""

import json
from collections.abc import Mapping
from math import inf
from typing import Any

from plait.cli.schedule_files import FILES, write
from plait.cli.schedule_question import Question, read
from plait.schedules.bound import lower_bound, routes
from plait.schedules.check import check
from plait.schedules.simulate import Timeline, simulate
from plait.schedules.table import Table


def run(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    given, question = read(argv)
    table, times = question.table()
    timeline = simulate(table, times)
    answer = _answer(question, timeline)
    write(given, timeline)
    print(json.dumps(answer) if given["json"] else _page(given, answer, timeline))
    return 0 if answer["within_cap"] else 1


def _answer(question: Question, timeline: Timeline) -> dict[str, Any]:
    table = timeline.table
    over = check(table, cap=question.cap) if question.cap is not None else []
    # A table that passes the cap cannot be held against what the cap allows.
    room = inf if over or question.cap is None else question.cap
    chunks, pp = table.chunks, len(table.ranks)
    return {
        "schedule": question.name,
        "pp": pp,
        "vpp": chunks // pp if chunks % pp == 0 else None,
        "microbatches": table.micro_batches,
        "makespan": timeline.makespan,
        "lower_bound": lower_bound(routes(table), timeline.times, room),
        "bubble": timeline.bubble,
        "busy": list(timeline.busy),
        "peak_activations": list(timeline.peak_activations),
        "cap": question.cap,
        "within_cap": not over,
        **(_held_against(question.best_named(), table) if question.name == "auto" else {}),
        "actions": [[str(action) for action in actions] for actions in table.ranks],
    }


def _held_against(named: Timeline | None, table: Table) -> dict[str, Any]:
    """What "auto" is better than, and whether it is just that."""
    if named is None:
        return {"best_named": None, "chosen": "search"}
    best = {
        "schedule": named.table.name,
        "vpp": named.table.chunks // len(named.table.ranks),
        "makespan": named.makespan,
    }
    same = named.table.ranks == table.ranks
    return {"best_named": best, "chosen": named.table.name if same else "search"}


def _page(given: Mapping[str, Any], answer: dict[str, Any], timeline: Timeline) -> str:
    """The answer for people."""
    from rich.console import Console
    from rich.markup import escape

    from plait.schedules.draw import drawing

    table, bubble, makespan = timeline.table, answer["bubble"], timeline.makespan
    peak = max(timeline.peak_activations)
    console = Console(highlight=False)
    colour = console.color_system is not None and not console.no_color
    vpp = answer["vpp"] or 1
    parts = [
        f"[bold]{escape(answer['schedule'])}[/]",
        _many(answer["pp"], "rank") + (f" x {vpp} chunks" if vpp > 1 else ""),
        _many(answer["microbatches"], "micro batch", "es"),
        f"makespan [bold]{makespan:.6g}[/]" + _above(makespan, answer["lower_bound"]),
        f"bubble [bold]{bubble['step_total']:.1%}[/] of the step "
        f"({bubble['step_ideal']:.1%} of ideal), {bubble['span_total']:.1%} of a rank's own span",
        f"peak [bold]{peak:.4g}[/] micro batch" + "es" * (peak != 1),
    ]
    if best := answer.get("best_named"):
        name = best["schedule"] + (f" x {best['vpp']} chunks" if best["vpp"] > 1 else "")
        parts.append(f"best named {name}, {best['makespan']:.6g}")
    with console.capture() as capture:
        console.print()
        console.print(" · ".join(part.replace(" ", "\u00a0") for part in parts))
        console.print()
        console.print(_ranks(timeline, console.width))
        console.print()
        console.print(drawing(table, timeline, console.width, colour), soft_wrap=True)
        for key in FILES:
            if key in given:
                console.print(f"[dim]{key}[/] written to {escape(given[key])}")
        if not answer["within_cap"]:
            console.print(f"\n[bold red]Holds more than {answer['cap']:g}:[/]")
            for finding in check(table, cap=answer["cap"]):
                console.print(f"  {escape(finding.line())}")
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _above(makespan: float, bound: float) -> str:
    """How far the makespan is from what is possible at all."""
    if makespan <= bound * (1 + 1e-9):
        return " (no order is shorter)"
    return f" ({makespan / bound - 1:.1%} above the bound {bound:.6g})"


def _many(n: int, noun: str, plural: str = "s") -> str:
    return f"{n} {noun}" + (plural if n > 1 else "")


def _ranks(timeline: Timeline, width: int):
    """A row a rank: what it has, how long it idles, how much it holds."""
    from rich.table import Table as Grid

    heads = ["  rank", "chunks", "busy", "idle", "idle of its span", "peak activations"]
    narrow = width < 80
    if narrow:  # without what idle says too
        heads = ["  rank", "chunks", "idle", "of span", "peak"]
    grid = Grid.grid(padding=(0, 1 if narrow else 2))
    for head in heads:
        grid.add_column(justify="left" if head == "  rank" else "right", no_wrap=True)
    grid.add_row(*(f"[dim]{head}[/]" for head in heads))
    most = max(timeline.peak_activations)
    for rank, spans in enumerate(timeline.spans):
        busy, held = timeline.busy[rank], timeline.table.held[rank]
        own = spans[-1].end - spans[0].start
        peak = timeline.peak_activations[rank]
        few = len(held) <= (2 if narrow else 5)
        cells = [
            f"  {rank}",
            ",".join(map(str, held)) if few else f"{held[0]},{held[1]}..{held[-1]}",
            f"{busy:.6g}",
            f"{1 - busy / timeline.makespan:.1%}",
            f"{max(1 - busy / own, 0.0) if own else 0:.1%}",
            f"[bold]{peak:.4g}[/]" if peak == most else f"{peak:.4g}",
        ]
        if narrow:
            del cells[2]
        grid.add_row(*cells)
    return grid
