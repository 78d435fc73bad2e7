"""The launch that a layout was read from, in text: what each option was taken for."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from plait.report.text.lines import heading

if TYPE_CHECKING:
    from rich.console import Console


def source(console: "Console", source: dict[str, Any]) -> None:
    """Every option of the launch file, grouped by what became of it."""
    from rich.markup import escape
    from rich.table import Table

    heading(console, "Launch", f"{source['file']}, as {source['dialect']} ({source['version']})")
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True, width=14)
    table.add_column()
    rows = (
        ("understood", (_option(o) for o in source["understood"])),
        ("by default", (_option(o) for o in source["defaults"] if _matters(o))),
        ("environment", (f"{name}={value}" for name, value in source["environment"].items())),
        ("not for layout", (str(o["name"]) for o in source["unheeded"])),
        ("unknown", (str(o["name"]) for o in source["unknown"])),
    )
    for name, options in rows:
        if text := _listed(options):
            table.add_row(f"  {name}", escape(text))
    console.print(table)


def _matters(default: dict[str, Any]) -> bool:
    """A default that decides the layout or the batch; of a model's there are many."""
    return default["means"].startswith(("layout.", "train.", "ranks"))


def _option(option: dict[str, Any]) -> str:
    value = option["value"]
    shown = "" if value is True else f" {_shown(value)}"
    return f"{option['name']}{shown}"


def _shown(value: Any) -> str:
    """A value in few characters."""
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _listed(texts: Iterable[str]) -> str:
    # An option is not broken where it can be avoided.
    return " · ".join(text.replace(" ", "\u00a0") for text in texts)


def legal(console: "Console", source: dict[str, Any]) -> None:
    """The nearest launch that would run, ready to be copied."""
    for name, text in source["legal"].items():
        heading(console, "Nearest legal launch", name)
        # As it is: no markup, no line broken.
        console.print(text.rstrip(), markup=False, soft_wrap=True)
