"""The ranks in text: each of a small world, the axes of a large one."""

from math import prod
from typing import TYPE_CHECKING, Any

from plait.report.facts import grid_axes, has_experts, members
from plait.report.text.lines import heading
from plait.spec.grid import Axis

if TYPE_CHECKING:
    from rich.console import Console

#: Worlds up to so many ranks are drawn rank by rank.
DRAWN = 64
#: Of those drawings with at most so many rows, if that takes no more than so many columns.
ROWS, COLUMNS = 16, 16


def ranks(console: "Console", report: dict[str, Any]) -> None:
    """Both grids: rank by rank, or a row for each axis."""
    if report["world"] == 1 or report["grids"]["dense"] is None:
        return
    drawn = report["world"] <= DRAWN
    draw = _draw if drawn else _describe
    names = ["dense", *(["expert"] if has_experts(report) else [])]
    for name in names:
        what = {"dense": "Ranks", "expert": "Ranks of experts"}[name]
        heading(console, what, "" if drawn else "fastest axis first")
        draw(console, report, name)


def _draw(console: "Console", report: dict[str, Any], name: str) -> None:
    from rich.table import Table

    axes = [axis for axis in grid_axes(report, name) if axis.size > 1]
    # The fastest axis lies along the columns, with it as many as keep the rows few.
    across = 1
    while across < len(axes) and prod(axis.size for axis in axes[across:]) > ROWS:
        across += 1
    columns, rows = axes[:across], axes[across:]
    width = prod(axis.size for axis in columns)
    if width > COLUMNS:
        _describe(console, report, name)
        return
    table = Table.grid(padding=(0, 2 if width <= 8 else 1))
    table.add_column(style="dim", no_wrap=True)
    for _ in range(width):
        table.add_column(justify="right")
    for axis in reversed(columns):
        table.add_row(f"  {axis.name}", *(f"[dim]{axis.at(rank)}[/]" for rank in range(width)))
    for first in range(0, report["world"], width):
        place = "  ".join(f"{axis.name} {axis.at(first):<{_digits(axis)}}" for axis in rows[::-1])
        table.add_row(f"  {place}", *map(str, range(first, first + width)))
    console.print(table)


def _digits(axis: Axis) -> int:
    return len(str(axis.size - 1))


def _describe(console: "Console", report: dict[str, Any], name: str) -> None:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for axis in grid_axes(report, name):
        if axis.size > 1:
            shown = f"ranks {members(axis.group(0))}"
            step = f"[dim]stride {axis.stride}[/]"
            table.add_row(f"  [bold]{axis.name}[/]", str(axis.size), shown, step)
    console.print(table)
