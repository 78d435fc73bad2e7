"""The files that `plait schedule` writes."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from plait.cli import files
from plait.schedules.csvfile import write_table
from plait.schedules.simulate import Timeline

#: Flags that name a file to be written.
FILES = ("svg", "trace", "csv")


def write(given: Mapping[str, Any], timeline: Timeline) -> None:
    """Writes the files that were asked for: all of them, or none.

    Raises:
        UserError: one cannot be written.
    """
    from plait.schedules.perfetto import trace
    from plait.schedules.svg import svg

    table = timeline.table
    writers = {
        "svg": lambda path: path.write_text(svg(table, timeline), "utf-8"),
        "trace": lambda path: path.write_text(trace(table, timeline), "utf-8"),
        "csv": partial(write_table, table),
    }
    files.write(given, writers)
