"""Rows of tokens to rows of choices, sorted by expert, and back.

On the way back each token's rows are added up in the order of its choices, by one kernel that reads
each row once (`embedding_bag`): the sum is the same every time, and rows in token order are never
made.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class Way:
    """Who goes where.

    Attributes:
        order: int64 [rows], the choices (token t's j-th is t k + j) that go to an expert, sorted by
            expert, those of an expert by token.
        token: int64 [rows], whose they are.
        place: int64 [T, k], where each choice is in `order`; 0 for those that are not.
        gone: bool [T, k], the choices that go to no expert; None where all go to one.
    """

    def __init__(self, index: Tensor, rows: int):
        """index: int64 [T, k], expert of each choice; `rows` of them are for one, the others have
        the largest number."""
        order = index.flatten().argsort(stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        self.order, self.place, self.gone = order[:rows], place.view(index.shape), None
        if rows < len(order):
            self.gone = self.place >= rows
            self.place = self.place.masked_fill(self.gone, 0)
        self.token = self.order // index.shape[1]


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: Way) -> Tensor:
        ctx.save_for_backward(way.place, way.gone)  # so that recompute can do without
        return x.index_select(0, way.token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _add_up(grad, *ctx.saved_tensors, None), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, way: Way) -> Tensor:
        ctx.save_for_backward(y, weight, way.order, way.token)
        return _add_up(y, way.place, way.gone, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        y, weight, order, token = ctx.saved_tensors
        dy = grad.index_select(0, token)
        dweight = weight.new_zeros(weight.numel())
        dweight[order] = (dy * y).sum(1, dtype=weight.dtype)
        dy.mul_(weight.flatten()[order, None].to(y.dtype))
        return dy, dweight.view(weight.shape), None


def _add_up(rows: Tensor, place: Tensor, gone: Tensor | None, weight: Tensor | None) -> Tensor:
    """[rows, H] -> [T, H]: the (weighted) sum of each token's rows."""
    if not len(rows):
        return rows.new_zeros(len(place), rows.shape[1])
    if weight is None and gone is not None:
        weight = (~gone).to(rows.dtype)
    elif weight is not None:
        weight = weight.to(rows.dtype)
        if gone is not None:
            weight = weight.masked_fill(gone, 0)
    return F.embedding_bag(place, rows, per_sample_weights=weight, mode="sum")


def permute(x: Tensor, way: Way) -> Tensor:
    """Each token's row for each of its experts, sorted by expert: [T, H] -> [rows, H]."""
    return _Permute.apply(x, way)


def combine(y: Tensor, weight: Tensor, way: Way) -> Tensor:
    """The sum over a token's experts of weight [T, k] times y [rows, H] -> [T, H], of y's dtype.

    Keeps y and weight. The inverse of `permute`.
    """
    return _Combine.apply(y, weight, way)
