"""What a serving layout holds and sends: a bar for each stage, limits, and the collectives of a
layer."""

from collections.abc import Iterable
from typing import Any

from plait.report.html.element import Markup, element
from plait.report.html.traffic import links
from plait.report.numbers import amount, spans

_ROLES = {
    "attn_tp": "attention over tp",
    "attn_dp": "attention data parallel",
    "stages": "stages",
    "moe_ep": "experts over",
    "moe_tp": "each expert over",
    "kv_cp": "a request's cache over",
    "q_cp": "a prompt over",
    "replicas": "replicas",
}


def serving(report: dict[str, Any]) -> Markup:
    served = report["serving"]
    roles = [f"{words} {served['roles'][r]}" for r, words in _ROLES.items()
             if served["roles"][r] > 1]  # fmt: skip
    order = ", ".join(served["order"])
    known = served["by_stage"] is not None
    return element(
        "section",
        element("h2", "Serving"),
        element("p", f"{served['name']} with {served['model']}: {', '.join(roles) or 'one rank'}."),
        element("p", f"Ranks from the fastest axis: {order}.", class_="aside"),
        *(_held(report) if known else ()),
        element("h3", "Limits"),
        _limits(served),
        *(_sent(report) if known else ()),
        class_="serving",
        aria_label="Serving",
    )


def _held(report: dict[str, Any]) -> Iterable[Markup]:
    """What a rank of each stage holds, to the scale of the device where there is one."""
    served, device = report["serving"], report["memory"]["device_bytes"]
    rows = served["by_stage"]
    parts = [
        {
            "parameters": row["weight_bytes"],
            "activations": row["working_bytes"],
            "gathered": max(0, row["cache_bytes"] or row["request_bytes"]),
        }
        for row in rows
    ]
    scale = max(device or 0, *(sum(part.values()) for part in parts)) or 1
    cache = "cache" if device else "cache of one longest request"
    words = {"parameters": "weights", "activations": "a step (estimate)", "gathered": cache}
    yield element("h3", "A rank holds")
    keys = (
        element("li", element("i", class_=f"m-{name}", aria_hidden="true"), text)
        for name, text in words.items()
    )
    yield element("ul", *keys, class_="legend")
    yield element(
        "div",
        *(_bar(row, part, words, scale) for row, part in zip(rows, parts, strict=True)),
        class_="bars",
    )
    copies = f"{served['kv_copies']:g} time{'s' * (served['kv_copies'] != 1)}"
    fit = ""
    if served["tokens"] is not None:
        fit = f" {served['tokens']:,} tokens fit, {served['tokens_in_all']:,} in all."
    yield element(
        "p",
        f"Weights {served['weights']}, cache {served['kv_dtype']}; {served['kv_heads']} KV heads a "
        f"rank; a request's cache is kept {copies}, in blocks of {served['block_tokens']} tokens."
        + fit,
    )
    heads = ["stage", "layers", "weights", "cache a token", "a step", "left for cache", "tokens"]
    body = [
        [
            row["stage"],
            row["layers"],
            amount(row["weight_bytes"]),
            f"{row['kv_bytes_per_token']:,} B",
            amount(row["working_bytes"]),
            "" if row["cache_bytes"] is None else amount(row["cache_bytes"]),
            "" if row["tokens"] is None else f"{row['tokens']:,}",
        ]
        for row in rows
    ]
    yield element("details", element("summary", "in numbers"), _table(heads, body, "a rank"))


def _bar(row: dict[str, Any], parts: dict[str, int], words: dict[str, str], scale: int) -> Markup:
    said = ", ".join(f"{words[name]} {amount(size)}" for name, size in parts.items())
    segments = (
        element(
            "i",
            class_=f"m-{name}",
            style=f"width:{size / scale:.3%}",
            title=f"{words[name]} {amount(size)}",
        )
        for name, size in parts.items()
    )
    bar = element("div", *segments, class_="bar", role="img", aria_label=said)
    size = element("span", amount(sum(parts.values())))
    return element("div", element("span", f"stage {row['stage']}"), bar, size, class_="measure")


def _limits(served: dict[str, Any]) -> Markup:
    rows = [
        [
            limit["option"],
            "by default" if limit["value"] is None else f"{limit['value']:,}",
            limit["counts"],
            "" if limit["in_all"] is None else f"{limit['in_all']:,}",
        ]
        for limit in served["limits"]
    ]
    return _table(["option", "value", "counts", "in all"], rows, "limits")


def _sent(report: dict[str, Any]) -> Iterable[Markup]:
    clustered = report["cluster"] is not None
    heads = ["layer", "what", "collective", "over", "ranks", "in", "bytes a token"]
    rows = []
    for c in report["serving"]["collectives"]:
        ranks = c["ranks"]
        group = spans(ranks) if len(ranks) <= 64 else f"{spans(ranks[:8])} ..."
        row: list[Any] = [c["layer"], c["where"], c["collective"], c["group"], group, c["phase"]]
        row.append(f"{c['bytes_per_token']:,}")
        rows.append([*row, links(c["inter_node"])] if clustered else row)
    yield element("h3", "Collectives of a layer")
    if not rows:
        yield element("p", "None: a rank by itself.")
        return
    yield _table([*heads, *(["links"] if clustered else [])], rows, "collectives of a layer")


def _table(heads: list[str], rows: list[list[Any]], what: str) -> Markup:
    head = element("tr", *(element("th", name, scope="col") for name in heads))
    body = (
        element(
            "tr",
            element("th", row[0], scope="row"),
            *(element("td", c, class_="word" if _is_words(c) else None) for c in row[1:]),
        )
        for row in rows
    )
    table = element("table", element("thead", head), element("tbody", *body), class_="numbers")
    return element("div", table, class_="scroll", tabindex=0, role="group", aria_label=what)


def _is_words(cell: Any) -> bool:
    """Words stand to the left, numbers to the right."""
    return str(cell)[:1].isalpha()
