"""The answer in short: whether it fits, the numbers that matter, findings, what a dry run saw."""

from typing import Any

from plait.report.facts import busiest_stage, by_axis
from plait.report.html.element import Markup, element, join
from plait.report.numbers import amount, count

_LEVELS = {"error": "✗", "warning": "!", "note": "i"}


def verdict(report: dict[str, Any]) -> Markup:
    """One sentence, and below it the numbers."""
    held, cluster = report["memory"], report["cluster"]
    if report["serving"] and held["by_stage"]:
        return _served(report)
    if report["traffic"] is None:
        words = element("strong", "Illegal."), " What is wrong is said below."
        return element("section", element("p", *words), class_="verdict bad", aria_label="Answer")
    used = held["peak_bytes"] + held["reserved_bytes"] + held["context_bytes"]
    if cluster is None:
        kind, words = "", (element("strong", amount(held["peak_bytes"])), " on the fullest rank.")
    else:
        device, spare = held["device_bytes"], held["margin_bytes"]
        kind, word = ("good", "Fits.") if spare >= 0 else ("bad", "Does not fit.")
        more = "to spare" if spare >= 0 else "too much"
        share = f"{abs(spare) / device:.0%}"
        rest = f" {amount(used)} of {amount(device)}: {amount(abs(spare))} ({share}) {more}."
        words = element("strong", word), rest
    kind, words = _refused(report, kind, words)
    return element(
        "section",
        element("p", *words),
        element("ul", *(_tile(*tile) for tile in _tiles(report, used))),
        class_=f"verdict {kind}".strip(),
        aria_label="Answer",
    )


def _served(report: dict[str, Any]) -> Markup:
    """Whether the cache has room for a request of the greatest length."""
    served, held = report["serving"], report["memory"]
    tiles = [
        (amount(served["weight_bytes"]), "of weights on the fullest rank"),
        (amount(served["kv_bytes_per_token"]), "of cache a token and rank"),
        (f"{served['kv_copies']:g}", "copies of a request's cache"),
    ]
    if held["device_bytes"] is None:
        kind, words = "", ("Name a device to know what fits.",)
    else:
        fits = held["margin_bytes"] >= 0
        kind, word = ("good", "Fits.") if fits else ("bad", "Does not fit.")
        rest = f" The cache holds {served['tokens']:,} tokens; a request may have "
        words = element("strong", word), rest + f"{served['max_len']:,}."
        tiles.append((f"{served['max_concurrency']:.1f}", "longest requests at once"))
    kind, words = _refused(report, kind, words)
    return element(
        "section",
        element("p", *words),
        element("ul", *(_tile(*tile) for tile in tiles)),
        class_=f"verdict {kind}".strip(),
        aria_label="Answer",
    )


def _refused(report: dict[str, Any], kind: str, words: tuple) -> tuple[str, tuple]:
    """A verdict that says first that the target refuses the launch, where it does."""
    if not any(finding["level"] == "error" for finding in report["findings"]):
        return kind, words
    target = report["source"]["dialect"]
    return "bad", (element("strong", f"{target} would not run this."), " If it did: ", *words)


def _tile(number: str, words: str) -> Markup:
    return element("li", element("b", number), " ", element("span", words))


def _tiles(report: dict[str, Any], used: int) -> list[tuple[str, str]]:
    tiles = [(amount(used), "memory of the fullest rank")]
    if report["traffic"]:
        stage = busiest_stage(report)
        sums = by_axis([row for row in report["traffic"] if row["stage"] == stage])
        slow = sum(sent.wire_bytes for sent in sums if sent.inter_node)
        tiles.append((amount(sum(sent.wire_bytes for sent in sums)), "sent by a rank and step"))
        if report["cluster"]:
            tiles.append((amount(slow), "of it over slow links"))
    if report["layout"]["pp"] > 1:
        tiles.append((f"{report['bubble']['step_total']:.1%}", "of the step a rank idles"))
    return [*tiles, (count(report["batch"]["tokens_per_step"]), "tokens a step")]


def findings(found: list[dict[str, Any]]) -> Markup | None:
    if not found:
        return None
    items = []
    for finding in found:
        changes = [f"{key} {value}" for key, value in finding["suggest"].items()]
        better = [element("p", "better: ", *_codes(changes), class_="better")] if changes else []
        where = element("code", finding["where"]) if finding["where"] else None
        head = element(
            "p",
            element("span", _LEVELS[finding["level"]], class_="mark", aria_hidden="true"),
            element("b", f"{finding['level']}: {finding['rule']}"),
            " ",
            where,
        )
        said = element("p", finding["message"])
        items.append(element("li", head, said, *better, class_=finding["level"]))
    return element(
        "section",
        element("h2", "Findings"),
        element("ul", *items, class_="findings"),
        aria_label="Findings",
    )


def _codes(texts: list[str]) -> list[Markup]:
    return [join(", " if i else "", element("code", text)) for i, text in enumerate(texts)]


def measured(report: dict[str, Any]) -> Markup:
    """What a dry run measured beside what was predicted."""
    said = {(row["stage"], row["moment"]): row for row in report["memory"]["by_stage"]}
    rows = []
    for row in report["measured"]["memory"]:
        before = said.get((row["stage"], row["moment"]))
        if before is None:
            continue
        off = before["total"] / row["total"] - 1 if row["total"] else 0.0
        place = element("th", f"stage {row['stage']}, {row['moment']}", scope="row")
        cells = (amount(before["total"]), amount(row["total"]), f"{off:+.2%}")
        rows.append(element("tr", place, *(element("td", cell) for cell in cells)))
    heads = ("peak of", "predicted", "measured", "off by")
    head = element("tr", *(element("th", name, scope="col") for name in heads))
    sent = report["measured"]["traffic"]
    messages = sum(row["count"] for row in sent)
    agreed = f"Agrees: {len(sent)} entries of traffic, {messages:,} messages, every byte."
    verdict = [agreed] if report["agree"] else report["differences"]
    kind = "good" if report["agree"] else "bad"
    return element(
        "section",
        element("h2", "Measured"),
        element("p", "The program of a rank of each stage, run without a device."),
        element("ul", *(element("li", line) for line in verdict), class_=f"agreement {kind}"),
        element(
            "div",
            element("table", element("thead", head), element("tbody", *rows), class_="numbers"),
            class_="scroll",
            tabindex=0,
            role="group",
            aria_label="predicted and measured memory",
        ),
        aria_label="Measured",
    )
