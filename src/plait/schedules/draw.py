"""A schedule drawn in the terminal: a row a rank, time from left to right.

Legible without colour: a cell begins with the letter of its kind, in lower case where it belongs
to a further chunk of the rank, or to the second copy of the model.
"""

from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

from plait.schedules.simulate import Timeline
from plait.schedules.table import Action, Table

if TYPE_CHECKING:  # rich takes a while to import, and --json does without it
    from rich.text import Text

#: Kind -> (what it is, colour for the terminal); further chunks have the bright colour.
KINDS = {
    "F": ("forward", "blue"),
    "B": ("backward", "yellow"),
    "I": ("input gradient", "cyan"),
    "W": ("weight gradient", "green"),
}
IDLE, MIXED, PARTLY = "·", "=", "-"
#: A column that is idle for more than the first of these shares is drawn idle; one of which a kind
#: has more than the second as that kind; one that is idle for more than the third partly idle.
_IDLE, _ALONE, _GAPS = 0.5, 0.9, 0.15


def shades(table: Table) -> Callable[[int, Action], int]:
    """A function that says of an action of a rank which part of the rank's work it is: 0, 1, ...

    It is the number of its chunk among those of the rank; but where the model is there twice
    (DualPipe), which copy the micro batch passes.
    """
    entrances = sorted({rank for (chunk, _), rank in table.place.items() if chunk == 0})
    if len(entrances) > 1:
        copy = {rank: i for i, rank in enumerate(entrances)}
        return lambda rank, action: copy[table.place[0, action.micro]]
    index = [{chunk: i for i, chunk in enumerate(held)} for held in table.held]
    return lambda rank, action: index[rank][action.chunk]


def drawing(table: Table, timeline: Timeline, width: int, colour: bool) -> "Text":
    """The timeline, a legend below it.

    Args:
        width: columns to draw in. Where an action does not have a column of its own, a column
            shows what its stretch of time is mostly used for.
        colour: whether the text will be shown in colour.
    """
    from rich.text import Text

    label = len(f"rank {len(table.ranks) - 1}") + 4
    columns = max(width - label, 10)
    digits = len(str(table.micro_batches - 1))
    spans = [list(rank) for rank in timeline.spans]
    lengths = [end - start for rank in spans for _, start, end in rank if end > start]
    scale, whole = _scale(lengths, timeline.makespan, columns, digits)
    shade = shades(table)
    text = Text(no_wrap=True, end="")
    for rank, row in enumerate(spans):
        text.append(f"  rank {rank}".ljust(label), "dim")
        shown = [(a, shade(rank, a), start, end) for a, start, end in row]
        text.append_text((_cells if whole else _mixture)(shown, timeline.makespan, scale, colour))
        text.append("\n")
    end = round(timeline.makespan * scale)
    last = f"{timeline.makespan:.6g}"
    text.append(" " * label + "0" + last.rjust(max(end - 1, len(last) + 1)) + "\n", "dim")
    text.append_text(_legend(table, whole, width))
    return text


def _scale(lengths: list[float], makespan: float, columns: int, digits: int) -> tuple[float, bool]:
    """Columns of a unit of time, and whether actions have columns of their own.

    A short action gets as many columns as its letter, its micro batch and a blank take, or a
    smaller whole number of them.
    """
    if not lengths:
        return columns / (makespan or 1), True
    # A few actions that are very short do not make all others wide.
    unit = max(min(lengths), median(lengths) / 4)
    fit = min(int(columns / makespan * unit), digits + 2)
    if fit >= 1:
        return fit / unit, True
    scale = columns / makespan
    return scale, median(lengths) * scale >= 1


def _style(kind: str, shade: int) -> str:
    colour = KINDS[kind][1]
    return f"black on bright_{colour}" if shade else f"white on {colour}"


def _letter(kind: str, shade: int) -> str:
    return kind.lower() if shade else kind


def _cells(
    row: list[tuple[Action, int, float, float]], makespan: float, scale: float, colour: bool
) -> "Text":
    """Each action in columns of its own."""
    from rich.text import Text

    line, at = Text(), 0
    for action, shade, start, end in row:
        first, last = max(round(start * scale), at), round(end * scale)
        if last <= first:
            continue
        line.append(IDLE * (first - at), "dim")
        names = [f"{_letter(action.kind, shade)}{action.micro}", str(action.micro)]
        names = names if colour else names[:1]
        fits = (name for name in names if len(name) <= last - first)
        name = next(fits, _letter(action.kind, shade))
        line.append(name.ljust(last - first), _style(action.kind, shade))
        at = last
    line.append(IDLE * (round(makespan * scale) - at), "dim")
    return line


def _mixture(
    row: list[tuple[Action, int, float, float]], makespan: float, scale: float, colour: bool
) -> "Text":
    """What each column's stretch of time is mostly used for."""
    from rich.text import Text

    columns = max(round(makespan * scale), 1)
    used: list[dict[tuple[str, int], float]] = [{} for _ in range(columns)]
    for action, shade, start, end in row:
        what = action.kind, min(shade, 1)
        a, b = start * scale, end * scale
        for column in range(int(a), min(int(b) + 1, columns)):
            part = min(b, column + 1) - max(a, column)
            if part > 0:
                used[column][what] = used[column].get(what, 0.0) + part
    line = Text()
    for here in used:
        busy = sum(here.values())
        (kind, shade), most = max(here.items(), key=lambda item: item[1], default=(("", 0), 0.0))
        if busy <= 1 - _IDLE:
            line.append(IDLE, "dim")
        elif most >= _ALONE * busy:
            line.append(_letter(kind, shade), _style(kind, shade))
        else:
            mark = MIXED if busy >= 1 - _GAPS else PARTLY
            line.append(mark, "white on bright_black" if colour else "")
    return line


def _legend(table: Table, whole: bool, width: int) -> "Text":
    """What the letters and signs mean, in lines that are not wider than `width` if words allow."""
    from rich.text import Text

    shade = shades(table)
    seen = {(a.kind, min(shade(r, a), 1)) for r, actions in enumerate(table.ranks) for a in actions}
    entries = []
    for kind, (words, _) in KINDS.items():
        if any(k == kind for k, _ in seen):
            letters = [(_letter(kind, s), _style(kind, s)) for s in (0, 1) if (kind, s) in seen]
            entries.append(Text.assemble(*letters, f" {words}"))
    if not whole:
        entries += [Text(f"{MIXED} several"), Text(f"{PARTLY} several, some idle")]
    entries.append(Text(f"{IDLE} idle"))
    lines = [Text()]
    for entry in entries:
        if len(lines[-1]) and len(lines[-1]) + 2 + len(entry) > width:
            lines.append(Text())
        lines[-1].append("  ").append_text(entry)
    if any(s for _, s in seen):
        twice = len({rank for (chunk, _), rank in table.place.items() if chunk == 0}) > 1
        what = "the second copy of the model" if twice else "a rank's further chunks"
        lines.append(Text(f"  lower case: {what}", "dim"))
    return Text("\n").join(lines)
