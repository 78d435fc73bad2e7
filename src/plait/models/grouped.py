"""Grouped matrix products: each stretch of rows by a matrix of its own.

torch's `grouped_mm` has no float64; there a loop over the groups computes the same. Fake tensors
have no values, and it is enough that the result is there. What backward needs is in functions of
its own, so that a weight gradient can be made later than the input gradient.
"""

from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd.function import once_differentiable


def tally(index: Tensor, experts: int) -> Tensor:
    """int64 [E]: how many of the choices [T, k] are for each expert; an index of E is for none.

    On the device, and without waiting for it, as `bincount` does for its size.
    """
    counts = index.new_zeros(experts + 1)
    return counts.scatter_add_(0, index.flatten(), torch.ones_like(index).flatten())[:experts]


def counts(index: Tensor, experts: int) -> list[int]:
    """The same on the host."""
    return tally(index, experts).tolist()


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, counts: list[int], adds: bool
    ) -> Tensor:
        ctx.counts, ctx.bias, ctx.adds = counts, bias is not None, adds
        ctx.save_for_backward(x, weight)
        return product(x, weight.transpose(1, 2), counts, bias if adds else None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        dx = product(grad, weight, ctx.counts) if ctx.needs_input_grad[0] else None
        dw = db = None
        if ctx.needs_input_grad[1]:
            dw = weight_gradient(grad, x, ctx.counts)
        if ctx.bias:
            db = bias_gradient(grad, ctx.counts, ctx.adds)
        return dx, dw, db, None, None


def grouped(x: Tensor, bank: nn.Module, counts: list[int]) -> Tensor:
    """Row by row x W^T + b with the row's own expert.

    Args:
        x: [M, in], the first counts[0] rows for the first expert, and so on; M = sum(counts).
        bank: its weight [E, out, in], bias [E, out] or None, and whether it `adds` that.
        counts: E numbers on the host; some may be 0.

    Returns:
        [M, out].
    """
    return _Grouped.apply(x, bank.weight, bank.bias, counts, bank.adds)


def product(x: Tensor, weight: Tensor, counts: list[int], bias: Tensor | None = None) -> Tensor:
    """[M, in] by [E, in, out] -> [M, out]; with [E, out] added to each row of its group."""
    if _fused(x, weight):
        y = F.grouped_mm(x, weight, offs=_offsets(counts, x.device))
    else:
        y = x.new_empty(x.shape[0], weight.shape[2])
        if isinstance(x, FakeTensor):
            return y
        for e, (a, b) in enumerate(_stretches(counts)):
            torch.mm(x[a:b], weight[e], out=y[a:b])
    if bias is not None:
        for e, (a, b) in enumerate(_stretches(counts)):
            y[a:b] += bias[e]
    return y


def weight_gradient(grad: Tensor, x: Tensor, counts: list[int]) -> Tensor:
    """[M, out], [M, in] -> [E, out, in]: the sum over a group's rows of their outer products."""
    if _fused(x, grad):
        return F.grouped_mm(grad.t(), x, offs=_offsets(counts, x.device))
    dw = x.new_empty(len(counts), grad.shape[1], x.shape[1])
    if isinstance(x, FakeTensor):
        return dw
    for e, (a, b) in enumerate(_stretches(counts)):
        torch.mm(grad[a:b].t(), x[a:b], out=dw[e])
    return dw


def bias_gradient(grad: Tensor, counts: list[int], adds: bool = True) -> Tensor:
    """[M, out] -> [E, out]: the sum over a group's rows; zeros where the bias was not added."""
    if not adds:
        return grad.new_zeros(len(counts), grad.shape[1])
    return torch.stack([grad[a:b].sum(0) for a, b in _stretches(counts)])


def _stretches(counts: list[int]) -> list[tuple[int, int]]:
    ends = list(accumulate(counts))
    return list(zip([0, *ends], ends, strict=False))


def _offsets(counts: list[int], device: torch.device) -> Tensor:
    # From pinned memory, so that the host need not wait until the device gets there.
    pinned = device.type == "cuda"
    ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, pin_memory=pinned)
    return ends.to(device, non_blocking=True)


def _fused(x: Tensor, other: Tensor) -> bool:
    """torch's kernel takes these: rows of whole 16 bytes; on GPUs bfloat16 only."""
    if isinstance(x, FakeTensor) or x.numel() == 0 or x.dtype == torch.float64:
        return False
    if x.device.type != "cpu" and x.dtype != torch.bfloat16:
        return False
    widths = (x.shape[-1], *other.shape[-2:])
    return all(n * x.element_size() % 16 == 0 for n in widths)
