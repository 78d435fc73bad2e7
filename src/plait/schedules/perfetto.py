"""A schedule as a Chrome trace (JSON), which Perfetto and chrome://tracing open.

Format: "Trace Event Format", Google, 2016. A track a rank; an arrow for each message from one rank
to another; a counter a rank for the activations that it holds.
"""

import json
from collections.abc import Iterator
from typing import Any

from plait.schedules.draw import KINDS
from plait.schedules.simulate import Timeline
from plait.schedules.table import Table

#: The format counts microseconds; a unit of time is shown as a millisecond.
_UNIT = 1000.0


def trace(table: Table, timeline: Timeline) -> str:
    """The timeline of a table as the text of a trace file; a unit of time is a millisecond."""
    events = [*_names(table), *_actions(timeline), *_messages(table, timeline)]
    events += _held(table, timeline)
    other = {
        "schedule": table.name,
        "makespan": timeline.makespan,
        "unit": "a millisecond is a unit of time",
    }
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}) + "\n"


def _names(table: Table) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": table.name}}
    for rank in range(len(table.ranks)):
        where = {"ph": "M", "pid": 0, "tid": rank}
        yield {**where, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        yield {**where, "name": "thread_sort_index", "args": {"sort_index": rank}}


def _actions(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank, row in enumerate(timeline.spans):
        for action, start, end in row:
            yield {
                "ph": "X",
                "pid": 0,
                "tid": rank,
                "ts": start * _UNIT,
                "dur": (end - start) * _UNIT,
                "name": str(action),
                "cat": KINDS[action.kind][0],
                "args": {"chunk": action.chunk, "micro batch": action.micro},
            }


def _messages(table: Table, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """From the action that makes an output or a gradient to the one that waits for it."""
    direction = {"F": "F", "I": "B", "B": "B"}
    at = {
        (direction[a.kind], a.chunk, a.micro): (start, end)
        for row in timeline.spans
        for a, start, end in row
        if a.kind in direction
    }
    number = 0
    for (way, chunk, micro), (start, _) in at.items():
        before = chunk - 1 if way == "F" else chunk + 1
        if (way, before, micro) not in at:
            continue
        source, target = table.place[before, micro], table.place[chunk, micro]
        if source == target:
            continue
        number += 1
        begun, ended = at[way, before, micro]
        both = {"pid": 0, "id": number, "name": f"{before}SEND_{way}{micro}", "cat": "message"}
        # An arrow begins in the slice around its time: just before its end.
        out = max(begun, ended - min((ended - begun) / 2, 1e-3))
        yield {**both, "ph": "s", "tid": source, "ts": out * _UNIT}
        yield {**both, "ph": "f", "bp": "e", "tid": target, "ts": start * _UNIT}


def _held(table: Table, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Activations of a rank, in its shares of micro batches: from F to W, or to B."""
    for rank, row in enumerate(timeline.spans):
        name = f"activations, rank {rank}"
        chunks = 0
        yield {"ph": "C", "pid": 0, "name": name, "ts": 0.0, "args": {"held": 0.0}}
        for action, start, end in row:
            if action.kind == "F":
                chunks, time = chunks + 1, start
            elif action.kind in "WB":
                chunks, time = chunks - 1, end
            else:
                continue
            held = {"held": chunks * table.share}
            yield {"ph": "C", "pid": 0, "name": name, "ts": time * _UNIT, "args": held}
