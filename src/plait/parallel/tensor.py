"""Tensor parallelism and sequence parallelism: Megatron's split on local tensors.

Papers: Megatron-LM 1909.08053 section 3; sequence parallelism 2205.05198 section 4.2.2.
The residual stream is [T, hidden] (T tokens of a micro batch, samples one behind the other).
Under sequence parallelism each rank has T / tp of the rows between the regions: a region is
entered by an all-gather of rows and left by a reduce-scatter; without it, entered for free and
left by an all-reduce. Backward is the mirror. The modules' weights are already this rank's part
(`spec/parameters.py` says which); here only their arithmetic is rewritten.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from plait.parallel import deferred
from plait.parallel.collectives import (
    Axis,
    Done,
    gather_columns,
    gather_in,
    reduce_out,
    scatter_rows,
    sum_back,
    sum_both,
)
from plait.parallel.deferred import Later
from plait.parallel.mesh import Mesh
from plait.spec.model import Model


def apply_tensor_parallel(
    module: nn.Module, model: Model, mesh: Mesh, later: Later | None = None
) -> None:
    """Rewrites a Transformer in place for this rank of the tp axis.

    later: where its maps put off their weight gradients (None: they never do). It takes the
    same rewritten maps, also over an axis of one rank.
    """
    axis, rows = mesh["tp"], mesh.layout.sequence_parallel
    if axis.size == 1 and later is None:
        return
    columns = FanOut(axis, rows, later)
    for layer in module.layers.values():
        attention, mlp = layer.attention, layer.moe.shared if layer.mlp is None else layer.mlp
        attention.fan_out = columns
        attention.o = RowParallel(attention.o, axis, rows, later)
        if model.mla is not None:
            attention.latents = FanOut(Axis("tp"), False, later)  # whole on every rank
            attention.spread = partial(gather_in if rows else sum_back, axis=axis)
        if mlp is not None:
            mlp.fan_out = columns
            mlp.down = RowParallel(mlp.down, axis, rows, later)
        if model.qk_norm == "full" and axis.size > 1:
            copies = mesh["kv"].size
            attention.q_norm = ShardedNorm(attention.q_norm, axis, 1)
            attention.k_norm = ShardedNorm(attention.k_norm, axis, copies)
    if module.embed is not None:
        module.embed.tokens = VocabEmbedding(module.embed.tokens, axis, rows, later)
        if module.embed.positions is not None:
            module.embed.positions = OwnRows(module.embed.positions, axis, rows, later)
    if module.head is not None:
        module.head.fan_out = columns
        if axis.size > 1:
            module.head.cross_entropy = VocabCrossEntropy(axis, model.vocab)
            module.head.register_forward_hook(
                lambda _, __, out: gather_columns(out, axis)[:, : model.vocab] if out.dim() else out
            )
    if rows:
        for name, child in module.named_modules():
            if name.rpartition(".")[2].endswith("dropout"):
                child.register_forward_pre_hook(lambda _, args: (args[0], axis.own_rows(args[1])))


class FanOut:
    """Column-parallel maps of one input; see `models.layers.fan_out`."""

    def __init__(self, axis: Axis, rows: bool, later: Later | None):
        self.axis, self.rows, self.later = axis, rows, later

    def __call__(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        weights = [w for linear in linears for w in (linear.weight, linear.bias)]
        return _Columns.apply(x, self.axis, self.rows, self.later, linears, *weights)


class _Columns(torch.autograd.Function):
    """y_i = x W_i^T + b_i for the maps i of one input, each rank with its own outputs.

    Only this rank's rows of x are kept; backward gathers them anew while it computes the input
    gradient, and reduces the input gradient while it computes the weight gradients. Where these
    are put off, so is that gather.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        axis: Axis,
        rows: bool,
        later: Later | None,
        linears: tuple[nn.Linear, ...],
        *weights: Tensor | None,
    ) -> Any:
        ctx.axis, ctx.rows, ctx.later, ctx.linears = axis, rows, later, linears
        ctx.biases = [b is not None for b in weights[1::2]]
        ctx.save_for_backward(x, *weights[::2])
        whole = axis.gather_rows(x)[0] if rows else x
        return tuple(
            F.linear(whole, w, b) for w, b in zip(weights[::2], weights[1::2], strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        axis, rows, later, linears = ctx.axis, ctx.rows, ctx.later, ctx.linears
        put_off = later is not None and later.queue is not None
        if not put_off:
            whole, gather = axis.gather_rows(x, wait=False) if rows else (x, Done())
        dx = grads[0] @ weights[0]
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            dx.addmm_(grad, weight)
        if rows:
            dx, reduction = axis.scatter_rows(dx, wait=False)
        else:
            reduction = axis.all_reduce(dx, wait=False)
        result: list[Tensor | None] = [None] * (2 * len(grads))
        if put_off:
            x = x.detach()  # as saved it would hold the whole graph
            later.queue.append(lambda: _column_weights(x, axis, rows, later, linears, grads))
        else:
            gather.wait()
            for i, (grad, bias) in enumerate(zip(grads, ctx.biases, strict=True)):
                result[2 * i] = grad.t() @ whole
                result[2 * i + 1] = grad.sum(0) if bias else None
        reduction.wait()
        return dx, None, None, None, None, *result


def _column_weights(
    x: Tensor,
    axis: Axis,
    rows: bool,
    later: Later,
    linears: tuple[nn.Linear, ...],
    grads: tuple[Tensor, ...],
) -> None:
    """The weight gradients of `_Columns` that were put off."""
    whole = axis.gather_rows(x)[0] if rows else x
    for linear, grad in zip(linears, grads, strict=True):
        later.deliver(linear.weight, grad.t() @ whole)
        if linear.bias is not None:
            later.deliver(linear.bias, grad.sum(0))


class RowParallel(nn.Module):
    """A map whose inputs are cut: partial results are summed, then the whole bias is added."""

    def __init__(self, linear: nn.Linear, axis: Axis, rows: bool, later: Later | None):
        super().__init__()
        self.weight, self.bias, self.later = linear.weight, linear.bias, later
        self.axis, self.rows, self.leave = axis, rows, scatter_rows if rows else reduce_out

    def forward(self, x: Tensor) -> Tensor:
        y = deferred.linear(x, self, self.later, self.axis if self.rows else None)
        y = self.leave(y, self.axis)
        return y if self.bias is None else y + self.bias


class VocabEmbedding(nn.Module):
    """A token table cut along the vocabulary: tokens of other ranks look up zeros."""

    def __init__(self, embedding: nn.Embedding, axis: Axis, rows: bool, later: Later | None):
        super().__init__()
        self.weight, self.later = embedding.weight, later
        self.axis, self.rows, self.leave = axis, rows, scatter_rows if rows else reduce_out

    def forward(self, tokens: Tensor) -> Tensor:
        if self.axis.size == 1:
            return deferred.lookup(tokens, self, self.later)
        own = tokens - self.axis.rank * self.weight.shape[0]
        elsewhere = (own < 0) | (own >= self.weight.shape[0])
        own = own.masked_fill(elsewhere, 0)
        if self.rows and self.later is not None:
            return _OwnLookup.apply(own, elsewhere, self.weight, self.axis, self.later, self)
        y = deferred.lookup(own, self, self.later)
        return self.leave(y.masked_fill(elsewhere.unsqueeze(-1), 0), self.axis)


class _OwnLookup(torch.autograd.Function):
    """This rank's rows of the sum over ranks of an embedding, whose gradient may be put off; of
    the output gradient only those rows are kept for that."""

    @staticmethod
    def forward(
        ctx: Any,
        index: Tensor,
        elsewhere: Tensor,
        weight: Tensor,
        axis: Axis,
        later: Later,
        owner: nn.Module,
    ) -> Tensor:
        ctx.axis, ctx.later, ctx.owner, ctx.size = axis, later, owner, weight.shape[0]
        ctx.save_for_backward(index, elsewhere)
        y = F.embedding(index, weight).masked_fill_(elsewhere.unsqueeze(-1), 0)
        return axis.scatter_rows(y)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        index, elsewhere = ctx.saved_tensors
        axis, later, owner, size = ctx.axis, ctx.later, ctx.owner, ctx.size

        def make() -> Tensor:
            whole = axis.gather_rows(grad)[0].masked_fill_(elsewhere.unsqueeze(-1), 0)
            return torch.ops.aten.embedding_dense_backward(whole, index, size, -1, False)

        dw = make() if later.queue is None else None
        if dw is None:
            later.queue.append(lambda: later.deliver(owner.weight, make()))
        return None, None, dw, None, None, None


class OwnRows(nn.Module):
    """An embedding, under sequence parallelism of this rank's rows only (learned positions)."""

    def __init__(self, embedding: nn.Embedding, axis: Axis, rows: bool, later: Later | None):
        super().__init__()
        self.weight, self.later = embedding.weight, later
        self.axis, self.rows = axis, rows

    def forward(self, index: Tensor) -> Tensor:
        index = self.axis.own_rows(index) if self.rows else index
        return deferred.lookup(index, self, self.later)


class ShardedNorm(nn.Module):
    """RMSNorm over a dim that is cut over the ranks (`copies` ranks hold the same part)."""

    def __init__(self, norm: nn.Module, axis: Axis, copies: int):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps
        self.offset, self.axis, self.copies = norm.offset, axis, copies

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        square = wide.square().sum(-1, keepdim=True) / self.copies
        width = x.shape[-1] * self.axis.size // self.copies
        y = wide * torch.rsqrt(sum_both(square, self.axis) / width + self.eps)
        weight = self.weight.to(wide.dtype)
        return (y * (weight + 1 if self.offset else weight)).to(x.dtype)


class VocabCrossEntropy:
    """Sum of the cross entropy over valid tokens, the logits cut along the vocabulary."""

    def __init__(self, axis: Axis, vocab: int):
        self.axis, self.vocab = axis, vocab

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        with self.axis.scope.during("loss"):
            return _VocabCrossEntropy.apply(logits, targets, self.axis, self.vocab)


class _VocabCrossEntropy(torch.autograd.Function):
    """logits [T, V / tp], targets [T] (-1: not valid) -> scalar.

    Two small messages: the maxima [T], then sums of exponentials and target logits [2, T].
    Backward needs none: the softmax is kept and turned into the gradient in place.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, axis: Axis, vocab: int) -> Tensor:
        columns = logits.shape[1]
        start = axis.rank * columns
        softmax = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        if start + columns > vocab:  # padding of the vocabulary must not win
            softmax[:, max(vocab - start, 0) :] = float("-inf")
        top = softmax.amax(1)
        axis.all_reduce(top, op="max")
        softmax.sub_(top.unsqueeze(1))
        own = targets - start
        mine = (own >= 0) & (own < columns)
        own = own.masked_fill(~mine, 0).unsqueeze(1)
        target = softmax.gather(1, own).squeeze(1).masked_fill(~mine, 0)
        softmax.exp_()
        both = torch.stack((softmax.sum(1), target))
        axis.all_reduce(both)
        softmax.div_(both[0].unsqueeze(1))
        ctx.save_for_backward(softmax, own, mine, targets)
        ctx.dtype = logits.dtype
        return (both[0].log() - both[1]).masked_fill(targets < 0, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, own, mine, targets = ctx.saved_tensors
        softmax.scatter_add_(1, own, -mine.unsqueeze(1).to(softmax.dtype))
        scale = grad * (targets >= 0).unsqueeze(1).to(softmax.dtype)
        return softmax.mul_(scale).to(ctx.dtype), None, None, None
