"""Expert parallelism: each rank has some of the experts, and tokens travel to theirs.

Papers: GShard 2006.16668 section 3; Megatron Core MoE for experts that are cut themselves (etp).
The experts of a layer lie on a grid of their own over the ranks of a stage: etp, ep, edp. A rank
routes its own rows of the stream (under tensor parallelism every tp rank a part of them, whether or
not the norm regions are cut along the sequence), then

    counts      go to the ranks of ep, and to those of etp: sizes are only known now
    rows        go to the rank of ep that has their expert (all-to-all), and with etp to all
                etp ranks of that, each with a part of the expert's width
    results     come back the same way, those of etp added up
    each token  adds up what its experts made, weighted

and backward is the mirror. Every choice is sent once; nothing is padded and nothing is dropped
unless the model has a capacity.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from plait.models.grouped import bias_gradient, product, tally, weight_gradient
from plait.models.layers import accurate
from plait.models.moe import Experts, MoE, mixtures
from plait.models.permute import Way, combine, permute
from plait.models.transformer import Transformer
from plait.parallel import deferred
from plait.parallel.collectives import Axis
from plait.parallel.deferred import Later
from plait.parallel.mesh import Mesh


def apply_expert_parallel(module: Transformer, mesh: Mesh, later: Later | None) -> None:
    """Puts the mixtures of a Transformer on the ranks of the mesh, in place.

    later: where experts and routers put off their weight gradients (None: they never do).
    """
    for moe in mixtures(module):
        moe.dispatch = Dispatch(moe.experts, moe.moe.experts, mesh)
        moe.ranks = Together(mesh)
        if later is not None:
            moe.experts.grouped = partial(grouped, later=later)
            moe.router.project = partial(project, later=later)
        if mesh["etp"].rank > 0:  # the sum over etp has the bias once
            moe.experts.down.adds = False
        if mesh["tp"].size > 1 and not mesh.layout.sequence_parallel:
            moe.forward = partial(_own_part, moe, mesh["tp"])


# ------------------------------------------------------------------------------------------
# Who routes what


class Together:
    """What the ranks that share a micro batch do for each other's routing (`models.moe.Alone`)."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh

    def total(self, counts: Tensor, form: str) -> Tensor:
        axes = ["tp", "fsdp", "dp_replicate"] if form == "global" else ["tp", "cp"]
        counts = counts.clone()
        for axis in axes:
            self.mesh[axis].all_reduce(counts)
        return counts

    def own(self, rows: Tensor) -> Tensor:
        return self.mesh["tp"].own_rows(rows)

    def gather(self, rows: Tensor) -> Tensor:
        for axis in ("tp", "cp"):
            if self.mesh[axis].size > 1:
                rows = self.mesh[axis].gather_rows(rows)[0]
        return rows

    def part(self, rows: Tensor) -> Tensor:
        for axis in ("cp", "tp"):
            rows = self.mesh[axis].own_rows(rows)
        return rows


def _own_part(moe: MoE, tp: Axis, x: Tensor, ctx: Any) -> Tensor:
    """A mixture whose input is the same on all tp ranks: each takes care of its own rows."""
    own = _Own.apply(x, tp)
    index, weight = moe.route(own, ctx)
    y = _Whole.apply(moe.dispatch(own, index, weight), tp)
    return y if moe.shared is None else y + moe.shared(x)


class _Own(torch.autograd.Function):
    """Own rows of what all ranks have; their gradients are put together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.own_rows(x).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.gather_rows(grad)[0], None


class _Whole(torch.autograd.Function):
    """The rows of all ranks; all have the same gradient of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.gather_rows(x)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.own_rows(grad).contiguous(), None


# ------------------------------------------------------------------------------------------
# Rows to their experts and back


class Dispatch:
    """`MoE.dispatch` over the expert grid.

    Attributes:
        read: (rows that go to each expert, int64 [E]; rows that come to this rank's experts, int64
            [etp, ep, E / ep], by the rank of etp and of ep that they come from) -> both on the
            host. The one place where sizes depend on data, and where the host waits for the
            device; a dry run puts a given table here.
        moved: takes the rows that each forward (not its repetition) sends away, gets from the ranks
            of ep, and computes; None: nobody asks.
    """

    def __init__(self, experts: Experts, total: int, mesh: Mesh):
        self.experts, self.total, self.etp, self.ep = experts, total, mesh["etp"], mesh["ep"]
        self.read: Callable[[Tensor, Tensor], tuple[list, list]] = _read
        self.moved: list[tuple[int, int, int]] | None = None

    def __call__(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """x [n, hidden], index int64 [n, k], weight [n, k] -> [n, hidden]."""
        going = tally(index, self.total)
        come = self._exchange(going)
        counts, coming = self.read(going, come)
        way = Way(index, sum(counts))
        mine = len(counts) // self.ep.size
        there = [sum(counts[i * mine : (i + 1) * mine]) for i in range(self.ep.size)]
        rows = [[sum(block) for block in blocks] for blocks in coming]  # [etp][ep]
        here, all_rows = rows[self.etp.rank], [sum(r) for r in rows]
        if self.moved is not None and self.ep.scope.phase == "forward":
            self.moved.append((sum(counts), sum(here), sum(all_rows)))

        y = permute(x, way)
        y = _Exchange.apply(y, self.ep, there, here)
        y = _Spread.apply(y, self.etp, all_rows)
        blocks = [n for one in coming for block in one for n in block]
        sizes = [sum(blocks[e::mine]) for e in range(mine)]
        order = None if len(blocks) == mine else _by_expert(come, sum(blocks))
        if order is not None:  # else they are of one rank, which has sorted them
            y = _Sorted.apply(y, order)
        y = self.experts(y, sizes)
        if order is not None:
            y = _Unsorted.apply(y, order)
        y = _AddUp.apply(y, self.etp, all_rows)
        y = _Exchange.apply(y, self.ep, here, there)
        return combine(y, weight, way)

    def _exchange(self, going: Tensor) -> Tensor:
        come = going
        if self.ep.size > 1:
            come = torch.empty_like(going)
            self.ep.all_to_all(come, going)
        everyone = self.etp.gather_rows(come)[0] if self.etp.size > 1 else come
        return everyone.view(self.etp.size, self.ep.size, -1)


def _read(going: Tensor, come: Tensor) -> tuple[list, list]:
    """Both on the host, by one copy."""
    both = torch.cat((going, come.flatten())).cpu()
    return both[: len(going)].tolist(), both[len(going) :].view(come.shape).tolist()


def _by_expert(come: Tensor, rows: int) -> Tensor:
    """int64 [rows]: which of the rows, that came in blocks of one expert each, is first, second,
    ... when they are sorted by expert. come [..., experts]: rows of each block, in their order."""
    expert = torch.arange(come.shape[-1], device=come.device).expand_as(come).flatten()
    repeated = expert.repeat_interleave(come.flatten(), output_size=rows)
    return repeated.argsort(stable=True)


class _Exchange(torch.autograd.Function):
    """all-to-all of rows: `out` go to each rank, `back` come from each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, out: list[int], back: list[int]) -> Tensor:
        ctx.axis, ctx.out, ctx.back = axis, out, back
        return _all_to_all(x, axis, out, back)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grad, ctx.axis, ctx.back, ctx.out), None, None, None


def _all_to_all(x: Tensor, axis: Axis, out: list[int], back: list[int]) -> Tensor:
    if axis.size == 1:
        return x
    result = x.new_empty(sum(back), *x.shape[1:])
    axis.all_to_all(result, x.contiguous(), back, out)
    return result


class _Spread(torch.autograd.Function):
    """The rows of all ranks one behind the other; their gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, rows: list[int]) -> Tensor:
        ctx.axis, ctx.rows = axis, rows
        return _spread(x, axis, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _add_up(grad, ctx.axis, ctx.rows), None, None


class _AddUp(torch.autograd.Function):
    """Of rows that all ranks have a part of, the sum of this rank's own rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, rows: list[int]) -> Tensor:
        ctx.axis, ctx.rows = axis, rows
        return _add_up(x, axis, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _spread(grad, ctx.axis, ctx.rows), None, None


def _spread(x: Tensor, axis: Axis, rows: list[int]) -> Tensor:
    """An all-gather of unequal pieces: every rank sends its rows to every other."""
    if axis.size == 1:
        return x
    return _all_to_all(x.repeat(axis.size, 1), axis, [len(x)] * axis.size, rows)


def _add_up(x: Tensor, axis: Axis, rows: list[int]) -> Tensor:
    """A reduce-scatter of unequal pieces."""
    if axis.size == 1:
        return x
    own = rows[axis.rank]
    parts = _all_to_all(x, axis, rows, [own] * axis.size)
    return parts.view(axis.size, own, *x.shape[1:]).sum(0)


class _Sorted(torch.autograd.Function):
    """Rows in another order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return _put_back(grad, order), None


class _Unsorted(torch.autograd.Function):
    """Rows in the order that they had."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return _put_back(x, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return grad.index_select(0, order), None


def _put_back(x: Tensor, order: Tensor) -> Tensor:
    return torch.empty_like(x).index_copy_(0, order, x)


# ------------------------------------------------------------------------------------------
# Weight gradients that are put off


class _Grouped(torch.autograd.Function):
    """`models.grouped.grouped` whose weight gradient may be put off."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        bank: nn.Module,
        counts: list[int],
        later: Later,
    ) -> Tensor:
        ctx.bank, ctx.counts, ctx.later, ctx.biased = bank, counts, later, bias is not None
        ctx.save_for_backward(x, weight)
        return product(x, weight.transpose(1, 2), counts, bias if bank.adds else None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        bank, counts, later = ctx.bank, ctx.counts, ctx.later
        grad = grad.contiguous()
        dx = product(grad, weight, counts)
        if later.queue is None:
            db = bias_gradient(grad, counts, bank.adds) if ctx.biased else None
            return dx, weight_gradient(grad, x, counts), db, None, None, None
        x, biased = x.detach(), ctx.biased  # as saved it would hold the whole graph

        def make() -> None:
            later.deliver(bank.weight, weight_gradient(grad, x, counts))
            if biased:
                later.deliver(bank.bias, bias_gradient(grad, counts, bank.adds))

        later.queue.append(make)
        return dx, None, None, None, None, None


def grouped(x: Tensor, bank: nn.Module, counts: list[int], later: Later) -> Tensor:
    """See `models.grouped.grouped`."""
    return _Grouped.apply(x, bank.weight, bank.bias, bank, counts, later)


def project(x: Tensor, router: nn.Module, later: Later) -> Tensor:
    """[T, hidden] times router.weight [E, hidden] -> [T, E], at least float32; see
    `models.moe.project`."""
    return deferred.linear(accurate(x), router, later)
