"""What text and pages say alike, taken out of a REPORT: groups of ranks, stages that are the same,
what is sent on each axis, the layout as flags."""

import shlex
from collections.abc import Iterator
from dataclasses import fields
from math import prod
from typing import Any, NamedTuple

from plait.cost.ledger import MEMORY_CLASSES
from plait.spec.grid import Axis, traffic_axes
from plait.spec.layout import Layout

Row = dict[str, Any]
Report = dict[str, Any]


def layout_of(report: Report) -> Layout:
    return Layout(**report["layout"])


def has_experts(report: Report) -> bool:
    """Whether experts lie over the ranks; those of an illegal layout may not divide them."""
    grid = report["grids"]["expert"]
    whole = grid is not None and prod(grid.values()) == report["world"]
    return bool(report["model"]["moe"]) and whole


def grid_axes(report: Report, grid: str) -> list[Axis]:
    """The axes of the dense or the expert grid, of one rank too, the fastest first."""
    axes, stride = [], 1
    for name, size in report["grids"][grid].items():
        axes.append(Axis(name, size, stride))
        stride *= size
    return axes


def stage_axis(report: Report) -> Axis:
    """The axis of the stages; an engine may have data parallelism outside of it."""
    return next(axis for axis in grid_axes(report, "dense") if axis.name == "pp")


def axes_used(report: Report) -> list[Axis]:
    """The axes that messages go over, by the ledger's names; those of more than one rank. Of
    serving, those of the grids."""
    experts = has_experts(report)
    if report["serving"]:
        axes = grid_axes(report, "dense") + (grid_axes(report, "expert")[:2] if experts else [])
    else:
        without = () if experts else ("etp", "ep", "edp")
        axes = [a for a in traffic_axes(layout_of(report)) if a.name not in without]
    return [axis for axis in axes if axis.size > 1]


def members(group: range) -> str:
    """Ranks of a group in few words: "0-7", "0, 8, 16", "0, 8, 16 ... 120"."""
    if len(group) == 1:
        return str(group[0])
    if group.step == 1:
        return f"{group[0]}-{group[-1]}"
    if len(group) <= 4:
        return ", ".join(map(str, group))
    return f"{', '.join(map(str, group[:3]))} ... {group[-1]}"


# ------------------------------------------------------------------------------------------
# Stages


def stages(report: Report) -> list[int]:
    return list(range(report["layout"]["pp"]))


def held_alike(rows: list[Row]) -> list[tuple[list[int], list[Row]]]:
    """(stages, their moments) of stages that hold the same at every moment, in whole bytes."""
    alike: dict[tuple, list[int]] = {}
    of_stage: dict[int, list[Row]] = {}
    for row in rows:
        of_stage.setdefault(row["stage"], []).append(row)
    for stage, moments in of_stage.items():
        key = tuple((m["moment"], *(m[name] for name in MEMORY_CLASSES)) for m in moments)
        alike.setdefault(key, []).append(stage)
    return [(same, of_stage[same[0]]) for same in alike.values()]


def sent_alike(report: Report) -> list[tuple[list[int], list[Row]]]:
    """(stages, their rows of traffic) of stages that send the same, in whole bytes."""
    alike: dict[tuple, tuple[list[int], list[Row]]] = {}
    for stage in stages(report):
        rows = [row for row in report["traffic"] if row["stage"] == stage]
        key = tuple(tuple(v for k, v in row.items() if k != "stage") for row in rows)
        alike.setdefault(key, ([], rows))[0].append(stage)
    return list(alike.values())


def rows_alike(rows: list[Row]) -> list[tuple[Row, list[int]]]:
    """Rows that say the same of several stages as one: (the first of them, their stages)."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(v for k, v in row.items() if k != "stage"), []).append(row)
    ordered = sorted(
        groups.values(),
        key=lambda g: (*(g[0][k] for k in ("axis", "collective", "phase", "dtype")), g[0]["stage"]),
    )
    return [(g[0], [row["stage"] for row in g]) for g in ordered]


def recipe(report: Report) -> tuple[str, str]:
    """Bytes of model states a parameter: in all, and on one rank."""
    known = report["memory"]["recipe"]
    dense, experts = known["dense"], known["experts"]
    parts = " + ".join(f"{dense[name]} {name}" for name in ("weights", "gradients", "optimizer"))
    of_experts = f"; of experts {_on_a_rank(experts)}" if experts else ""
    return (
        f"{parts} = {dense['total']} bytes a parameter",
        f"on a rank {_on_a_rank(dense)}{of_experts}",
    )


def _on_a_rank(row: Row) -> str:
    return row["formula"] + (f", N = {row['shards']}" if "N" in row["formula"] else "")


class Sent(NamedTuple):
    """What a rank sends on one axis in a step, bytes; `phases`: phase -> bytes on the wire."""

    axis: str
    bytes: int
    wire_bytes: int
    phases: dict[str, int]
    inter_node: bool


def by_axis(rows: list[Row]) -> list[Sent]:
    """The rows of one stage summed by axis, the axis that sends most first."""
    axes: dict[str, list[Row]] = {}
    for row in rows:
        axes.setdefault(row["axis"], []).append(row)
    sums = []
    for axis, own in axes.items():
        phases: dict[str, int] = {}
        for row in own:
            phases[row["phase"]] = phases.get(row["phase"], 0) + row["wire_bytes"]
        total = (sum(row[key] for row in own) for key in ("bytes", "wire_bytes"))
        sums.append(Sent(axis, *total, phases, any(row["inter_node"] for row in own)))
    return sorted(sums, key=lambda sent: -sent.wire_bytes)


def busiest_stage(report: Report) -> int:
    """The stage whose ranks put most on the wire; there must be traffic."""
    sums: dict[int, int] = {}
    for row in report["traffic"]:
        sums[row["stage"]] = sums.get(row["stage"], 0) + row["wire_bytes"]
    return max(sums, key=lambda stage: sums[stage])


# ------------------------------------------------------------------------------------------
# Flags


def flags(report: Report) -> Iterator[str]:
    """The layout and the batch as flags of plait, each with its value: what differs from a layout
    of one rank, and how data-parallel ranks are used."""
    layout, batch = report["layout"], report["batch"]
    defaults = {f.name: f.default for f in fields(Layout)}
    defaults |= {"sequence_parallel": layout["tp"] > 1, "dp_replicate": None, "dp_shard": None}
    if layout["pp"] == 1:  # what only a pipeline has
        defaults |= {name: layout[name] for name in ("schedule", "stages")}
    for name, value in layout.items():
        if value is not None and value != defaults[name]:
            yield f"--{name.replace('_', '-')} {_flag_value(value)}"
    for name, key in (("seq-len", "seq_len"), ("global-batch", "global"), ("dtype", "dtype")):
        yield f"--{name} {batch[key]}"


def _flag_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else shlex.quote(str(value))
