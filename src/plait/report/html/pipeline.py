"""The pipeline: its layers, how long ranks idle, and its step drawn."""

from typing import TYPE_CHECKING, Any

from plait.report.html.element import Markup, element
from plait.report.numbers import repeats
from plait.schedules.svg import svg

if TYPE_CHECKING:
    from plait.schedules.simulate import Timeline


def pipeline(report: dict[str, Any], timeline: "Timeline | None") -> Markup:
    layout, bubble = report["layout"], report["bubble"]
    chunks = f"{layout['vpp']} chunk{'s' * (layout['vpp'] > 1)}"
    words = (
        f"{layout['schedule']}, {layout['pp']} stages x {chunks}, layers of each chunk "
        f"{repeats(layout['stages'])}. A rank idles {bubble['step_total']:.1%} of the step "
        f"({bubble['step_ideal']:.1%} of ideal), {bubble['span_total']:.1%} of its own span; "
        "simulated, with times in 10^12 operations and messages free."
    )
    return element(
        "section",
        element("h2", "Pipeline"),
        element("p", words),
        *_drawing(report, timeline),
        aria_label="Pipeline",
    )


def _drawing(report: dict[str, Any], timeline: "Timeline | None") -> list[Markup]:
    if timeline is None:
        words = "The step has too many actions to be drawn here; plait schedule draws it."
        return [element("p", words, class_="aside")]
    all_, shown = report["batch"]["accumulation"], timeline.table.micro_batches
    parts = []
    if shown < all_:
        words = f"Drawn with {shown} of its {all_} micro batches; with all of them the middle of "
        parts.append(element("p", f"{words}the step goes on in the same way.", class_="aside"))
    drawing = Markup(svg(timeline.table, timeline).strip())
    scroll = {"class_": "scroll", "tabindex": 0, "role": "group"}
    return [*parts, element("div", drawing, **scroll, aria_label="the step drawn")]
