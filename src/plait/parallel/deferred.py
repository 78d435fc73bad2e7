"""Weight gradients that are put off: backward in two halves.

The first half (I in a schedule) goes down to the input gradient. What a weight gradient needs, the
input and the output gradient of its map, is all that is held from there to the second half (W),
which makes the weight gradients one after the other (Qi et al. 2401.10241, section 2). A map that
can do so asks its `Later` in backward whether it should.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from plait.parallel.collectives import Axis


class Later:
    """Where the maps of one chunk leave the weight gradients that are put off.

    Attributes:
        queue: takes what makes them, in their order; None while they are made at once.
        deliver: takes a parameter and its gradient.
    """

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] | None = None
        self.deliver: Callable[[nn.Parameter, Tensor], None] | None = None


@torch.no_grad()
def finish(queue: list[Callable[[], None]]) -> None:
    """The second half: everything in the queue, each let go as soon as it is done."""
    queue.reverse()
    while queue:
        queue.pop()()


class _Linear(torch.autograd.Function):
    """y = x W^T whose weight gradient may be put off.

    With an axis, the output gradient has been gathered over it: then a rank keeps its own rows,
    and gathers them once more when their time has come.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, later: Later, owner: nn.Module, axis: Axis | None
    ) -> Tensor:
        ctx.later, ctx.owner, ctx.axis = later, owner, axis
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype))  # a router's input is more accurate

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        later, owner, axis = ctx.later, ctx.owner, ctx.axis
        dx = grad @ weight.to(grad.dtype)
        if later.queue is None:
            return dx, grad.t() @ x, None, None, None
        x = x.detach()  # as saved it would hold the whole graph
        kept = grad if axis is None else axis.own_rows(grad).clone()

        def make() -> None:
            whole = kept if axis is None else axis.gather_rows(kept)[0]
            later.deliver(owner.weight, whole.t() @ x)

        later.queue.append(make)
        return dx, None, None, None, None


class _Lookup(torch.autograd.Function):
    """An embedding, whose table's gradient may be put off."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, weight: Tensor, later: Later, owner: nn.Module) -> Tensor:
        ctx.later, ctx.owner, ctx.rows = later, owner, weight.shape[0]
        ctx.save_for_backward(index)
        return F.embedding(index, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None, None]:
        (index,) = ctx.saved_tensors
        later, owner, rows = ctx.later, ctx.owner, ctx.rows

        def make() -> Tensor:
            return torch.ops.aten.embedding_dense_backward(grad, index, rows, -1, False)

        if later.queue is None:
            return None, make(), None, None
        later.queue.append(lambda: later.deliver(owner.weight, make()))
        return None, None, None, None


def linear(x: Tensor, owner: nn.Module, later: Later | None, axis: Axis | None = None) -> Tensor:
    """x [T, in] times owner.weight [out, in], without a bias -> [T, out].

    axis: over which the gradient of the result will have been gathered (dim 0), if it was.
    """
    if later is None:
        return F.linear(x, owner.weight)
    return _Linear.apply(x, owner.weight, later, owner, axis)


def lookup(index: Tensor, owner: nn.Module, later: Later | None) -> Tensor:
    """Rows of owner.weight [V, H] at index [T] -> [T, H]."""
    if later is None:
        return F.embedding(index, owner.weight)
    return _Lookup.apply(index, owner.weight, later, owner)
