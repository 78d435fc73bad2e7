"""The mesh: the grids of a layout as process groups, one object passed down."""

from dataclasses import dataclass, field
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from plait.parallel.collectives import Axis, Scope
from plait.spec.grid import FLATTENED, dense_grid
from plait.spec.layout import Layout
from plait.spec.model import Model
from plait.spec.parameters import Place, kv_copies


@dataclass(frozen=True)
class Mesh:
    """One rank's axes. `mesh["tp"]` is an `Axis`; those of size 1 are there and send nothing.

    Attributes:
        layout, rank: whose mesh it is.
        coordinate: axis -> position of this rank.
        axes: tp, cp and its parts ring and ulysses, fsdp, dp_replicate, pp, world; of the expert
            grid etp, ep and edp (over which states of experts are sharded); and kv: the
            tensor-parallel ranks that hold a copy of the same KV head (the ledger counts what it
            sends as tp, what the ring sends as cp).
        scope: what the program is doing now, shared by all axes.
    """

    layout: Layout
    rank: int
    coordinate: dict[str, int]
    axes: dict[str, Axis]
    scope: Scope = field(default_factory=Scope)

    @property
    def dp_rank(self) -> int:
        """Which of the dp ranks this is: the share of each micro step's samples that it sees."""
        at = self.coordinate
        return at["dp_replicate"] * self.layout.dp_shard + at["dp_shard"]

    @property
    def place(self) -> Place:
        """Where this rank is on the axes that cut parameters."""
        return Place(self["tp"].rank, self["etp"].rank, self["ep"].rank)

    def __getitem__(self, axis: str) -> Axis:
        return self.axes[axis]


def make_mesh(layout: Layout, model: Model, rank: int, device_type: str = "cpu") -> Mesh:
    """The mesh of a rank; the default process group must exist and have layout.world ranks."""
    world = dist.get_world_size()
    assert world == layout.world, f"{world} ranks, but the layout has {layout.world}"
    scope, grid = Scope(), dense_grid(layout)
    here = grid.coordinate(rank)
    axes = {
        name: Axis(name, scope=scope)
        for name in (
            *("tp", "cp", "ring", "ulysses", "fsdp", "dp_replicate", "pp", "kv"),
            *("etp", "ep", "edp"),
        )
    }
    axes["world"] = Axis("world", world, rank, dist.group.WORLD if world > 1 else None, scope)

    # The DeviceMesh has only axes that are really there: a group of one rank costs its creation
    # and is never used. Its dims run from the slowest axis to the fastest.
    copies, parts_of = kv_copies(model, layout), {"cp": ("ulysses", "ring")}
    split = {"ulysses": layout.ulysses, "ring": layout.cp // layout.ulysses}
    sizes: dict[str, int] = {}
    for name, size in zip(grid.axes, grid.sizes, strict=True):
        sizes |= split if name == "cp" else {name: size}
    sizes = {a: n for a, n in sizes.items() if n > 1}
    if copies > 1:
        whole = sizes.pop("tp")
        heads = {"tp_heads": whole // copies} if whole > copies else {}
        sizes = {"kv": copies} | heads | sizes
    if not sizes:
        return Mesh(layout, rank, here, axes, scope)
    names = tuple(reversed(sizes))
    ranks = torch.arange(world).view([sizes[n] for n in names])
    devices = DeviceMesh(device_type, ranks, mesh_dim_names=names)

    def axis(name: str, parts: tuple[str, ...], shown: str = "") -> Axis:
        parts = tuple(p for part in parts for p in parts_of.get(part, (part,)))
        parts = tuple(n for n in names if n in parts)
        if not parts:
            return Axis(name, scope=scope)
        flat = devices[parts[0]] if len(parts) == 1 else devices[parts]._flatten(name)
        return Axis(shown or name, flat.size(), flat.get_local_rank(), flat.get_group(), scope)

    for name in ("tp", "cp", "dp_replicate", "pp"):
        axes[name] = axis(name, ("tp_heads", "kv") if name == "tp" and copies > 1 else (name,))
    axes["fsdp"] = axis("fsdp", FLATTENED["fsdp"])
    axes["ring"], axes["ulysses"] = (
        axis("ring", ("ring",), shown="cp"),
        axis("ulysses", ("ulysses",)),
    )
    if copies > 1:
        axes["kv"] = axis("kv", ("kv",), shown="tp")
    if model.moe is not None:
        axes |= _expert_axes(layout, device_type, scope)
    return Mesh(layout, rank, here, axes, scope)


def _expert_axes(layout: Layout, device_type: str, scope: Scope) -> dict[str, Axis]:
    """etp, ep and edp: the ranks of a stage, and of a replica of sharded states, tiled anew."""
    sizes = {"etp": layout.etp, "ep": layout.ep, "edp": layout.expert_shards}
    sizes["rest"] = layout.world // prod(sizes.values())
    sizes = {name: n for name, n in sizes.items() if n > 1}
    names = tuple(reversed(sizes))
    ranks = torch.arange(layout.world).view([sizes[n] for n in names])
    devices = DeviceMesh(device_type, ranks, mesh_dim_names=names)
    return {
        name: Axis(name, sizes[name], devices.get_local_rank(name), devices.get_group(name), scope)
        for name in sizes
        if name != "rest"
    }
