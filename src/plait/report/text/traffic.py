"""What a rank sends, in text: a bar for each axis, and the numbers."""

from typing import TYPE_CHECKING, Any

from plait.report.facts import Sent, busiest_stage, by_axis, rows_alike
from plait.report.numbers import amount, spans
from plait.report.text.lines import bar, heading

if TYPE_CHECKING:
    from rich.console import Console

#: Phase -> (mark in the bar, colour).
PHASES = {
    "forward": ("█", "blue"),
    "recompute": ("+", "cyan"),
    "backward": ("▒", "magenta"),
    "loss": ("=", "yellow"),
    "norm": (":", "bright_black"),
    "optimizer": ("#", "green"),
}


def traffic(console: "Console", report: dict[str, Any]) -> None:
    from rich.table import Table

    rows = report["traffic"]
    if not rows:
        heading(console, "Traffic", "none: a rank by itself")
        return
    most = busiest_stage(report)
    sums = by_axis([row for row in rows if row["stage"] == most])
    stages = len({row["stage"] for row in rows}) > 1
    where = f" by stage {most}, which sends most" if stages else ""
    whole = sum(sent.wire_bytes for sent in sums)
    heading(console, "Traffic of a rank and step", f"{amount(whole)} on the wire{where}")
    clustered = report.get("cluster") is not None
    _bars(console, sums, clustered)
    wide = console.width >= 100
    names = ["  axis", "collective", "phase", *(["dtype"] if wide else [])]
    names += ["stages"] if stages else []
    numbers = ["count", "bytes", "on the wire", *(["links"] if clustered else [])]
    table = Table.grid(padding=(0, 2))
    for _ in names:
        table.add_column(no_wrap=True)
    for number in numbers:
        table.add_column(justify="left" if number == "links" else "right", no_wrap=True)
    table.add_row(*(f"[dim]{name}[/]" for name in names + numbers))
    before: list[str] = []
    for row, where in rows_alike(rows):
        said = [row["axis"], row["collective"], row["phase"], *([row["dtype"]] if wide else [])]
        # What the row above says already is not said again.
        same = next((i for i, x in enumerate(said) if before[i : i + 1] != [x]), len(said))
        before = said
        cells = [f"  [bold]{'' if same else said[0]}[/]"]
        if stages:
            cells += [*("" if i < same else x for i, x in enumerate(said)), spans(where)][1:]
        else:
            cells += said[1:]
        cells += [f"{row['count']:,}", amount(row["bytes"]), amount(row["wire_bytes"])]
        if clustered:
            cells.append("[yellow]slow[/]" if row["inter_node"] else "[green]fast[/]")
        table.add_row(*cells)
    console.print(table)


def _bars(console: "Console", sums: list[Sent], clustered: bool) -> None:
    """A bar for each axis: what goes over the wire, by phase."""
    left = max(len(sent.axis) for sent in sums) + 4
    columns = min(console.width, 140) - left - (17 if clustered else 12)
    scale = max(sent.wire_bytes for sent in sums) or 1
    phases = [p for p in PHASES if any(p in sent.phases for sent in sums)]
    for sent in sums:
        parts = ((sent.phases.get(phase, 0), *PHASES[phase]) for phase in phases)
        text, drawn = bar(parts, scale, columns)
        link = ("[yellow] slow[/]" if sent.inter_node else "[green] fast[/]") if clustered else ""
        rest = " " * (columns - drawn)
        name = f"[bold]{sent.axis:<{left - 4}}[/]"
        console.print(f"  {name}  {text}{rest}{amount(sent.wire_bytes):>12}{link}", no_wrap=True)
    legend = "  ".join(f"[{PHASES[p][1]}]{PHASES[p][0]}[/] {p}" for p in phases)
    console.print(f"  {' ' * (left - 2)}{legend}")
