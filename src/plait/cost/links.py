"""Which axes of a layout leave the fast links of a cluster."""

from collections.abc import Iterable
from math import lcm

from plait.spec.cluster import Cluster
from plait.spec.grid import FLATTENED, Grid, expert_traffic_grid, traffic_grid
from plait.spec.layout import Layout

_OF_EXPERTS = ("etp", "ep", "edp")


def far_axes(layout: Layout, cluster: Cluster | None, axes: Iterable[str]) -> set[str]:
    """Those of `axes` (a ledger's names) that have a group with members that only slow links
    join; none without a cluster."""
    if cluster is None:
        return set()
    grids = traffic_grid(layout), expert_traffic_grid(layout)
    return {axis for axis in axes if _leaves_domain(cluster, grids[axis in _OF_EXPERTS], axis)}


def _leaves_domain(cluster: Cluster, grid: Grid, axis: str) -> bool:
    axes = grid.axes if axis == "world" else FLATTENED.get(axis, (axis,))
    if axis == "fsdp":
        axes = ("ulysses", *axes)
    # How groups lie in domains repeats with the extent of a group and of a domain.
    extent = max(grid.stride(a) * grid.size(a) for a in axes)
    ranks = range(min(grid.world, lcm(extent, cluster.fast_domain)))
    firsts = (r for r in ranks if not any(grid.coordinate(r)[a] for a in axes))
    # Ranks fill domains in order: a group stays in one where its first and its last rank do.
    span = sum(grid.stride(a) * (grid.size(a) - 1) for a in axes)
    return any(cluster.crosses((first, first + span)) for first in firsts)
