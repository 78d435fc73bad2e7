"""What every part of the text draws with: headings, and bars to scale."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def heading(console: "Console", title: str, more: str = "") -> None:
    console.print()
    console.print(f"[bold]{title}[/]" + (f"  [dim]{more}[/]" if more else ""))


def bar(parts: Iterable[tuple[float, str, str]], scale: float, columns: int) -> tuple[str, int]:
    """Parts (size, mark, colour) side by side, `scale` being `columns` wide.

    Ends are rounded, not lengths, so a bar is as long as its sum says. Returns the bar in rich's
    markup and its columns.
    """
    text, at, drawn = "", 0.0, 0
    for size, mark, colour in parts:
        at += size
        cells = round(at / scale * columns) - drawn
        drawn += cells
        text += f"[{colour}]{mark * cells}[/]" if cells else ""
    return text, drawn
