"""What a serving layout holds and sends, in text."""

from typing import TYPE_CHECKING, Any

from plait.report.facts import members
from plait.report.numbers import amount, spans
from plait.report.text.lines import heading

if TYPE_CHECKING:
    from rich.console import Console

_ROLES = (
    ("attn_tp", "attention over tp"),
    ("attn_dp", "attention data parallel"),
    ("stages", "stages"),
    ("moe_ep", "experts over"),
    ("moe_tp", "each expert over"),
    ("kv_cp", "a request's cache over"),
    ("q_cp", "a prompt over"),
    ("replicas", "replicas"),
)


def serving(console: "Console", report: dict[str, Any]) -> None:
    """The roles of the ranks, what they hold, what limits count, what a layer sends."""
    served = report["serving"]
    heading(console, "Serving", f"{served['name']}, {served['model']}")
    roles = [f"{words} {served['roles'][r]}" for r, words in _ROLES if served["roles"][r] > 1]
    order = " < ".join(served["order"])
    console.print(f"  {' · '.join(roles) or 'one rank'}  [dim]ranks: {order}[/]", soft_wrap=True)
    if served["by_stage"]:
        _held(console, served)
        _cache(console, served)
    _limits(console, served)
    if served["collectives"]:
        _sent(console, report)


#: A message of both phases says neither.
_IN = {"prefill and decode": ""}


def _grid(console: "Console", rows: list[tuple[str, ...]], words: int) -> None:
    """A table, the first `words` columns to the left."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for i in range(len(rows[0])):
        left = i < words
        table.add_column(justify="left" if left else "right", no_wrap=not left or i == 0)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _held(console: "Console", served: dict[str, Any]) -> None:
    """What a rank of each stage holds; stages that hold the same in one row."""
    known = served["tokens"] is not None
    heading(console, "A rank holds", f"weights {served['weights']}, cache {served['kv_dtype']}")
    heads = ["  stage", "layers", "weights", "cache a token", "a step needs"]
    heads += ["left for cache", "tokens"] if known else []
    alike: dict[tuple[str, ...], list[int]] = {}
    for row in served["by_stage"]:
        cells = [str(row["layers"]), amount(row["weight_bytes"])]
        cells += [_bytes(row["kv_bytes_per_token"]), amount(row["working_bytes"])]
        cells += [amount(row["cache_bytes"]), f"{row['tokens']:,}"] if known else []
        alike.setdefault(tuple(cells), []).append(row["stage"])
    rows = [tuple(f"[dim]{head}[/]" for head in heads)]
    rows += [(f"  {spans(stages)}", *cells) for cells, stages in alike.items()]
    _grid(console, rows, 1)


def _bytes(n: float) -> str:
    return f"{n:,.0f} B" if n == int(n) else f"{n:,.1f} B"


def _cache(console: "Console", served: dict[str, Any]) -> None:
    copies = served["kv_copies"]
    kept = "once" if copies == 1 else f"{copies:g} times"
    heads = served["kv_heads"]
    console.print(
        f"  {heads} KV head{'s' * (heads != 1)} a rank · a request's cache is kept {kept} · "
        f"blocks of {served['block_tokens']} tokens · {amount(served['request_bytes'])} for "
        f"{served['max_len']:,} tokens"
    )
    if served["tokens"] is not None:
        where = (
            f" (stage {served['limiting_stage']} decides)" if len(served["by_stage"]) > 1 else ""
        )
        console.print(
            f"  [bold]{served['tokens']:,}[/] tokens fit{where}, {served['tokens_in_all']:,} in all"
            f" · {served['max_concurrency']:.2f} requests of {served['max_len']:,} at once"
        )


def _limits(console: "Console", served: dict[str, Any]) -> None:
    heading(console, "Limits")
    rows = [("", *(f"[dim]{head}[/]" for head in ("", "counts", "in all")))]
    rows += [
        (
            f"  {limit['option']}",
            "by default" if limit["value"] is None else f"{limit['value']:,}",
            limit["counts"],
            f"{limit['in_all']:,}" if limit["in_all"] else "",
        )
        for limit in served["limits"]
    ]
    _grid(console, rows, 3)


def _sent(console: "Console", report: dict[str, Any]) -> None:
    served = report["serving"]
    heading(console, "Collectives of a layer", "bytes of one token; of logits, of one request")
    clustered = report["cluster"] is not None
    heads = ["  layer", "what", "collective", "over", "ranks", "in", "bytes"]
    rows = [tuple(f"[dim]{head}[/]" for head in [*heads, *(["links"] if clustered else [])])]
    before = None
    for c in served["collectives"]:
        layer = "" if c["layer"] == before else c["layer"]
        before = c["layer"]
        ranks = c["ranks"]
        step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        even = ranks == list(range(ranks[0], ranks[-1] + 1, step))
        group = members(range(ranks[0], ranks[-1] + 1, step)) if even else spans(ranks)
        cells = [
            f"  [bold]{layer}[/]",
            c["where"],
            c["collective"],
            c["group"],
            group,
            _IN.get(c["phase"], c["phase"]),
        ]
        cells.append(_bytes(c["bytes_per_token"]))
        if clustered:
            cells.append("[yellow]slow[/]" if c["inter_node"] else "[green]fast[/]")
        rows.append(tuple(cells))
    _grid(console, rows, 6)


def verdict(console: "Console", report: dict[str, Any]) -> None:
    """Whether weights and one longest request fit."""
    served, held = report["serving"], report["memory"]
    if held["device_bytes"] is None:
        console.print(
            f"[bold]{amount(served['weight_bytes'])}[/] of weights a rank, "
            f"{_bytes(served['kv_bytes_per_token'])} of cache a token. "
            "Name a device (--gpus GPU:COUNT) to know what fits."
        )
        return
    least = served["by_stage"][served["limiting_stage"]]
    words = (
        f"{amount(least['weight_bytes'])} of weights on a rank of {amount(held['device_bytes'])}; "
    )
    if held["margin_bytes"] >= 0:
        console.print(
            f"[bold green]Fits.[/] {words}the cache holds {served['tokens']:,} tokens, "
            f"{served['max_concurrency']:.1f} requests of {served['max_len']:,}."
        )
    else:
        console.print(
            f"[bold red]Does not fit.[/] {words}the cache has room for {served['tokens']:,} tokens,"
            f" and one request may have {served['max_len']:,}."
        )
