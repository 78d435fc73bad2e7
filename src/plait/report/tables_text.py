"""The tables of `plait tables` for people."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from plait.report.numbers import amount, count

if TYPE_CHECKING:  # rich takes a while to import, and --json does without it
    from rich.console import Console

Row = dict[str, Any]


def render(answer: dict[str, Any], width: int | None = None) -> str:
    """A table as text; coloured if it goes to a terminal.

    Args:
        answer: as `report.tables.table` makes it.
        width: columns (the terminal's own by default).
    """
    from rich.console import Console

    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        _head(console, answer["assumptions"])
        _DRAW[answer["table"]](console, answer["rows"])
        console.print()
        for note in answer["notes"]:
            console.print(f"[dim]{_plain(note)}[/]")
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _plain(text: object) -> str:
    from rich.markup import escape

    return escape(str(text))


def _head(console: "Console", assumed: Row) -> None:
    if not assumed:
        return
    if "recipe" in assumed:
        parts = ", ".join(f"{n:g} {name}" for name, n in assumed["bytes_per_parameter"].items())
        console.print(f"\n[bold]{assumed['recipe']}[/] · {_plain(assumed['source'])}")
        formulas = "; ".join(f"stage {s}: {text}" for s, text in assumed["formulas"].items())
        console.print(f"bytes a parameter: {parts}; {formulas}")
        return
    devices = f"{assumed['world']} ranks" if not assumed.get("gpus") else assumed["gpus"]
    parts = [f"{count(assumed['parameters'])} parameters", devices]
    if "seq_len" in assumed:
        parts += [f"{assumed['global_batch']} samples of {assumed['seq_len']} tokens a step"]
        parts += [assumed["dtype"], f"recompute {assumed['recompute']}"]
    if "degree" in assumed:
        parts.append(f"degree {assumed['degree']}")
    console.print(f"\n[bold]{_plain(assumed['model'])}[/] · {_plain(' · '.join(parts))}")


# ------------------------------------------------------------------------------------------
# Pieces


def _columns(
    console: "Console", heads: Iterable[tuple[str, str]], rows: Iterable[Iterable[str]]
) -> None:
    """A table with a head; a head is (text, "left" or "right"). No number is cut off: a table may
    be wider than the page."""
    from rich import box
    from rich.measure import Measurement
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, pad_edge=False)
    for text, justify in heads:
        table.add_column(text, justify=justify, no_wrap=True, header_style="dim")
    for row in rows:
        table.add_row(*row)
    room = console.options.update(max_width=1000)
    before = console.width
    console.width = max(before, Measurement.get(console, room, table).maximum)
    console.print()
    console.print(table)
    console.width = before


def _card(console: "Console", title: str, lines: Iterable[tuple[str, str]]) -> None:
    """A title and named lines below it."""
    from rich.table import Table

    console.print()
    console.print(title)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, text in lines:
        if text:
            table.add_row(f"  {name}", text)
    console.print(table)


def _bytes(n: float | None) -> str:
    return "-" if n is None else amount(n)


def _share(n: float | None) -> str:
    return "-" if n is None else f"{n:.1%}" if n else "0"


# ------------------------------------------------------------------------------------------
# Tables


def _comparison(console: "Console", rows: list[Row]) -> None:
    for row in rows:
        training, serving = (row["frameworks"][use] for use in ("training", "serving"))
        lines = [
            ("split", row["split"]),
            ("whole", row["whole"]),
            ("sends", _sends(row["collectives"]) if row["legal"] else f"illegal: {row['why']}"),
            ("saves", row["saves"]),
            ("limit", row["limit"]),
            ("training", ", ".join(training)),
            ("serving", ", ".join(serving)),
        ]
        used = "training and inference" if row["used"] == "both" else row["used"]
        flags = " ".join(f"{name}={value}" for name, value in row["layout"].items())
        title = f"[bold]{_plain(row['title'])}[/]  [dim]{used} · {flags}[/]"
        _card(console, title, ((name, _plain(text)) for name, text in lines))


def _sends(entries: list[Row]) -> str:
    """What is sent when: "all-gather over tp: forward 64 (critical), ..."."""
    if not entries:
        return "nothing"
    kinds: dict[tuple[str, str], list[str]] = {}
    for e in entries:
        when = f"{e['phase']} {e['count']} x ({amount(e['wire_bytes'])}, {e['path']})"
        kinds.setdefault((e["collective"], e["axis"]), []).append(when)
    return "; ".join(f"{c} over {axis}: {', '.join(when)}" for (c, axis), when in kinds.items())


def _cost(console: "Console", rows: list[Row]) -> None:
    legal = [row for row in rows if row["legal"]]
    keys = ("state_bytes", "activation_bytes", "peak_bytes", "sent_bytes")
    keys += ("critical_bytes", "partly_bytes", "hidden_bytes")
    models = list(dict.fromkeys(row["model"] for row in rows))
    most = max((row[k] for row in legal for k in keys if row["model"] == models[0]), default=0)
    # One unit for the whole table, so that its columns can be compared by eye.
    unit, size = next((u for u in _UNITS if most >= 10 * u[1]), _UNITS[-1])
    names = [*(key.removesuffix("_bytes") for key in keys), "B/param", "bubble", "even"]
    heads = [("strategy", "left"), *((name, "right") for name in names)]
    console.print(f"\n{unit} of a rank")
    _columns(
        console,
        heads,
        (
            (
                row["title"],
                *(_number(row[key] / size) for key in keys),
                f"{row['bytes_per_parameter']:.3g}",
                *(_share(row[key]["step_total"]) for key in ("bubble", "bubble_even")),
            )
            for row in legal
        ),
    )
    for other in models[1:]:
        titles = ", ".join(row["title"] for row in rows if row["model"] == other)
        console.print(f"{titles}: of {_plain(other)}, for {_plain(models[0])} has no experts")
    for row in rows:
        if not row["legal"]:
            console.print(f"[yellow]{_plain(row['title'])}[/]  {_plain(row['why'])}")


_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def _number(n: float) -> str:
    return f"{n:,.0f}" if n >= 100 else f"{n:.3g}" if n >= 0.01 else "0"


def _zero(console: "Console", rows: list[Row]) -> None:
    held = any(row["program_bytes"] is not None for row in rows)
    stages = list(dict.fromkeys(row["stage"] for row in rows))
    heads = [("model", "left"), ("dp", "right")]
    heads += [(f"{'DDP' if s == 0 else f'ZeRO-{s}'} GB", "right") for s in stages]
    heads += [(f"held {s}", "right") for s in stages] if held else []
    lines: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        lines.setdefault((row["model"], row["dp"]), []).append(row)
    _columns(
        console,
        heads,
        (
            (
                _plain(model),
                str(dp),
                *(_gb(row["bytes"]) for row in cells),
                *((_gb(row["program_bytes"]) for row in cells) if held else ()),
            )
            for (model, dp), cells in lines.items()
        ),
    )


def _gb(n: float) -> str:
    """Decimal gigabytes, four digits and more."""
    gb = n / 1e9
    return f"{gb:,.0f}" if gb >= 1000 else f"{gb:.4g}"


def _batch(console: "Console", rows: list[Row]) -> None:
    heads = [("micro", "right"), ("dp", "right"), ("accumulation", "right"), ("global", "right")]
    heads += [("tokens a step", "right"), ("bubble", "right"), ("peak of a rank", "right")]
    heads += [("", "left")]
    _columns(
        console,
        heads,
        (
            (
                *(str(row[key]) for key in ("micro", "dp", "accumulation", "global")),
                count(row["tokens_per_step"]),
                _share(row["bubble"]["step_total"]),
                _bytes(row["peak_bytes"]),
                _verdict(row),
            )
            for row in rows
        ),
    )
    for row in rows:
        if row["why"]:
            console.print(f"micro {row['micro']}: {_plain(row['why'])}")


def _verdict(row: Row) -> str:
    if not row["legal"]:
        return "[red]illegal[/]"
    return {True: "[green]fits[/]", False: "[red]does not fit[/]", None: ""}[row["fits"]]


def _examples(console: "Console", rows: list[Row]) -> None:
    for row in rows:
        layout = row["layout"]
        lines = [("model", _plain(f"{row['model']}, {count(row['parameters'])} parameters"))]
        degrees = ("tp", "cp", "pp", "ep", "etp", "dp_replicate", "dp_shard")
        shown = [f"{name} {layout[name]}" for name in degrees if layout.get(name, 1) > 1]
        if "zero" in layout:
            shown.append(f"ZeRO-{layout['zero']}")
        lines.append(("layout", f"{row['world']} ranks: {', '.join(shown)}"))
        if row["grids"]:
            for name, grid in row["grids"].items():
                sizes = " x ".join(f"{axis} {n}" for axis, n in grid.items())
                lines.append((f"{name} grid", sizes))
            b = row["batch"]
            product = f"{b['micro']} micro x {b['global'] // b['micro'] // b['accumulation']} dp"
            product += f" x {b['accumulation']} accumulation"
            text = f"{b['global']} samples = {product}, {count(b['tokens_per_step'])} tokens"
            lines.append(("batch", text))
        if row["legal"]:
            lines += [
                ("holds", _holds(row)),
                ("sends", _axes(row["sent_bytes"])),
                ("bubble", f"{_share(row['bubble']['step_total'])} of the step"),
            ]
        lines.append(("verdict", _verdict(row) or "[green]legal[/]"))
        marks = {"error": "red", "warning": "yellow", "note": "cyan"}
        for f in row["findings"]:
            lines.append((f["level"], f"[{marks[f['level']]}]{_plain(f['line'])}[/]"))
        lines.append(("note", _plain(row["note"])))
        _card(console, f"[bold]{row['example']}[/]  {_plain(row['source'])}", lines)


def _axes(sent: dict[str, int]) -> str:
    """What is sent over each axis, without the scalars that all ranks agree on."""
    axes = [f"{axis} {amount(n)}" for axis, n in sent.items() if axis != "world"]
    return ", ".join(axes) or "nothing"


def _holds(row: Row) -> str:
    text = f"{amount(row['peak_bytes'])} at most: {amount(row['state_bytes'])} of states, "
    text += f"{amount(row['activation_bytes'])} of activations"
    return text + (f"; a device has {amount(row['device_bytes'])}" if row["device_bytes"] else "")


def _vllm(console: "Console", rows: list[Row]) -> None:
    for row in rows:
        mark = "[green]yes[/]" if row["supported"] else "[red]no[/]"
        title = f"[bold]{_plain(row['strategy'])}[/]  {mark}"
        more = row["support"].removeprefix("yes").removeprefix("no").lstrip(",;: ")
        lines = [
            ("flag", _plain(row["flag"])),
            ("when", _plain(more)),
            ("shards", _plain(row["shards"])),
            ("copies", _plain(row["copies"])),
        ]
        if row["weight_bytes"] is not None:
            cache = f"{amount(row['cache_bytes_per_token'])} of cache a token"
            cache += f", on {row['cache_copies']:g} ranks" if row["cache_copies"] > 1 else ""
            lines.append(("a rank", f"{amount(row['weight_bytes'])} of weights, {cache}"))
        if row["why"]:
            lines.append(("a rank", f"[yellow]{_plain(row['why'])}[/]"))
        _card(console, title, lines)


_DRAW: dict[str, Callable[["Console", list[Row]], None]] = {
    "comparison": _comparison,
    "cost": _cost,
    "zero": _zero,
    "batch": _batch,
    "examples": _examples,
    "vllm": _vllm,
}
