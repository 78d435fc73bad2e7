"""What ranks hold: a bar for each stage and moment, to the scale of the device."""

from typing import Any

from plait.cost.ledger import MEMORY_CLASSES
from plait.report.facts import Row, held_alike, recipe
from plait.report.html.element import Markup, element, join
from plait.report.numbers import amount, spans

_WORDS = {"reserved": "reserve of the allocator", "context": "CUDA context, communicators"}
#: More groups of stages than this stand in two columns.
_MANY = 3


def memory(report: dict[str, Any]) -> Markup:
    held = report["memory"]
    device = held["device_bytes"]
    besides = {}
    if device is not None:
        besides = {"reserved": held["reserved_bytes"], "context": held["context_bytes"]}
    alike = held_alike(held["by_stage"])
    most = max(row["total"] for row in held["by_stage"]) + sum(besides.values())
    scale = max(most, device or 0) or 1
    seen = [name for name in MEMORY_CLASSES if any(row[name] for row in held["by_stage"])]
    legend = element("ul", *(_key(name) for name in (*seen, *besides)), class_="legend")
    bars = [
        element(
            "div",
            element("h3", _named(stages).capitalize()),
            *(_bar(stages, row, besides, device, scale) for row in moments),
            class_="stage",
        )
        for stages, moments in alike
    ]
    end = None
    if device is not None:
        both = f"{amount(held['reserved_bytes'])} and {amount(held['context_bytes'])}"
        end = element(
            "p",
            f"The line is where the device ends, {amount(device)}. The reserve and the context, "
            f"{both}, are estimates, made for the fullest rank.",
            class_="aside",
        )
    return element(
        "section",
        element("h2", "Memory of a rank"),
        legend,
        element("div", *bars, class_="bars many" if len(alike) > _MANY else "bars"),
        end,
        element("p", f"States: {', '.join(recipe(report))}.", class_="aside"),
        _table(alike, seen),
        aria_label="Memory",
    )


def _key(name: str) -> Markup:
    words = _WORDS.get(name, name)
    return element("li", element("i", class_=f"m-{name}", aria_hidden="true"), words)


def _named(stages: list[int]) -> str:
    return f"stage{'s' * (len(stages) > 1)} {spans(stages)}"


def _bar(
    stages: list[int], row: Row, besides: dict[str, int], device: int | None, scale: int
) -> Markup:
    used = {name: row[name] for name in MEMORY_CLASSES} | besides
    total = sum(used.values())
    parts = {name: size for name, size in used.items() if size}
    words = ", ".join(f"{_WORDS.get(name, name)} {amount(size)}" for name, size in parts.items())
    over = device is not None and total > device
    said = f"{'more than the device holds: ' if over else ''}{amount(total)}: {words}"
    segments = [
        element(
            "i",
            class_=f"m-{name}",
            style=f"width:{size / scale:.3%}",
            title=f"{_WORDS.get(name, name)} {amount(size)}",
        )
        for name, size in parts.items()
    ]
    limit = None
    if device is not None:
        limit = element("b", class_="limit", style=f"left:{device / scale:.3%}")
    bar = element(
        "div",
        *segments,
        limit,
        class_="bar",
        role="img",
        aria_label=f"{_named(stages)}, {row['moment']}: {said}",
    )
    size = element("span", amount(total), class_="over" if over else None)
    return element("div", element("span", row["moment"]), bar, size, class_="measure")


def _table(alike: list[tuple[list[int], list[Row]]], seen: list[str]) -> Markup:
    heads = ("stages", "moment", *seen, "total")
    rows = [
        element(
            "tr",
            element("th", spans(stages), scope="row"),
            element("td", row["moment"], class_="word"),
            *(element("td", amount(row[name])) for name in (*seen, "total")),
        )
        for stages, moments in alike
        for row in moments
    ]
    head = element("tr", *(element("th", name, scope="col") for name in heads))
    table = element("table", element("thead", head), element("tbody", *rows), class_="numbers")
    scroll = element(
        "div", table, class_="scroll", tabindex=0, role="group", aria_label="memory in numbers"
    )
    return element("details", element("summary", "in numbers"), join(scroll))
