"""What a rank holds, in text: a bar for each stage and moment, and the numbers."""

from typing import TYPE_CHECKING, Any

from plait.cost.ledger import MEMORY_CLASSES
from plait.report.facts import Row, recipe
from plait.report.numbers import amount, spans
from plait.report.text.lines import bar, heading

if TYPE_CHECKING:
    from rich.console import Console

#: What memory is used for -> (mark in the bar, colour).
MARKS = {
    "parameters": ("█", "blue"),
    "gradients": ("▓", "cyan"),
    "optimizer": ("▒", "magenta"),
    "activations": ("#", "green"),
    "logits": ("=", "yellow"),
    "gathered": ("+", "bright_blue"),
    "buffers": ("~", "bright_cyan"),
    "allocator": (":", "bright_black"),
    "context": ("%", "bright_black"),
}
#: Stages whose numbers stand side by side, and that have a bar; of more, those that hold most. Of
#: up to so many every moment has a bar, of more the fullest.
_SIDE_BY_SIDE, _BARS, _ALL_MOMENTS = 6, 16, 4


def memory(console: "Console", report: dict[str, Any]) -> None:
    held = report["memory"]
    rows = held["by_stage"]
    fullest = max(rows, key=lambda row: row["total"])
    where = f"fullest in {fullest['moment']}"
    if len({row["stage"] for row in rows}) > 1:
        where += f" on stage {fullest['stage']}"
        groups = _alike(rows)
        most = _fullest(groups, _SIDE_BY_SIDE)
        columns = [(f"stage {spans(stages)}", row) for stages, row in most]
        bars = [
            (f"stage {spans(stages)} " if i == 0 else "", row)
            for stages, top in _fullest(groups, _BARS)
            for i, row in enumerate(_moments(rows, top, len(groups)))
        ]
        if len(groups) > _SIDE_BY_SIDE:
            where += "; in numbers the stages that hold most"
    else:
        columns = [("", row) for row in rows]
        bars = columns
    heading(console, "Memory of a rank", where)
    _bars(console, bars, held)
    _numbers(console, columns)
    whole, own = recipe(report)
    console.print(f"  [dim]states: {whole},[/]\n  [dim]{own}[/]")
    if held["device_bytes"] is not None:
        extra = (
            ("allocator", "reserve of the allocator", held["reserved_bytes"]),
            ("context", "CUDA context, communicators", held["context_bytes"]),
        )
        for name, words, size in extra:
            mark, colour = MARKS[name]
            console.print(f"  [{colour}]{mark}[/] {words}  {amount(size)} [dim](estimate)[/]")


def _alike(rows: list[Row]) -> list[tuple[list[int], Row]]:
    """(stages, the moment in which they are fullest) of stages that hold the same, as said."""
    alike: dict[tuple, list[Row]] = {}
    for stage in dict.fromkeys(row["stage"] for row in rows):
        peak = max((r for r in rows if r["stage"] == stage), key=lambda row: row["total"])
        key = tuple(amount(peak[name]) for name in (*MEMORY_CLASSES, "total"))
        alike.setdefault((peak["moment"], *key), []).append(peak)
    return [([peak["stage"] for peak in g], g[0]) for g in alike.values()]


def _fullest(groups: list[tuple[list[int], Row]], n: int) -> list[tuple[list[int], Row]]:
    """The n that hold most, in the order of the stages."""
    most = sorted(groups, key=lambda group: -group[1]["total"])[:n]
    return sorted(most, key=lambda group: group[1]["stage"])


def _moments(rows: list[Row], fullest: Row, groups: int) -> list[Row]:
    own = [row for row in rows if row["stage"] == fullest["stage"]]
    return own if groups <= _ALL_MOMENTS else [fullest]


def _bars(console: "Console", bars: list[tuple[str, Row]], held: dict[str, Any]) -> None:
    """Bars to one scale, with what the device needs besides; where the device ends, if it does
    before a bar."""
    names = max(len(name) for name, _ in bars)
    moments = max(len(row["moment"]) for _, row in bars)
    left = 2 + names + moments + 1
    columns = min(console.width, 140) - left - 12
    device = held["device_bytes"]
    besides = {"allocator": held["reserved_bytes"], "context": held["context_bytes"]}
    besides = besides if device is not None else {}
    most = max(row["total"] for _, row in bars) + sum(besides.values())
    scale = max(most, device or 0) or 1
    for name, row in bars:
        used = {key: row[key] for key in MEMORY_CLASSES} | besides
        text, drawn = bar(((size, *MARKS[key]) for key, size in used.items()), scale, columns)
        room = round((device or 0) / scale * columns)
        text += f"[dim]{'·' * max(room - drawn, 0)}{' ' * (columns - max(room, drawn))}[/]"
        place = f"[dim]{name:<{names}}{row['moment']:<{moments}}[/]"
        console.print(f"  {place} {text}{amount(sum(used.values())):>11}", no_wrap=True)
    if device is not None and device < most:
        end = left + max(round(device / scale * columns), 1)
        words = "the device ends here"
        line = f"{words:>{end - 2}} ^" if end > len(words) + 2 else f"{'^':>{end}} {words}"
        console.print(f"[bold red]{line}[/]", no_wrap=True)


def _numbers(console: "Console", columns: list[tuple[str, Row]]) -> None:
    from rich.table import Table

    top = max((row for _, row in columns), key=lambda row: row["total"])
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for _ in columns:
        table.add_column(justify="right", no_wrap=True)
    if any(name for name, _ in columns):
        table.add_row("", *(f"[dim]{name}[/]" for name, _ in columns))
    table.add_row("", *(f"[dim]{row['moment']}[/]" for _, row in columns))

    def cells(name: str) -> list[str]:
        return [f"[{'bold' if row is top else 'dim'}]{amount(row[name])}[/]" for _, row in columns]

    for name in MEMORY_CLASSES:
        if any(row[name] for _, row in columns):
            mark, colour = MARKS[name]
            table.add_row(f"  [{colour}]{mark}[/] {name}", *cells(name))
    table.add_row("    total", *cells("total"))
    console.print(table)
