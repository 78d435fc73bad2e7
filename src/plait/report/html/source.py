"""The launch that a layout was read from: what each option was taken for, and the nearest legal
one to copy."""

from collections.abc import Iterable, Mapping
from typing import Any

from plait.report.html.element import Markup, element


def source(said: dict[str, Any]) -> Markup:
    """A table of options, grouped by what became of each."""
    groups = (
        ("understood", said["understood"]),
        ("unknown", said["unknown"]),
        ("filled in by default", said["defaults"]),
        ("does not matter for the layout", said["unheeded"]),
    )
    rows = [row for name, options in groups for row in _rows(name, options)]
    rows += [_row("environment", name, value, "") for name, value in said["environment"].items()]
    head = element("tr", *(element("th", h) for h in ("", "option", "value", "means")))
    parts = [
        element("h2", "Launch"),
        element("p", f"{said['file']}, read as {said['dialect']} ({said['version']})"),
        element("details", element("summary", f"{len(rows)} options"),
                element("table", element("thead", head), element("tbody", *rows))),
    ]  # fmt: skip
    for name, text in (said["legal"] or {}).items():
        parts += [element("h3", f"Nearest legal launch: {name}"), element("pre", text)]
    return element("section", *parts, class_="source", aria_label="Launch")


def _rows(group: str, options: Iterable[Mapping[str, Any]]) -> Iterable[Markup]:
    for option in options:
        means = option.get("means") or (
            f"nearest: {near}" if (near := option.get("nearest")) else ""
        )
        yield _row(group, option["name"], option["value"], means)


def _row(group: str, name: str, value: Any, means: str) -> Markup:
    shown = "" if value is True else str(value)
    cells = (element("code", name), element("code", shown) if shown else "", means)
    return element("tr", element("td", group), *(element("td", cell) for cell in cells))
