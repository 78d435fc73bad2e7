"""The whole page: one file that needs nothing from elsewhere, neither when it opens nor later."""

from importlib.resources import files
from typing import TYPE_CHECKING, Any

from plait.report.html.answer import findings, measured, verdict
from plait.report.html.element import Markup, element, join
from plait.report.html.memory import memory
from plait.report.html.pipeline import pipeline
from plait.report.html.question import question
from plait.report.html.ranks import ranks
from plait.report.html.serving import serving
from plait.report.html.source import source
from plait.report.html.traffic import traffic

if TYPE_CHECKING:
    from plait.schedules.simulate import Timeline

#: The browser is told to load nothing at all.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(report: dict[str, Any], timeline: "Timeline | None" = None) -> str:
    """An HTML document.

    Args:
        report: a REPORT, also one of a dry run, also of an illegal layout.
        timeline: of its pipeline, or of one with fewer micro batches, to be drawn.
    """
    model, cluster, world = report["model"]["name"], report["cluster"], report["world"]
    title = f"{model} on {world} {'x ' + cluster['device'] if cluster else 'ranks'}"
    legal = report["traffic"] is not None
    whole = report["grids"]["dense"] is not None
    content = [
        element("header", element("p", "plait", class_="brand"), element("h1", title)),
        verdict(report),
        findings(report["findings"]),
        question(report),
        source(report["source"]) if "source" in report else None,
        ranks(report) if world > 1 and whole else None,
        serving(report) if report["serving"] else None,
        memory(report) if legal else None,
        traffic(report) if legal else None,
        pipeline(report, timeline) if legal and report["layout"]["pp"] > 1 else None,
        measured(report) if "measured" in report else None,
    ]
    head = [
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", _read("page.css")),
    ]
    body = element("body", element("main", *content), element("script", _read("page.js")))
    document = element("html", element("head", *head), body, lang="en")
    return join(Markup("<!doctype html>\n"), document, "\n")


def _read(name: str) -> Markup:
    return Markup(files("plait.report.html").joinpath(name).read_text("utf-8"))
