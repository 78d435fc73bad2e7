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
        if report["bubble"]["step_total"] is not None and report["layout"]["pp"] > 1:
            _pipeline(console, report)
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
    if context := report["context"]:
        even = f"the rank with most attention has {context['imbalance']:.3f} of the mean"
        _line(console, "samples", f"in {context['pieces']} pieces", even)
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
    for axis in ("cp", "pp", "ep", "etp", "dcp"):
        if layout[axis] > 1:
            how = f" with {layout['schedule']}" if axis == "pp" else ""
            how = _context(layout) if axis == "cp" else how
            yield f"[bold]{axis} {layout[axis]}[/]{how}"
    replicate, shard = layout["dp_replicate"], layout["dp_shard"]
    if replicate > 1 and shard > 1:
        yield f"[bold]dp {replicate} x {shard}[/] (replicas x shards)"
    else:
        yield f"[bold]dp {replicate * shard}[/]"
    yield f"[bold]ZeRO-{layout['zero']}[/]"
    yield f"micro batch {layout['micro_batch']}"
    yield f"recompute {layout['recompute']}"


def _context(layout: dict[str, Any]) -> str:
    """How context parallelism is done."""
    ulysses, rest = layout["ulysses"], layout["cp"] // layout["ulysses"]
    ways = [f"ulysses {ulysses}"] * (ulysses > 1) + [f"{layout['cp_method']} {rest}"] * (rest > 1)
    return f" ({' x '.join(ways)})"


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
# Pipeline


def _pipeline(console: "Console", report: dict[str, Any]) -> None:
    """The schedule, the layers of its chunks, and how long ranks idle."""
    layout, bubble = report["layout"], report["bubble"]
    chunks = f"{layout['pp']} stages x {layout['vpp']} chunk{'s' * (layout['vpp'] > 1)}"
    _heading(console, "Pipeline", f"{layout['schedule']} · {chunks}")
    parts = [str(n) if i == 0 else f"{n} x {i + 1}" for n, i in _repeats(layout["stages"])]
    console.print(f"  layers of each chunk  {', '.join(parts)}")
    console.print(
        f"  a rank idles  {bubble['step_total']:.1%} of the step ({bubble['step_ideal']:.1%} of "
        f"ideal), {bubble['span_total']:.1%} of its own span [dim](simulated: times by "
        "operations, messages free)[/]",
    )


def _repeats(values: Iterable[int]) -> list[tuple[int, int]]:
    """Runs of equal numbers: (number, how often it is repeated after the first)."""
    runs: list[tuple[int, int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1] = (value, runs[-1][1] + 1)
        else:
            runs.append((value, 0))
    return runs


def _span(stages: Iterable[int]) -> str:
    """0, 1, 2, 5 as "0-2, 5"."""
    spans: list[list[int]] = []
    for stage in sorted(stages):
        if spans and spans[-1][1] == stage - 1:
            spans[-1][1] = stage
        else:
            spans.append([stage, stage])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


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
    where = f"fullest in {fullest['moment']}"
    if len({row["stage"] for row in rows}) > 1:
        where += f" on stage {fullest['stage']}; each stage at its fullest"
        rows, heads = _fullest_of_stages(rows)
        fullest = max(rows, key=lambda row: row["total"])
    else:
        heads = [(row["moment"],) for row in rows]
    _heading(console, "Memory of a rank", where)
    _bar(console, used, memory["device_bytes"])
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for _ in rows:
        table.add_column(justify="right", no_wrap=True)
    for line in zip(*heads, strict=True):
        table.add_row("", *(f"[dim]{head}[/]" for head in line))
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


#: Stages whose memory stands side by side; of more, those that hold most.
_SIDE_BY_SIDE = 6


def _fullest_of_stages(
    rows: list[dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """A column for each stage at its fullest, stages that hold the same as one, and its head."""
    alike: dict[tuple, list[dict[str, Any]]] = {}
    for stage in dict.fromkeys(row["stage"] for row in rows):
        peak = max((r for r in rows if r["stage"] == stage), key=lambda row: row["total"])
        key = tuple(amount(peak[name]) for name in (*MEMORY_CLASSES, "total"))
        alike.setdefault((peak["moment"], *key), []).append(peak)
    groups = sorted(alike.values(), key=lambda g: -g[0]["total"])[:_SIDE_BY_SIDE]
    groups.sort(key=lambda g: g[0]["stage"])
    heads = [(f"stage {_span(p['stage'] for p in g)}", g[0]["moment"]) for g in groups]
    return [g[0] for g in groups], heads


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
    sent: dict[int, int] = {}
    for row in rows:
        sent[row["stage"]] = sent.get(row["stage"], 0) + row["wire_bytes"]
    stages = len(sent) > 1
    most = max(sent, key=lambda stage: sent[stage])
    where = f" by stage {most}, which sends most" if stages else ""
    _heading(console, "Traffic of a rank and step", f"{amount(sent[most])} on the wire{where}")
    wide = console.width >= 100
    clustered = report.get("cluster") is not None
    names = ["  axis", "collective", "phase", *(["dtype"] if wide else [])]
    names += ["stages"] if stages else []
    numbers = ["count", "bytes", "on the wire", *(["links"] if clustered else [])]
    table = Table.grid(padding=(0, 2))
    for _ in names:
        table.add_column(no_wrap=True)
    for number in numbers:
        table.add_column(justify="left" if number == "links" else "right", no_wrap=True)
    table.add_row(*(f"[dim]{name}[/]" for name in names + numbers))
    before: list[str] = []
    for row, where in _alike(rows):
        said = [row["axis"], row["collective"], row["phase"], *([row["dtype"]] if wide else [])]
        # What the row above says already is not said again.
        same = next((i for i, x in enumerate(said) if before[i : i + 1] != [x]), len(said))
        before = said
        cells = [f"  [bold]{'' if same else said[0]}[/]"]
        if stages:
            cells += [*("" if i < same else x for i, x in enumerate(said)), _span(where)][1:]
        else:
            cells += said[1:]
        cells += [f"{row['count']:,}", amount(row["bytes"]), amount(row["wire_bytes"])]
        if clustered:
            cells.append("[yellow]slow[/]" if row["inter_node"] else "[green]fast[/]")
        table.add_row(*cells)
    console.print(table)


def _alike(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], list[int]]]:
    """Rows that say the same of several stages as one: (the first of them, their stages)."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(v for k, v in row.items() if k != "stage"), []).append(row)
    ordered = sorted(
        groups.values(),
        key=lambda g: (*(g[0][k] for k in ("axis", "collective", "phase", "dtype")), g[0]["stage"]),
    )
    return [(g[0], [row["stage"] for row in g]) for g in ordered]


def _measured(console: "Console", report: dict[str, Any]) -> None:
    """What the program did beside what was predicted."""
    from rich.table import Table

    stages = report["layout"]["pp"]
    whose = "rank 0" if stages == 1 else "a rank of each stage"
    _heading(console, "Measured", f"the program of {whose}, run dry")
    measured = report["measured"]["memory"]
    places = {(row["stage"], row["moment"]): row for row in report["memory"]["by_stage"] or ()}
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for _ in range(3):
        table.add_column(justify="right", no_wrap=True)
    pipelined = len({row["stage"] for row in measured}) > 1
    if pipelined:
        measured = [
            max((r for r in measured if r["stage"] == stage), key=lambda row: row["total"])
            for stage in dict.fromkeys(row["stage"] for row in measured)
        ]
    heads = ("  stage" if pipelined else "  memory in", "predicted", "measured", "off by")
    table.add_row(*(f"[dim]{head}[/]" for head in heads))
    for row in measured:
        said = places.get((row["stage"], row["moment"]))
        if said is None:
            continue
        off = said["total"] / row["total"] - 1 if row["total"] else 0.0
        name = f"  {row['stage']}: {row['moment']}" if pipelined else f"  {row['moment']}"
        cells = (name, amount(said["total"]), amount(row["total"]), f"{off:+.2%}")
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
