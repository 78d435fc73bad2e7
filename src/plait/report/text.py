"""The answer about one layout, for people: a page of text out of the REPORT of `build.py`."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from plait.cost.ledger import MEMORY_CLASSES
from plait.spec.grid import Grid

if TYPE_CHECKING:  # rich takes a while to import, and --json does without it
    from rich.console import Console

#: What memory is used for -> (mark in the bar, colour).
MARKS = {
    "parameters": ("█", "blue"),
    "gradients": ("▓", "cyan"),
    "optimizer": ("▒", "magenta"),
    "activations": ("#", "green"),
    "logits": ("=", "yellow"),
    "gathered": ("+", "bright_blue"),
    "buffers": ("~", "bright_cyan"),
    "allocator": (":", "bright_black"),
    "context": ("%", "bright_black"),
}
LEVELS = {"error": ("✗", "bold red"), "warning": ("!", "yellow"), "note": ("·", "cyan")}
#: Worlds up to so many ranks are drawn rank by rank.
DRAWN = 64


def render(report: dict[str, Any], width: int | None = None) -> str:
    """The report as text; coloured if it goes to a terminal.

    Args:
        report: a REPORT, also one of a dry run.
        width: columns (the terminal's own by default).
    """
    from rich.console import Console

    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        _question(console, report)
        _ranks(console, report)
        if report["memory"]["by_stage"]:
            _memory(console, report)
        if report["traffic"] is not None:
            _traffic(console, report)
        if "measured" in report:
            _measured(console, report)
        _findings(console, report["findings"])
        _verdict(console, report)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


# ------------------------------------------------------------------------------------------
# Numbers


def amount(n: float) -> str:
    """Bytes with a binary unit, three digits: "61.2 GiB"."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(n) >= size:
            value = n / size
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{n:.0f} B" if n else "0"


def count(n: float) -> str:
    """A large count with a decimal unit: "70.6 B"."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:,}"


# ------------------------------------------------------------------------------------------
# The question


def _question(console: "Console", report: dict[str, Any]) -> None:
    from rich.markup import escape

    model, layout, batch = report["model"], report["layout"], report["batch"]
    cluster = report.get("cluster")
    active = model["active_parameters"]
    parts = [f"{count(model['parameters'])} parameters"]
    if active != model["parameters"]:
        parts.append(f"{count(active)} active")
    parts += [f"{model['layers']} layers", f"hidden {model['hidden']}"]
    heads = f"{model['heads']} heads"
    parts.append(
        heads if model["kv_heads"] == model["heads"] else f"{heads}, {model['kv_heads']} KV"
    )
    parts.append(f"vocabulary {model['vocab']}")
    console.print()
    _line(console, "model", f"[bold]{escape(model['name'])}[/]", *parts)
    if cluster:
        domain = f"fast links among {cluster['fast_domain']}"
        size = f"{cluster['memory'] / 1e9:.0f} GB each"
        devices = f"[bold]{report['world']} x {escape(cluster['device'])}[/]"
        _line(console, "devices", devices, size, domain)
    else:
        _line(console, "devices", f"[bold]{report['world']} ranks[/], of no device in particular")
    _line(console, "layout", *_layout(layout))
    product = f"{batch['micro']} micro x {_dp(layout)} dp x {batch['accumulation']} accumulation"
    _line(
        console,
        "batch",
        f"{batch['global']} samples = {product}",
        f"{batch['seq_len']} tokens each",
        f"{count(batch['tokens_per_step'])} tokens a step",
        f"{batch['dtype']}, gradients {batch['grad_dtype']}",
    )


def _line(console: "Console", name: str, *parts: str) -> None:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(width=8, style="dim", no_wrap=True)
    table.add_column()
    # A part is not broken where it can be avoided.
    table.add_row(name, " · ".join(part.replace(" ", "\u00a0") for part in parts))
    console.print(table)


def _dp(layout: dict[str, Any]) -> int:
    return layout["dp_replicate"] * layout["dp_shard"]


def _layout(layout: dict[str, Any]) -> Iterable[str]:
    """The degrees above 1, and the choices."""
    if layout["tp"] > 1:
        how = " with sequence parallelism" if layout["sequence_parallel"] else ""
        yield f"[bold]tp {layout['tp']}[/]{how}"
    for axis in ("cp", "pp", "vpp", "ep", "etp", "dcp"):
        if layout[axis] > 1:
            yield f"[bold]{axis} {layout[axis]}[/]"
    replicate, shard = layout["dp_replicate"], layout["dp_shard"]
    if replicate > 1 and shard > 1:
        yield f"[bold]dp {replicate} x {shard}[/] (replicas x shards)"
    else:
        yield f"[bold]dp {replicate * shard}[/]"
    yield f"[bold]ZeRO-{layout['zero']}[/]"
    yield f"micro batch {layout['micro_batch']}"
    yield f"recompute {layout['recompute']}"


# ------------------------------------------------------------------------------------------
# Ranks


def _heading(console: "Console", title: str, more: str = "") -> None:
    console.print()
    console.print(f"[bold]{title}[/]" + (f"  [dim]{more}[/]" if more else ""))


def _ranks(console: "Console", report: dict[str, Any]) -> None:
    """Small worlds rank by rank, a row for each group of the fastest axis; large ones by axis."""
    from rich.table import Table

    sizes = report["grids"]["dense"]
    grid = Grid(tuple(sizes), tuple(sizes.values()))
    axes = [axis for axis in grid.axes if grid.size(axis) > 1]
    if not axes:
        return
    fastest, others = axes[0], axes[1:]
    if grid.world <= DRAWN and grid.size(fastest) <= 8 and grid.world / grid.size(fastest) <= 16:
        _heading(console, "Ranks")
        table = Table.grid(padding=(0, 2))
        for _ in others or ["rank"]:
            table.add_column(style="dim", no_wrap=True)
        for _ in range(grid.size(fastest)):
            table.add_column(justify="right")
        # A long name stands once, before its numbers.
        each, once = (f"{fastest} ", "") if len(fastest) <= 4 else ("", fastest)
        names = [f"[dim]{each}{i}[/]" for i in range(grid.size(fastest))]
        table.add_row(f"  {once}", *[""] * (len(others) - 1), *names)
        for group in grid.groups(fastest):
            here = grid.coordinate(group[0])
            places = [f"{axis} {here[axis]}" for axis in reversed(others)] or ["rank"]
            places[0] = f"  {places[0]}"
            table.add_row(*places, *map(str, group))
        console.print(table)
        return
    _heading(console, "Ranks", "fastest axis first")
    table = Table.grid(padding=(0, 2))
    for axis in axes:
        group = grid.group(0, axis)
        if grid.stride(axis) == 1:
            shown = f"0-{group[-1]}"
        else:
            first, last = ", ".join(map(str, group[:3])), group[-1]
            shown = first if len(group) <= 3 else f"{first}, ... {last}"
        size, stride = grid.size(axis), grid.stride(axis)
        table.add_row(f"  [bold]{axis}[/]", str(size), f"ranks {shown}", f"[dim]stride {stride}[/]")
    console.print(table)


# ------------------------------------------------------------------------------------------
# Memory


def _memory(console: "Console", report: dict[str, Any]) -> None:
    from rich.table import Table

    memory = report["memory"]
    rows = memory["by_stage"]
    fullest = max(rows, key=lambda row: row["total"])
    with_device = memory["device_bytes"] is not None
    used = {name: fullest[name] for name in MEMORY_CLASSES}
    if with_device:
        used |= {"allocator": memory["reserved_bytes"], "context": memory["context_bytes"]}
    _heading(console, "Memory of a rank", f"fullest in {fullest['moment']}")
    _bar(console, used, memory["device_bytes"])
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for _ in rows:
        table.add_column(justify="right", no_wrap=True)
    stages = len({row["stage"] for row in rows}) > 1
    heads = [f"{row['stage']}: {row['moment']}" if stages else row["moment"] for row in rows]
    table.add_row("", *(f"[dim]{head}[/]" for head in heads))
    for name in MEMORY_CLASSES:
        if any(row[name] for row in rows):
            mark, colour = MARKS[name]
            table.add_row(
                f"  [{colour}]{mark}[/] {name}",
                *(f"[{'bold' if row is fullest else 'dim'}]{amount(row[name])}[/]" for row in rows),
            )
    totals = (f"[{'bold' if row is fullest else 'dim'}]{amount(row['total'])}[/]" for row in rows)
    table.add_row("    total", *totals)
    console.print(table)
    if with_device:
        extra = (
            ("allocator", "reserve of the allocator", memory["reserved_bytes"]),
            ("context", "CUDA context, communicators", memory["context_bytes"]),
        )
        for name, words, size in extra:
            mark, colour = MARKS[name]
            console.print(f"  [{colour}]{mark}[/] {words}  {amount(size)} [dim](estimate)[/]")


def _bar(console: "Console", used: dict[str, int], device: int | None) -> None:
    """Parts of memory to scale, against the device where there is one."""
    columns = min(console.width, 120) - 4
    total = sum(used.values())
    scale = max(total, device or 0) or 1
    bar, at, drawn = "", 0, 0
    for name, size in used.items():
        at += size
        cells = round(at / scale * columns) - drawn
        drawn += cells
        mark, colour = MARKS[name]
        bar += f"[{colour}]{mark * cells}[/]"
    if device is None or device >= total:
        console.print(f"  {bar}[dim]{'·' * (columns - drawn)}[/]", no_wrap=True)
        return
    console.print(f"  {bar}", no_wrap=True)
    end = max(round(device / scale * columns), 1)
    words = "the device ends here"
    line = f"{words:>{end - 2}} ^" if end > len(words) + 2 else f"{'^':>{end}} {words}"
    console.print(f"  [bold red]{line}[/]", no_wrap=True)


# ------------------------------------------------------------------------------------------
# Traffic


def _traffic(console: "Console", report: dict[str, Any]) -> None:
    from rich.table import Table

    rows = report["traffic"]
    if not rows:
        _heading(console, "Traffic", "none: a rank by itself")
        return
    total = sum(row["wire_bytes"] for row in rows)
    _heading(console, "Traffic of a rank and step", f"{amount(total)} on the wire")
    wide = console.width >= 100
    stages = len({row["stage"] for row in rows}) > 1
    clustered = report.get("cluster") is not None
    names = ["  axis", "collective", "phase", *(["dtype"] if wide else [])]
    numbers = ["count", "bytes", "on the wire", *(["links"] if clustered else [])]
    table = Table.grid(padding=(0, 2))
    for _ in names:
        table.add_column(no_wrap=True)
    for number in numbers:
        table.add_column(justify="left" if number == "links" else "right", no_wrap=True)
    table.add_row(*(f"[dim]{name}[/]" for name in names + numbers))
    before = None
    for row in rows:
        axis = f"{row['stage']}: {row['axis']}" if stages else row["axis"]
        cells = [f"  [bold]{axis if axis != before else ''}[/]", row["collective"], row["phase"]]
        before = axis
        cells += [row["dtype"]] if wide else []
        cells += [f"{row['count']:,}", amount(row["bytes"]), amount(row["wire_bytes"])]
        if clustered:
            cells.append("[yellow]slow[/]" if row["inter_node"] else "[green]fast[/]")
        table.add_row(*cells)
    console.print(table)


def _measured(console: "Console", report: dict[str, Any]) -> None:
    """What the program did beside what was predicted."""
    from rich.table import Table

    _heading(console, "Measured", "the program of rank 0, run dry")
    measured = report["measured"]["memory"]
    places = {(row["stage"], row["moment"]): row for row in report["memory"]["by_stage"] or ()}
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for _ in range(3):
        table.add_column(justify="right", no_wrap=True)
    heads = ("  memory in", "predicted", "measured", "off by")
    table.add_row(*(f"[dim]{head}[/]" for head in heads))
    for row in measured:
        said = places.get((row["stage"], row["moment"]))
        if said is None:
            continue
        off = said["total"] / row["total"] - 1 if row["total"] else 0.0
        cells = (f"  {row['moment']}", amount(said["total"]), amount(row["total"]), f"{off:+.2%}")
        table.add_row(*cells)
    console.print(table)
    if report["agree"]:
        entries, sent = len(report["measured"]["traffic"]), report["measured"]["traffic"]
        messages = sum(row["count"] for row in sent)
        words = f"{entries} entries, {messages:,} messages, every byte as predicted"
        console.print(f"  [green]traffic agrees[/]: {words}" if sent else "  nothing sent, as said")
    for difference in report["differences"]:
        console.print(f"  [bold red]differs[/] {difference}")


# ------------------------------------------------------------------------------------------
# Findings and verdict


def _findings(console: "Console", findings: list[dict[str, Any]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    if not findings:
        return
    _heading(console, "Findings")
    table = Table.grid(padding=(0, 1))
    table.add_column(width=3)
    table.add_column()
    for finding in findings:
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


def _verdict(console: "Console", report: dict[str, Any]) -> None:
    memory = report["memory"]
    console.print()
    if any(finding["level"] == "error" for finding in report["findings"]):
        console.print("[bold red]Illegal.[/] What is wrong is said above.")
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
    elif report["fits"]:
        spare = memory["margin_bytes"]
        console.print(
            f"[bold green]Fits.[/] {amount(used)} of {amount(device)}, {amount(spare)} "
            f"({spare / device:.0%}) to spare; {what}."
        )
    else:
        console.print(
            f"[bold red]Does not fit.[/] {amount(used)} where there are {amount(device)}, "
            f"{amount(used - device)} ({used / device - 1:.0%}) too much; {what}."
        )
