"""What a dry run measured, in text."""

from typing import TYPE_CHECKING, Any

from plait.report.numbers import amount
from plait.report.text.lines import heading

if TYPE_CHECKING:
    from rich.console import Console


def measured(console: "Console", report: dict[str, Any]) -> None:
    """What the program did beside what was predicted."""
    from rich.table import Table

    stages = report["layout"]["pp"]
    whose = "rank 0" if stages == 1 else "a rank of each stage"
    heading(console, "Measured", f"the program of {whose}, run dry")
    measured = report["measured"]["memory"]
    places = {(row["stage"], row["moment"]): row for row in report["memory"]["by_stage"] or ()}
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for _ in range(3):
        table.add_column(justify="right", no_wrap=True)
    pipelined = len({row["stage"] for row in measured}) > 1
    if pipelined:
        measured = [
            max((r for r in measured if r["stage"] == stage), key=lambda row: row["total"])
            for stage in dict.fromkeys(row["stage"] for row in measured)
        ]
    heads = ("  stage" if pipelined else "  memory in", "predicted", "measured", "off by")
    table.add_row(*(f"[dim]{head}[/]" for head in heads))
    for row in measured:
        said = places.get((row["stage"], row["moment"]))
        if said is None:
            continue
        off = said["total"] / row["total"] - 1 if row["total"] else 0.0
        name = f"  {row['stage']}: {row['moment']}" if pipelined else f"  {row['moment']}"
        cells = (name, amount(said["total"]), amount(row["total"]), f"{off:+.2%}")
        table.add_row(*cells)
    console.print(table)
    if report["agree"]:
        entries, sent = len(report["measured"]["traffic"]), report["measured"]["traffic"]
        messages = sum(row["count"] for row in sent)
        words = f"{entries} entries, {messages:,} messages, every byte as predicted"
        console.print(f"  [green]traffic agrees[/]: {words}" if sent else "  nothing sent, as said")
    for difference in report["differences"]:
        console.print(f"  [bold red]differs[/] {difference}")
