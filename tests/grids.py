"""The two grids with their axes cut in the parts that messages go over."""

from plait.spec.grid import Grid
from plait.spec.layout import Layout

#: Axes of a ledger that are several of a grid.
PARTS = {
    "fsdp": ("ulysses", "cp", "dp_shard"),
    "world": ("tp", "ulysses", "cp", "dp_shard", "dp_replicate", "pp"),
}


def traffic_grid(layout: Layout) -> Grid:
    """The dense grid with cp in two, as the ledger names them: ulysses, and cp for the ring."""
    axes = ("tp", "ulysses", "cp", "dp_shard", "dp_replicate", "pp")
    sizes = {a: getattr(layout, a) for a in axes} | {"cp": layout.cp // layout.ulysses}
    return Grid(axes, tuple(sizes.values()))


def expert_traffic_grid(layout: Layout) -> Grid:
    """The expert grid with edp in its two parts, as the ledger names the first: over which states
    are sharded, and the replicas of these."""
    shards = layout.expert_shards
    sizes = (layout.etp, layout.ep, shards, layout.edp // shards, layout.pp)
    return Grid(("etp", "ep", "edp", "replicas", "pp"), sizes)


def groups_of(layout: Layout, axis: str) -> list[tuple[int, ...]]:
    """Every group of an axis, rank by rank."""
    experts = axis in ("etp", "ep", "edp")
    grid = expert_traffic_grid(layout) if experts else traffic_grid(layout)
    return grid.groups(*PARTS.get(axis, (axis,)))
