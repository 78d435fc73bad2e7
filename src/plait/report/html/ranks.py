"""The ranks: both grids to point at, and beside them the groups of one rank and what it sends.

The script of the page only finds groups, by size and stride, and chooses what is shown: every
number stands in the page already.
"""

import json
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from plait.report.facts import (
    Row,
    axes_used,
    by_axis,
    grid_axes,
    has_experts,
    members,
    sent_alike,
    stage_axis,
    stages,
)
from plait.report.html.element import Markup, element
from plait.report.html.traffic import links
from plait.report.numbers import amount, spans
from plait.spec.grid import Axis

#: Ranks of a grid that are drawn at most, ranks of one row; of an axis that is too long for that,
#: so many positions are shown (the first of these numbers that does), the last one among them.
_DRAWN, _ACROSS, _SHOWN = 256, 8, (64, 32, 16, 8, 6, 4, 3)


def ranks(report: dict[str, Any]) -> Markup:
    """Needs a world of more than one rank."""
    sums = {s: sum(x.wire_bytes for x in by_axis(rows)) for s, rows in _sends(report)}
    sent = {stage: wire for group, wire in sums.items() for stage in group}
    names = ["dense", *(["expert"] if has_experts(report) else [])]
    axes = axes_used(report)
    fact = {
        "world": report["world"],
        "domain": report["cluster"]["fast_domain"] if report["cluster"] else None,
        "axes": axes,
        "places": {
            name: [axis for axis in grid_axes(report, name) if axis.size > 1] for name in names
        },
        "stage": stage_axis(report).stride,
        "stages": report["layout"]["pp"],
    }
    data = Markup(json.dumps(fact).replace("</", "<\\/"))
    hint = "Point at a rank, walk with the arrow keys, or type its number. A click holds it."
    return element(
        "section",
        element("h2", "Ranks"),
        element("p", hint, class_="aside script"),
        element(
            "div",
            element("div", *(_grid(report, name, sent) for name in names), class_="grids"),
            _beside(report, axes),
            class_="ranks",
        ),
        element("script", data, type="application/json", id="ranks"),
        aria_label="Ranks",
    )


def _sends(report: dict[str, Any]) -> list[tuple[tuple[int, ...], list[Row]]]:
    """(stages, what a rank of them sends); nothing is known of an illegal layout."""
    if report["traffic"] is None:
        return [(tuple(stages(report)), [])]
    return [(tuple(same), rows) for same, rows in sent_alike(report)]


# ------------------------------------------------------------------------------------------
# A grid


class _Part(NamedTuple):
    """A row's share of an axis: `each` positions of it lie along the columns."""

    axis: Axis
    each: int = 1

    @property
    def size(self) -> int:
        return self.axis.size // self.each

    @property
    def stride(self) -> int:
        return self.axis.stride * self.each

    def words(self, first: int, last: int) -> str:
        """Rows `first` to `last` of it, as positions of the axis."""
        a, b = first * self.each, (last + 1) * self.each - 1
        return f"{self.axis.name} {a}" + (f"-{b}" if b > a else "")


def _parts(axes: list[Axis]) -> tuple[list[Axis], list[_Part]]:
    """Axes along the columns, the last of them in part where that fills a row better, and the
    parts along the rows; both the fastest first."""
    across: list[Axis] = []
    rows = [_Part(axis) for axis in axes]
    room = _ACROSS
    while rows:
        axis = rows[0].axis
        each = max(n for n in range(1, room + 1) if axis.size % n == 0)
        if each == 1:
            break
        across.append(axis._replace(size=each))
        room //= each
        if each < axis.size:
            rows[0] = _Part(axis, each)
            break
        rows.pop(0)
    return across, rows


def _grid(report: dict[str, Any], name: str, sent: dict[int, int]) -> Markup:
    axes = [axis for axis in grid_axes(report, name) if axis.size > 1]
    across, parts = _parts(axes)
    width = prod(axis.size for axis in across)
    fits = (k for k in _SHOWN if width * prod(min(p.size, k) for p in parts) <= _DRAWN)
    shown = next(fits, _SHOWN[-1])
    stage = stage_axis(report)
    heads = [
        element(
            "tr",
            element("th", axis.name, scope="row"),
            *(element("th", axis.at(rank), scope="col") for rank in range(width)),
        )
        for axis in reversed(across)
    ]
    rows = []
    for line in _lines(parts, shown):
        if isinstance(line, str):
            gap = element("td", f"⋮ {line}", colspan=width + 1)
            rows.append(element("tr", gap, class_="gap"))
            continue
        place = [
            part.words(i, i) for part in reversed(parts) for i in [line // part.stride % part.size]
        ]
        cells = (_cell(rank, axes, sent[stage.at(rank)]) for rank in range(line, line + width))
        head = element("th", ", ".join(place) or "rank", scope="row")
        first = "stage" if stage.size > 1 and line % stage.stride == 0 and line else None
        rows.append(element("tr", head, *cells, class_=first))
    words = {"dense": "Dense grid", "expert": "Expert grid"}[name]
    order = ", ".join(f"{axis.name} {axis.size}" for axis in axes)
    table = element(
        "table",
        element("thead", *heads),
        element("tbody", *rows),
        class_="grid",
        role="grid",
        data_grid=name,
        aria_label=f"{words}: {order}",
    )
    return element(
        "figure",
        element("figcaption", element("b", words), f" {order}, the fastest first"),
        element("div", table, class_="scroll"),
    )


def _lines(parts: list[_Part], shown: int, first: int = 0) -> Iterator[int | str]:
    """The first rank of each row, and between them words for rows that are left out."""
    if not parts:
        yield first
        return
    *faster, part = parts
    for i in range(part.size):
        if part.size > shown and shown - 1 <= i < part.size - 1:
            if i == shown - 1:
                yield f"{part.words(i, part.size - 2)} likewise, {part.stride} ranks apart"
            continue
        yield from _lines(faster, shown, first + i * part.stride)


def _cell(rank: int, axes: list[Axis], wire: int) -> Markup:
    place = ", ".join(f"{axis.name} {axis.at(rank)}" for axis in axes)
    return element(
        "td",
        rank,
        data_rank=rank,
        data_wire=wire,
        tabindex=-1 if rank else 0,
        aria_label=f"rank {rank}: {place}, sends {amount(wire)}",
    )


# ------------------------------------------------------------------------------------------
# A rank


def _beside(report: dict[str, Any], axes: list[Axis]) -> Markup:
    last = report["world"] - 1
    number = element(
        "input", type="number", id="rank", min=0, max=last, value=0, aria_describedby="place"
    )
    choice = element("p", element("label", "rank ", number), class_="script choice")
    place = element("p", id="place", role="status", class_="script")
    tables = (_sent(report, same, rows, axes) for same, rows in _sends(report))
    return element(
        "div", choice, place, *tables, class_="rank", aria_label="One rank", role="group"
    )


def _sent(
    report: dict[str, Any], same: tuple[int, ...], rows: list[Row], axes: list[Axis]
) -> Markup:
    """What a rank of some stages sends on each axis, with the groups of the first of them."""
    first = same[0] * stage_axis(report).stride
    sums = {sent.axis: sent for sent in by_axis(rows)}
    clustered = report["cluster"] is not None
    body = []
    for axis in axes:
        sent = sums.get(axis.name)
        swatch = element("i", class_=f"a-{axis.name}", aria_hidden="true")
        phases = ", ".join(f"{p} {amount(n)}" for p, n in sent.phases.items()) if sent else ""
        mark = links(sent.inter_node) if sent and clustered else None
        group = element("td", members(axis.group(first)), data_group=axis.name, class_="word")
        cells = [element("td", amount(sent.bytes if sent else 0))]
        cells += [element("td", amount(sent.wire_bytes if sent else 0), title=phases or None)]
        name = element("th", swatch, axis.name, scope="row")
        known = report["traffic"] is not None
        body.append(
            element(
                "tr",
                name,
                group,
                *(cells if known else []),
                element("td", mark) if clustered and known else None,
                data_axis=axis.name,
                data_bytes=(sent.bytes if sent else 0) if known else None,
                data_wire=(sent.wire_bytes if sent else 0) if known else None,
            )
        )
    heads = ["axis", "its group"]
    if report["traffic"] is not None:
        heads += ["bytes", "on the wire", *(["links"] if clustered else [])]
    head = element("tr", *(element("th", name, scope="col") for name in heads))
    many = f"stage{'s' * (len(same) > 1)} {spans(same)}"
    return element(
        "table",
        element("caption", f"a rank of {many}" if report["layout"]["pp"] > 1 else "a rank"),
        element("thead", head),
        element("tbody", *body),
        class_="numbers sent",
        data_stages=" ".join(map(str, same)),
    )
