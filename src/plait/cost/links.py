"""Which axes of a layout leave the fast links of a cluster."""

from collections.abc import Iterable

from plait.spec.cluster import Cluster
from plait.spec.grid import traffic_axes
from plait.spec.layout import Layout


def far_axes(layout: Layout, cluster: Cluster | None, axes: Iterable[str]) -> set[str]:
    """Those of `axes` (a ledger's names) that have a group with members that only slow links
    join; none without a cluster."""
    if cluster is None:
        return set()
    domain, world = cluster.fast_domain, layout.world
    far = {axis.name for axis in traffic_axes(layout) if axis.leaves(domain, world)}
    return far & set(axes)
