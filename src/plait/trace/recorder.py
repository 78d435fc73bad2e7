"""Records what a rank sends, as it sends it.

The recorder sits at torch's dispatch of collectives, below plait, FSDP2 and DTensor alike, so
nothing can be sent past it, in a live run or in a dry one.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from plait.cost.ledger import TrafficLedger
from plait.parallel.collectives import Axis
from plait.parallel.mesh import Mesh

#: Operation -> (what the ledger calls it, where its message is: an argument's index or "result").
#: c10d has the output before the input; the functional forms return it.
_C10D = {
    "allreduce_": ("all-reduce", 0),
    "allreduce_coalesced_": ("all-reduce", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_": ("all-gather", 0),
    "allgather_coalesced_": ("all-gather", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "alltoall_base_": ("all-to-all", 1),
    "alltoall_": ("all-to-all", 1),
    "send": ("send", 0),
}
_FUNCTIONAL = {
    "all_reduce": ("all-reduce", 0),
    "all_reduce_": ("all-reduce", 0),
    "all_reduce_coalesced": ("all-reduce", 0),
    "all_reduce_coalesced_": ("all-reduce", 0),
    "all_gather_into_tensor": ("all-gather", "result"),
    "all_gather_into_tensor_out": ("all-gather", "result"),
    "all_gather_into_tensor_coalesced": ("all-gather", "result"),
    "reduce_scatter_tensor": ("reduce-scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce-scatter", 0),
    "all_to_all_single": ("all-to-all", 0),
}
_OPERATIONS = {"c10d": _C10D, "_c10d_functional": _FUNCTIONAL}

#: What moves no message of its own: the receiving side, waiting, and meeting without data.
_SILENT = {"recv_", "recv_any_source_", "wait_tensor", "_wrap_tensor_autograd", "barrier"}
_SILENT |= {"monitored_barrier_"}
#: Where c10d names the other side of a message: the position among the arguments.
_PEER = 2
#: Where an all-to-all has the sizes of its pieces; none where all are alike.
_SPLITS = 3


class Issue(NamedTuple):
    """A collective that a rank issued, or a message that it sends or waits for.

    Attributes:
        axis: over which, as `Mesh.axes` names it.
        collective: as in the ledger, or "receive".
        dtype, bytes: of the message; None where the pieces of ranks may rightly differ.
        peer: position along the axis of the other side of a message; -1 for a collective.
    """

    axis: str
    collective: str
    dtype: str
    bytes: int | None
    peer: int = -1

    def __str__(self) -> str:
        size = "pieces of their own" if self.bytes is None else f"{self.bytes} bytes"
        way = {"send": " to", "receive": " from"}.get(self.collective)
        whom = "" if way is None else f"{way} position {self.peer}"
        return f"{self.collective} of {size} ({self.dtype}) over {self.axis}{whom}"


class Recorder(TorchDispatchMode):
    """Within it, every collective of this rank is entered into `ledger`, and one by one, with
    what it receives, into `issued`.

    Axis and phase are what the mesh's scope says when plait issues the collective; what others
    issue (FSDP2, DTensor) goes to the axis whose process group it uses.
    """

    def __init__(self, mesh: Mesh):
        super().__init__()
        self.mesh, self.ledger = mesh, TrafficLedger()
        self.issued: list[Issue] = []
        self._by_group = {a.group.group_name: a for a in mesh.axes.values() if a.group is not None}
        self._names = {id(axis): name for name, axis in mesh.axes.items()}

    def cut(self) -> tuple[TrafficLedger, tuple[Issue, ...]]:
        """What was sent and issued since the last cut."""
        found = self.ledger, tuple(self.issued)
        self.ledger, self.issued = TrafficLedger(), []
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # first DTensor takes it apart, into what can be seen here
        result = func(*args, **(kwargs or {}))
        table = _OPERATIONS.get(func.namespace)
        if table is not None:
            self._record(table, func, args, kwargs or {}, result)
        return result

    def _record(self, table: dict, func: Callable, args: tuple, kwargs: dict, result: Any) -> None:
        name = func._schema.name.partition("::")[2]
        if name in _SILENT and name != "recv_":
            return
        axis = self.mesh.scope.axis or self._by_group[_group_name(func, args, kwargs)]
        if name == "recv_":
            (x,) = args[0]
            self._issue(axis, "receive", _dtype(x), x.nbytes, args[_PEER])
            return
        assert name in table, f"{func} has no place in the ledger"
        collective, where = table[name]
        stage, phase = self.mesh.coordinate["pp"], self.mesh.scope.phase
        # A coalesced operation has a message for each of its tensors; an all-gather into a list
        # of lists has one for each list.
        message = result if where == "result" else args[where]
        messages = message if isinstance(message, list | tuple) else [message]
        for part in messages:
            tensors = list(_tensors(part))
            dtype = _dtype(tensors[0])
            size = sum(t.numel() * t.element_size() for t in tensors)
            self.ledger.add(stage, axis.name, collective, phase, dtype, size, axis.size)
            # Pieces of an all-to-all may be of any size.
            uneven = name == "alltoall_base_" and bool(args[_SPLITS])
            peer = args[_PEER] if collective == "send" else -1
            self._issue(axis, collective, dtype, None if uneven else size, peer)

    def _issue(self, axis: Axis, collective: str, dtype: str, size: int | None, peer: int) -> None:
        name = self._names.get(id(axis), axis.name)
        self.issued.append(Issue(name, collective, dtype, size, peer))


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for part in value:
            yield from _tensors(part)


def _group_name(func: Any, args: tuple, kwargs: dict) -> str:
    """The process group of a collective: an object for c10d, a name for the functional forms."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    group = given.get("process_group", given.get("group_name"))
    if isinstance(group, torch.ScriptObject):
        group = torch.distributed.ProcessGroup.unbox(group)
    return group if isinstance(group, str) else group.group_name
