"""Ranks and coordinates: the two grids that lie over the same ranks.

Dense grid, fastest axis first: tp, cp, dp_shard, dp_replicate, pp.
Expert grid: etp, ep, edp, pp. The pp axis is the same in both, so a stage owns the same ranks
whichever way they are tiled, and expert parallelism takes no ranks of its own.
This is Megatron-LM's default order (tp-cp-ep-dp-pp) and torchtitan's.
"""

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

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


def expert_grid(layout: Layout) -> Grid:
    """The grid that experts follow: the same ranks, tiled anew inside each stage."""
    return Grid(("etp", "ep", "edp", "pp"), (layout.etp, layout.ep, layout.edp, layout.pp))


class Axis(NamedTuple):
    """Ranks that are `size` in number and `stride` apart: every group of an axis."""

    name: str
    size: int
    stride: int

    def at(self, rank: int) -> int:
        """The position of a rank along the axis."""
        return rank // self.stride % self.size

    def group(self, rank: int) -> range:
        """The ranks of its group."""
        first = rank - self.at(rank) * self.stride
        return range(first, first + self.size * self.stride, self.stride)

    def leaves(self, domain: int, world: int) -> bool:
        """Whether some group has members in several domains of so many ranks in a row. Groups side
        by side tile the ranks; a domain that ends inside a tile cuts one of its groups."""
        return self.size > 1 and world > domain and domain % (self.size * self.stride) != 0


def traffic_axes(layout: Layout) -> list[Axis]:
    """The axes that messages go over, by the ledger's names: cp is the ring without Ulysses, edp
    the part over which states of experts are sharded."""
    inner, experts = layout.tp * layout.cp, layout.etp * layout.ep
    return [
        Axis("tp", layout.tp, 1),
        Axis("ulysses", layout.ulysses, layout.tp),
        Axis("cp", layout.cp // layout.ulysses, layout.tp * layout.ulysses),
        Axis("fsdp", layout.fsdp, layout.tp),
        Axis("dp_replicate", layout.dp_replicate, inner * layout.dp_shard),
        Axis("etp", layout.etp, 1),
        Axis("ep", layout.ep, layout.etp),
        Axis("edp", layout.expert_shards, experts),
        Axis("pp", layout.pp, inner * layout.dp),
        Axis("world", layout.world, 1),
    ]
