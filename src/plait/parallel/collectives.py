"""The one place where plait issues a collective.

`Axis` is a rank's view of one mesh axis; its methods move bytes and know nothing of autograd.
Below them are the pairs: functions whose backward is the mirror collective. Everything goes over
dense tensors of checked sizes, because gloo reduces the wrong memory of a view that is not dense
without an error, and aborts the process when sizes differ between ranks.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class Handle(Protocol):
    """A collective under way; its result may be read after `wait`."""

    def wait(self) -> Any: ...


class Done:
    """A collective that there was no need to issue."""

    def wait(self) -> None:
        pass


@dataclass(frozen=True)
class Both:
    """Two that are under way."""

    first: Handle
    second: Handle

    def wait(self) -> None:
        self.first.wait()
        self.second.wait()


@dataclass
class Scope:
    """What the program is doing now, so that whoever records a collective can say why it ran.

    Attributes:
        phase: forward, backward, recompute, loss, norm or optimizer.
        axis: the axis over which a collective is being issued, None in between.
        check: called with each collective before it is issued (see `parallel/check.py`).
        in_head: whether it is in the head, in the loss, or in their backward.
        note: called with what the rank is about to do or to wait for, in a few words.
    """

    phase: str = "forward"
    axis: "Axis | None" = None
    check: Any = None
    in_head: bool = False
    note: Callable[[str], None] = lambda _: None

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh as one rank sees it; of size 1, nothing is ever sent.

    Attributes:
        name: tp, cp, fsdp, dp_replicate, pp, ... as the ledger writes it.
        size, rank: ranks along the axis, and this rank's position.
        group: the process group (None for size 1).
    """

    name: str
    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    scope: Scope = field(default_factory=Scope)

    def all_reduce(self, x: Tensor, op: str = "sum", wait: bool = True) -> Handle:
        """Sums (or takes the maximum of) x over the axis, in place."""
        if self.size == 1:
            return Done()
        kind = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
        return self._issue("all-reduce", dist.all_reduce, wait, x, kind)

    def all_gather(self, out: Tensor, x: Tensor, wait: bool = True) -> Handle:
        """Writes the ranks' x one behind the other, along dim 0, into out."""
        if self.size == 1:
            if out.data_ptr() != x.data_ptr():
                out.copy_(x)
            return Done()
        assert out.numel() == self.size * x.numel(), (out.shape, x.shape, self)
        return self._issue("all-gather", dist.all_gather_single, wait, out, x)

    def reduce_scatter(self, out: Tensor, x: Tensor, wait: bool = True) -> Handle:
        """Sums x over the axis and writes this rank's piece, along dim 0, into out."""
        if self.size == 1:
            if out.data_ptr() != x.data_ptr():
                out.copy_(x)
            return Done()
        assert x.numel() == self.size * out.numel(), (out.shape, x.shape, self)
        return self._issue("reduce-scatter", dist.reduce_scatter_single, wait, out, x)

    def all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        out_rows: list[int] | None = None,
        rows: list[int] | None = None,
        wait: bool = True,
    ) -> Handle:
        """Sends the i-th piece of x along dim 0 to rank i, and writes what rank i sends to this one
        into the i-th piece of out.

        rows, out_rows: how many rows each piece has; both, or neither where all are alike.
        """
        if self.size == 1:
            if out.data_ptr() != x.data_ptr():
                out.copy_(x)
            return Done()
        assert (rows is None) == (out_rows is None), (rows, out_rows)
        assert rows is not None or out.shape[0] == x.shape[0], (out.shape, x.shape, self)
        assert rows is None or sum(rows) == x.shape[0], (rows, x.shape, self)
        assert out_rows is None or sum(out_rows) == out.shape[0], (out_rows, out.shape, self)
        return self._issue("all-to-all", dist.all_to_all_single, wait, out, x, out_rows, rows)

    def _issue(self, name: str, collective: Callable, wait: bool, *args: Any) -> Handle:
        for t in args:
            if isinstance(t, Tensor) and not t.is_contiguous():
                raise ValueError(
                    f"{name} over {self.name}: a tensor of shape {tuple(t.shape)} and strides "
                    f"{t.stride()} is not dense; its neighbours in memory would be sent"
                )
        if self.scope.check is not None:
            # What differs rightly between ranks is how many rows they get in pieces of their own.
            uneven = name == "all-to-all" and args[-1] is not None
            self.scope.check(self, name, args[0][:0] if uneven else args[0])
        self.scope.axis = self
        try:
            work = collective(*args, group=self.group, async_op=not wait)
        finally:
            self.scope.axis = None
        return Done() if work is None else work

    # -- messages from one rank to another

    def send(self, x: Tensor, to: int, what: str = "message") -> Handle:
        """Starts to send x to the rank at position `to`; x may be let go after `wait`."""
        return self._message(dist.isend, x, what, to, group_dst=to)

    def receive(self, out: Tensor, source: int, what: str = "message") -> Handle:
        """Starts to fill `out` with what the rank at position `source` sends.

        Messages between two ranks arrive in the order in which they were sent.
        """
        return self._message(dist.irecv, out, what, source, group_src=source)

    def _message(self, start: Callable, x: Tensor, what: str, peer: int, **position: int) -> Handle:
        assert x.is_contiguous(), (x.shape, x.stride())
        assert peer != self.rank, peer
        if self.scope.check is not None:
            self.scope.check(self, what, x, sorted((self.rank, peer)))
        self.scope.axis = self
        try:
            return start(x, group=self.group, **position)
        finally:
            self.scope.axis = None

    def shift(
        self, out: Tensor, x: Tensor, by: int, what: str = "message", back: str = ""
    ) -> Handle:
        """Starts to send x to the rank `by` further on, round the axis, and to fill `out` with what
        the rank `by` before sends; both may be touched again after `wait`.

        what, back: the message that is sent, and the one that is received.
        """
        to, source = (self.rank + by) % self.size, (self.rank - by) % self.size
        # In an order that ends also where messages block: the last rank receives first.
        if self.rank < to:
            first, second = self.send(x, to, what), self.receive(out, source, back or what)
        else:
            first, second = self.receive(out, source, back or what), self.send(x, to, what)
        return Both(first, second)

    def exchange_sum(self, x: Tensor, peers: Iterable[int]) -> None:
        """Sums the x of this rank and of some others, in place; they do the same, and all have the
        same result to the bit."""
        parts = {self.rank: x}
        for peer in sorted(peers):
            parts[peer] = other = torch.empty_like(x)
            # In one order on both sides, so that it also holds where messages block.
            if self.rank < peer:
                out, back = self.send(x, peer), self.receive(other, peer)
            else:
                back, out = self.receive(other, peer), self.send(x, peer)
            out.wait()
            back.wait()
        total, *rest = (parts[rank] for rank in sorted(parts))
        for part in rest:
            total.add_(part)
        if total is not x:
            x.copy_(total)

    def gather_rows(self, x: Tensor, wait: bool = True) -> tuple[Tensor, Handle]:
        """The ranks' x, one behind the other along dim 0; [n, ...] -> [size * n, ...]."""
        x = x.contiguous()
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        return out, self.all_gather(out, x, wait)

    def scatter_rows(self, x: Tensor, wait: bool = True) -> tuple[Tensor, Handle]:
        """This rank's piece of the sum of x along dim 0; [size * n, ...] -> [n, ...]."""
        x = x.contiguous()
        assert x.shape[0] % self.size == 0, f"{x.shape[0]} rows over {self.size} ranks"
        out = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        return out, self.reduce_scatter(out, x, wait)

    def own_rows(self, x: Tensor) -> Tensor:
        """This rank's piece of x along dim 0, without communication."""
        rows = x.shape[0] // self.size
        return x.narrow(0, self.rank * rows, rows)


# ------------------------------------------------------------------------------------------
# Autograd pairs


class _ReduceOut(torch.autograd.Function):
    """Forward: all-reduce. Backward: nothing, the gradient is already whole on each rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        x = x.contiguous()
        ctx.mark_dirty(x)
        axis.all_reduce(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _ScatterRows(torch.autograd.Function):
    """Forward: reduce-scatter along dim 0. Backward: all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.scatter_rows(x)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.gather_rows(grad)[0], None


class _SumBoth(torch.autograd.Function):
    """Forward: all-reduce. Backward: all-reduce, for each rank goes on differently with the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        x = x.clone(memory_format=torch.contiguous_format)
        axis.all_reduce(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        ctx.axis.all_reduce(grad)
        return grad, None


class _GatherIn(torch.autograd.Function):
    """Forward: all-gather along dim 0. Backward: reduce-scatter, for each rank goes on differently
    with all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.gather_rows(x)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.scatter_rows(grad)[0], None


class _SumBack(torch.autograd.Function):
    """Forward: nothing. Backward: all-reduce, for each rank goes on differently."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        ctx.axis.all_reduce(grad)
        return grad, None


class _GatherColumns(torch.autograd.Function):
    """Forward: all-gather along the last dim. Backward: this rank's columns of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        stacked, _ = axis.gather_rows(x.unsqueeze(0))
        return stacked.movedim(0, -2).flatten(-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.axis.size, dim=-1)[ctx.axis.rank].contiguous(), None


def reduce_out(x: Tensor, axis: Axis) -> Tensor:
    """Sums partial results; x is overwritten. Leaves a tensor-parallel region (Megatron's g)."""
    return x if axis.size == 1 else _ReduceOut.apply(x, axis)


def scatter_rows(x: Tensor, axis: Axis) -> Tensor:
    """Sums partial results and keeps this rank's rows. Leaves a tensor-parallel region under
    sequence parallelism (Korthikanti et al. 2205.05198, section 4.2.2, g-bar)."""
    return x if axis.size == 1 else _ScatterRows.apply(x, axis)


def sum_both(x: Tensor, axis: Axis) -> Tensor:
    """Sums x over the axis, forward and in the gradient."""
    return x if axis.size == 1 else _SumBoth.apply(x, axis)


def gather_in(x: Tensor, axis: Axis) -> Tensor:
    """All ranks' rows, for a region in which each rank does a part of every row."""
    return x if axis.size == 1 else _GatherIn.apply(x, axis)


def sum_back(x: Tensor, axis: Axis) -> Tensor:
    """x, which is the same on all ranks, for such a region (Megatron's f)."""
    return x if axis.size == 1 else _SumBack.apply(x, axis)


def gather_columns(x: Tensor, axis: Axis) -> Tensor:
    """The ranks' columns side by side: column-parallel output made whole."""
    return x if axis.size == 1 else _GatherColumns.apply(x, axis)
