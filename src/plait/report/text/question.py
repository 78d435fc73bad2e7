"""What was asked, in text: model, devices, layout, batch."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from plait.report.numbers import count

if TYPE_CHECKING:
    from rich.console import Console


def question(console: "Console", report: dict[str, Any]) -> None:
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
    if report["serving"]:
        _line(console, "layout", *_degrees(layout))
        _line(console, "served", f"requests of up to {batch['seq_len']:,} tokens", batch["dtype"])
        return
    _line(console, "layout", *_layout(layout))
    if context := report["context"]:
        even = f"the rank with most attention has {context['imbalance']:.3f} of the mean"
        _line(console, "samples", f"in {context['pieces']} pieces", even)
    product = f"{batch['micro']} micro x {_dp(layout)} dp x {batch['accumulation']} accumulation"
    whole = report["grids"]["dense"] is not None
    _line(
        console,
        "batch",
        f"{batch['global']} samples" + (f" = {product}" if whole else ""),
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


def _dp(layout: dict[str, Any]) -> int | None:
    """None where it cannot be derived of an illegal layout."""
    return None if layout["dp_shard"] is None else layout["dp_replicate"] * layout["dp_shard"]


def _degrees(layout: dict[str, Any]) -> list[str]:
    """The degrees above 1 of a layout that serves."""
    axes = ("tp", "cp", "pp", "ep", "etp", "dcp", "dp_shard", "dp_replicate")
    said = [f"[bold]{a} {layout[a]}[/]" for a in axes if layout[a] is not None and layout[a] > 1]
    return said or ["one rank"]


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
    if _dp(layout) is None:
        yield "[bold]dp ?[/]"
    elif replicate > 1 and shard > 1:
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
