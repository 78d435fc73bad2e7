"""Device meshes of a script, as they are made, sliced, flattened and asked for their sizes."""

from dataclasses import dataclass, field
from typing import Any

from plait.dialects.launch import AT_START, refused
from plait.dialects.python.values import Made, Open
from plait.spec.findings import Finding

#: A size that is not known where it is the rest of the ranks, or something else.
Size = int | None


@dataclass
class Mesh(Made):
    """A mesh, or a part of one.

    Attributes:
        dims: name -> size, the slowest first; a name is "0", "1", ... where none is given.
        root: the mesh of which it is a part; None: it is the whole.
        parts: of a flattened dim, the dims that it was.
    """

    dims: dict[str, Size] = field(default_factory=dict)
    root: "Mesh | None" = None
    parts: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def whole(self) -> "Mesh":
        return self.root or self

    def flat(self) -> tuple[str, ...]:
        """The dims of the whole mesh that this part spans."""
        known = self.whole().parts
        return tuple(name for dim in self.dims for name in known.get(dim, (dim,)))


@dataclass
class Meshes:
    """The meshes of a script, and what torch would say to them.

    Attributes:
        made: whole meshes, in order. findings: of torch/distributed/device_mesh.py.
    """

    world: int | None = None
    made: list[Mesh] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def hook(self, call: Made) -> Any:
        """What a call of something about a mesh gives; None: it is about something else."""
        if call.word in ("init_device_mesh", "DeviceMesh"):
            return self._make(call)
        owner = call.args[0] if call.args else None
        if not isinstance(owner, Mesh):
            return None
        if call.name.endswith("[]"):
            return self._slice(owner, call.args[1], call.line)
        rest = call.args[1:]
        match call.word:
            case "size":
                return self._size(owner, rest[0] if rest else call.fields.get("mesh_dim"))
            case "get_local_rank" | "get_rank" | "get_coordinate":
                return Open("a rank")
            case "get_group":
                name = rest[0] if rest else call.fields.get("mesh_dim")
                return self._slice(owner, name, call.line) if isinstance(name, str) else owner
            case "_flatten":
                return self._flatten(owner, rest[0] if rest else call.fields.get("mesh_dim_name"))
            case "_unflatten" | "_concatenate":
                return None
        return None

    def _refuse(self, rule: str, message: str, line: int) -> None:
        text = f"{message} (line {line})" if line else message
        self.findings.append(refused("PyTorch", rule, AT_START, text))

    def _make(self, call: Made) -> Mesh:
        shape = call.fields.get("mesh_shape", call.fields.get("mesh"))
        if shape is None and len(call.args) > 1:
            shape = call.args[1]
        names = call.fields.get("mesh_dim_names")
        if names is None and len(call.args) > 2 and call.word == "init_device_mesh":
            names = call.args[2]
        sizes = _sizes(shape) if call.word == "init_device_mesh" else _extent(shape)
        if isinstance(names, str):
            names = (names,)
        known = isinstance(names, list | tuple) and all(isinstance(n, str) for n in names)
        words = [str(n) for n in names] if known else [str(i) for i in range(len(sizes))]
        if known and len(set(words)) != len(words):
            self._refuse("pytorch-mesh", f"names of mesh dims must differ: {words}", call.line)
        if known and len(words) != len(sizes):
            message = f"{len(words)} names {words} for a mesh of {len(sizes)} dims"
            self._refuse("pytorch-mesh", message, call.line)
        dims = dict(zip(words, sizes, strict=False))
        wrong = [size for size in sizes if size is not None and size < 1]
        if wrong and wrong != [-1]:
            self._refuse("pytorch-mesh", f"a mesh dim of size {wrong[0]}", call.line)
        dims = {name: size if size and size > 0 else None for name, size in dims.items()}
        mesh = Mesh("mesh", [], {}, call.line, True, dims=dims)
        mesh.dims |= _rest(dims, self.world)
        self.made.append(mesh)
        return mesh

    def _slice(self, owner: Mesh, key: Any, line: int) -> Mesh:
        names = (key,) if isinstance(key, str) else key
        if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
            return owner
        root = owner.whole()
        known = root.dims | {name: None for name in root.parts}
        missing = [name for name in names if name not in known]
        order = list(root.dims)
        places = [order.index(name) for name in names if name in order]
        if missing:
            message = f"the mesh has no dim {missing[0]!r}; it has {', '.join(known)}"
            self._refuse("pytorch-mesh-dim", message, line)
        elif places != sorted(places):
            message = f"dims {', '.join(names)} are not in the order of the mesh"
            self._refuse("pytorch-mesh-dim", message, line)
        dims = {name: self._of(root, name) for name in names if name in known}
        return Mesh("mesh", [], {}, line, True, dims=dims, root=root)

    @staticmethod
    def _of(root: Mesh, name: str) -> Size:
        total = 1
        for part in root.parts.get(name, (name,)):
            size = root.dims.get(part)
            if size is None:
                return None
            total *= size
        return total

    def _size(self, owner: Mesh, dim: Any) -> Any:
        names = list(owner.dims)
        if isinstance(dim, int) and -len(names) <= dim < len(names):
            names = [names[dim]]
        elif isinstance(dim, str) and dim in owner.dims:
            names = [dim]
        total = 1
        for name in names:
            size = owner.dims[name]
            if size is None:
                return Open("the size of a mesh")
            total *= size
        return total

    def _flatten(self, owner: Mesh, name: Any) -> Mesh:
        root, parts = owner.whole(), owner.flat()
        name = name if isinstance(name, str) else "_".join(parts)
        root.parts[name] = parts
        return Mesh("mesh", [], {}, owner.line, True, dims={name: self._of(root, name)}, root=root)


def _sizes(shape: Any) -> list[Size]:
    if isinstance(shape, int):
        return [shape]
    if not isinstance(shape, list | tuple):
        return [None]
    return [size if _counts(size) else None for size in shape][:16]


def _counts(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and abs(size) < 10**7


def _extent(shape: Any) -> list[Size]:
    """Sizes of a mesh given by its ranks: nested lists, or torch.arange(8).reshape(2, 4)."""
    if isinstance(shape, Made) and shape.word in ("reshape", "view"):
        sizes = shape.args[1:]
        if len(sizes) == 1 and isinstance(sizes[0], list | tuple):
            sizes = list(sizes[0])
        return _sizes(sizes)
    if isinstance(shape, Made) and shape.word in ("arange", "tensor") and shape.args:
        first = shape.args[0]
        return [first] if _counts(first) else _extent(first)
    if isinstance(shape, range):
        return [len(shape)]
    sizes: list[Size] = []
    while isinstance(shape, list | tuple | range) and len(shape) and len(sizes) < 16:
        sizes.append(len(shape))
        shape = shape[0]
    return sizes or [None]


def _rest(dims: dict[str, Size], world: int | None) -> dict[str, Size]:
    """The one size that is not known, as what the others leave of the ranks."""
    unknown = [name for name, size in dims.items() if size is None]
    if world is None or len(unknown) != 1:
        return {}
    others = 1
    for size in dims.values():
        others *= size or 1
    return {unknown[0]: world // others} if world % others == 0 else {}
