"""What ranks send: a bar for each axis by phase, and every entry in a table."""

from typing import Any

from plait.report.facts import Sent, busiest_stage, by_axis, rows_alike
from plait.report.html.element import Markup, element
from plait.report.numbers import amount, spans

#: In the order of a step.
PHASES = ("forward", "recompute", "backward", "loss", "norm", "optimizer")


def traffic(report: dict[str, Any]) -> Markup:
    if not report["traffic"]:
        return element(
            "section",
            element("h2", "Traffic"),
            element("p", "None: a rank by itself."),
            aria_label="Traffic",
        )
    stage = busiest_stage(report)
    sums = by_axis([row for row in report["traffic"] if row["stage"] == stage])
    phases = [phase for phase in PHASES if any(phase in sent.phases for sent in sums)]
    whose = f" of stage {stage}, which sends most" if report["layout"]["pp"] > 1 else ""
    whole = sum(sent.wire_bytes for sent in sums)
    keys = (
        element("li", element("i", class_=f"p-{phase}", aria_hidden="true"), phase)
        for phase in phases
    )
    scale = max(sent.wire_bytes for sent in sums) or 1
    clustered = report["cluster"] is not None
    return element(
        "section",
        element("h2", "Traffic of a rank and step"),
        element("p", f"{amount(whole)} on the wire by a rank{whose}."),
        element("ul", *keys, class_="legend"),
        element(
            "div", *(_bar(sent, phases, scale, clustered) for sent in sums), class_="bars axes"
        ),
        _table(report, clustered),
        aria_label="Traffic",
    )


def links(slow: bool) -> Markup:
    word = "slow" if slow else "fast"
    return element("span", word, class_=f"link {word}")


def _bar(sent: Sent, phases: list[str], scale: int, clustered: bool) -> Markup:
    parts = {phase: sent.phases[phase] for phase in phases if sent.phases.get(phase)}
    words = ", ".join(f"{phase} {amount(size)}" for phase, size in parts.items())
    segments = (
        element(
            "i",
            class_=f"p-{phase}",
            style=f"width:{size / scale:.3%}",
            title=f"{phase} {amount(size)}",
        )
        for phase, size in parts.items()
    )
    said = f"{sent.axis}: {amount(sent.wire_bytes)} on the wire: {words}"
    return element(
        "div",
        element("span", sent.axis),
        element("div", *segments, class_="bar", role="img", aria_label=said),
        element("span", amount(sent.wire_bytes)),
        links(sent.inter_node) if clustered else None,
        class_="measure",
    )


def _table(report: dict[str, Any], clustered: bool) -> Markup:
    names = ("axis", "collective", "phase", "dtype", "stages", "count", "bytes", "on the wire")
    heads = (*names, *(["links"] if clustered else []))
    rows = []
    for row, stages in rows_alike(report["traffic"]):
        words = (row["collective"], row["phase"], row["dtype"], spans(stages))
        rows.append(
            element(
                "tr",
                element("th", row["axis"], scope="row"),
                *(element("td", word, class_="word") for word in words),
                element("td", f"{row['count']:,}"),
                *(
                    element("td", amount(row[key]), title=f"{row[key]:,} bytes")
                    for key in ("bytes", "wire_bytes")
                ),
                element("td", links(row["inter_node"])) if clustered else None,
            )
        )
    head = element("tr", *(element("th", name, scope="col") for name in heads))
    table = element("table", element("thead", head), element("tbody", *rows), class_="numbers")
    scroll = element(
        "div", table, class_="scroll", tabindex=0, role="group", aria_label="traffic in numbers"
    )
    return element("details", element("summary", "entry by entry"), scroll)
