"""The ledger of a rank as it runs: what it sent and held in a step beside what was predicted."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from plait.cost.ledger import MEMORY_CLASSES, StageMemory, TrafficLedger
from plait.report.numbers import amount


def traffic_table(step: int, predicted: TrafficLedger, measured: TrafficLedger) -> Table:
    """Every entry of either, in the order of the ledger; what differs in red."""
    table = Table(title=f"sent by rank 0 in step {step}", title_justify="left", box=None)
    for name in ("axis", "collective", "phase", "dtype"):
        table.add_column(name)
    for name in ("count", "bytes", "predicted"):
        table.add_column(name, justify="right")
    said, was = ({_key(row): row for row in ledger.rows()} for ledger in (predicted, measured))
    for key in dict.fromkeys((*was, *said)):
        count, sent = _cells(was.get(key))
        expected = _cells(said.get(key))
        same = (count, sent) == expected
        forecast = expected[1] if same else f"{expected[1]} in {expected[0]}"
        cells = (*key, count, amount(int(sent)), amount(int(forecast)) if same else forecast)
        table.add_row(*cells, style=None if same else "bold red")
    return table


def memory_table(
    step: int, predicted: Sequence[StageMemory], measured: Sequence[Mapping[str, Any]]
) -> Table:
    """Each moment's peak by class, what was measured over what was predicted."""
    table = Table(title=f"held by rank 0 in step {step}", title_justify="left", box=None)
    table.add_column("")
    for row in measured:
        table.add_column(row["moment"], justify="right")
    moments = {row.moment: row for row in predicted}
    kinds = [k for k in MEMORY_CLASSES if any(row[k] for row in measured)]
    for kind in (*kinds, "total"):
        table.add_row(kind, *(amount(row[kind]) for row in measured), end_section=kind == "total")
    forecast = [moments.get(row["moment"]) for row in measured]
    cells = ("" if row is None else amount(row.total) for row in forecast)
    table.add_row("predicted", *cells, style="bold")
    return table


def _key(row: Any) -> tuple[str, ...]:
    return row.axis, row.collective, row.phase, row.dtype


def _cells(row: Any) -> tuple[str, str]:
    return ("0", "0") if row is None else (f"{row.count:,}", str(row.bytes))
