"""The whole page of text, in the order in which it is read."""

from typing import TYPE_CHECKING, Any

from plait.report.text.answer import findings, verdict
from plait.report.text.measured import measured
from plait.report.text.memory import memory
from plait.report.text.pipeline import pipeline
from plait.report.text.question import question
from plait.report.text.ranks import ranks
from plait.report.text.serving import serving
from plait.report.text.source import legal, source
from plait.report.text.traffic import traffic

if TYPE_CHECKING:
    from plait.schedules.simulate import Timeline


def render(
    report: dict[str, Any], width: int | None = None, timeline: "Timeline | None" = None
) -> str:
    """The report as text; coloured if it goes to a terminal.

    Args:
        report: a REPORT, also one of a dry run.
        width: columns (the terminal's own by default).
        timeline: of its pipeline, to be drawn.
    """
    from rich.console import Console

    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        question(console, report)
        if "source" in report:
            source(console, report["source"])
        ranks(console, report)
        if report["bubble"]["step_total"] is not None and report["layout"]["pp"] > 1:
            pipeline(console, report, timeline)
        if report["serving"]:
            serving(console, report)
        elif report["memory"]["by_stage"]:
            memory(console, report)
        if report["traffic"] is not None:
            traffic(console, report)
        if "measured" in report:
            measured(console, report)
        findings(console, report["findings"])
        verdict(console, report)
        if report.get("source", {}).get("legal"):
            legal(console, report["source"])
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
