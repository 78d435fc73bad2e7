"""The pipeline in text: its layers, how long ranks idle, and the order of a step drawn."""

from typing import TYPE_CHECKING, Any

from plait.report.numbers import repeats
from plait.report.text.lines import heading

if TYPE_CHECKING:
    from rich.console import Console

    from plait.schedules.simulate import Timeline

#: Ranks that are drawn; `plait schedule` draws more.
DRAWN = 16


def pipeline(console: "Console", report: dict[str, Any], timeline: "Timeline | None") -> None:
    layout, bubble = report["layout"], report["bubble"]
    chunks = f"{layout['pp']} stages x {layout['vpp']} chunk{'s' * (layout['vpp'] > 1)}"
    heading(console, "Pipeline", f"{layout['schedule']} · {chunks}")
    console.print(f"  layers of each chunk  {repeats(layout['stages'])}")
    idle = (
        f"{bubble['step_total']:.1%} of the step ({bubble['step_ideal']:.1%} of ideal), "
        f"{bubble['span_total']:.1%} of its own span"
    )
    console.print(f"  a rank idles  {idle}")
    console.print("  [dim]simulated: times in operations, messages free[/]")
    if timeline is not None and layout["pp"] <= DRAWN:
        from plait.schedules.draw import drawing

        shown, whole = timeline.table.micro_batches, report["batch"]["accumulation"]
        if shown < whole:
            console.print(f"  [dim]drawn with {shown} of its {whole} micro batches[/]")
        colour = console.color_system is not None and not console.no_color
        console.print(drawing(timeline.table, timeline, console.width, colour), soft_wrap=True)
