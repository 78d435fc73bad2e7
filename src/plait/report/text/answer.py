"""The findings and the verdict in text."""

from typing import TYPE_CHECKING, Any

from plait.cost.ledger import MEMORY_CLASSES
from plait.report.numbers import amount
from plait.report.text.lines import heading
from plait.report.text.serving import verdict as of_serving

if TYPE_CHECKING:
    from rich.console import Console

LEVELS = {"error": ("✗", "bold red"), "warning": ("!", "yellow"), "note": ("·", "cyan")}


def findings(console: "Console", found: list[dict[str, Any]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    if not found:
        return
    heading(console, "Findings")
    table = Table.grid(padding=(0, 1))
    table.add_column(width=3)
    table.add_column()
    for finding in found:
        mark, colour = LEVELS[finding["level"]]
        text = f"[{colour}]{finding['rule']}[/]: {escape(finding['message'])}"
        if finding["suggest"]:
            changes = (
                f"{key.removeprefix('layout.')} {value}"
                for key, value in finding["suggest"].items()
            )
            text += f" [dim]->[/] [bold]{escape(', '.join(changes))}[/]"
        table.add_row(f"  [{colour}]{mark}[/]", text)
    console.print(table)


def verdict(console: "Console", report: dict[str, Any]) -> None:
    memory = report["memory"]
    console.print()
    if not memory["by_stage"]:
        console.print("[bold red]Illegal.[/] What is wrong is said above.")
        return
    if any(finding["level"] == "error" for finding in report["findings"]):
        target = report["source"]["dialect"]
        said = f"[bold red]{target} would not run this[/] (see above). If it did:"
        console.print(said)
    if report["serving"]:
        of_serving(console, report)
        return
    fullest = max(memory["by_stage"], key=lambda row: row["total"])
    most = max(MEMORY_CLASSES, key=lambda name: fullest[name])
    share = fullest[most] / fullest["total"]
    words = {"optimizer": "optimizer states", "gathered": "gathered weights"}.get(most, most)
    what = f"{words} take {share:.0%} of it"
    used = memory["peak_bytes"] + memory["reserved_bytes"] + memory["context_bytes"]
    device = memory["device_bytes"]
    if device is None:
        console.print(
            f"[bold]{amount(memory['peak_bytes'])}[/] a rank; {what}. "
            "Name a device (--gpus GPU:COUNT) to know whether it fits."
        )
    elif (spare := memory["margin_bytes"]) >= 0:
        console.print(
            f"[bold green]Fits.[/] {amount(used)} of {amount(device)}, {amount(spare)} "
            f"({spare / device:.0%}) to spare; {what}."
        )
    else:
        console.print(
            f"[bold red]Does not fit.[/] {amount(used)} where there are {amount(device)}, "
            f"{amount(used - device)} ({used / device - 1:.0%}) too much; {what}."
        )
