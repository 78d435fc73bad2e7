"""Ranks and coordinates: the two grids that lie over the same ranks.

Dense grid, fastest axis first: tp, cp, dp_shard, dp_replicate, pp.
Expert grid: etp, ep, edp, pp. The pp axis is the same in both, so a stage owns the same ranks
whichever way they are tiled, and expert parallelism takes no ranks of its own.
This is Megatron-LM's default order (tp-cp-ep-dp-pp) and torchtitan's.
"""

from dataclasses import dataclass
from itertools import product
from math import prod

from plait.spec.layout import Layout

#: Axes made of several: model states are sharded over `fsdp`, samples are spread over `dp`.
FLATTENED = {"fsdp": ("cp", "dp_shard"), "dp": ("dp_shard", "dp_replicate")}


@dataclass(frozen=True)
class Grid:
    """Named axes over ranks 0 .. world-1, the first axis varying fastest."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def world(self) -> int:
        return prod(self.sizes)

    def size(self, *axes: str) -> int:
        """Number of ranks along the axes together."""
        return prod(self.sizes[self.axes.index(a)] for a in axes)

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours along one axis."""
        return prod(self.sizes[: self.axes.index(axis)])

    def coordinate(self, rank: int) -> dict[str, int]:
        """Axis -> position of a rank along it."""
        assert 0 <= rank < self.world, f"rank {rank} outside a world of {self.world}"
        position = {}
        for axis, size in zip(self.axes, self.sizes, strict=True):
            rank, position[axis] = divmod(rank, size)
        return position

    def rank(self, **coordinate: int) -> int:
        """The rank at a coordinate; axes left out are at position 0."""
        return sum(self.stride(axis) * index for axis, index in coordinate.items())

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that share every coordinate with `rank` but those along `axes`, in order."""
        here = self.coordinate(rank)
        fixed = self.rank(**{a: i for a, i in here.items() if a not in axes})
        ordered = [a for a in self.axes if a in axes]
        ranges = [range(self.size(a)) for a in reversed(ordered)]
        strides = [self.stride(a) for a in reversed(ordered)]
        return tuple(
            fixed + sum(i * s for i, s in zip(index, strides, strict=True))
            for index in product(*ranges)
        )

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Every group along the axes, in the order of its first rank."""
        others = [a for a in self.axes if a not in axes]
        ranges = [range(self.size(a)) for a in reversed(others)]
        firsts = (
            self.rank(**dict(zip(reversed(others), index, strict=True)))
            for index in product(*ranges)
        )
        return [self.group(first, *axes) for first in sorted(firsts)]


def dense_grid(layout: Layout) -> Grid:
    """The grid that dense parameters, activations and data follow."""
    axes = ("tp", "cp", "dp_shard", "dp_replicate", "pp")
    return Grid(axes, tuple(getattr(layout, axis) for axis in axes))


def traffic_grid(layout: Layout) -> Grid:
    """The dense grid with cp in two, as the ledger names them: ulysses, and cp for the ring."""
    axes = ("tp", "ulysses", "cp", "dp_shard", "dp_replicate", "pp")
    sizes = {a: getattr(layout, a) for a in axes} | {"cp": layout.cp // layout.ulysses}
    return Grid(axes, tuple(sizes.values()))


def expert_grid(layout: Layout) -> Grid:
    """The grid that experts follow: the same ranks, tiled anew inside each stage."""
    return Grid(("etp", "ep", "edp", "pp"), (layout.etp, layout.ep, layout.edp, layout.pp))


def expert_traffic_grid(layout: Layout) -> Grid:
    """The expert grid with edp in its two parts, as the ledger names the first: over which states
    are sharded, and the replicas of these."""
    shards = layout.expert_shards
    sizes = (layout.etp, layout.ep, shards, layout.edp // shards, layout.pp)
    return Grid(("etp", "ep", "edp", "replicas", "pp"), sizes)
