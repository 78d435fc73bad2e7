"""Mixture of experts: a router that chooses, experts that compute, one device.

The objective of a step with N valid tokens in its global batch is, over all tokens t and mixtures,

    1/N (sum_t cross entropy + sum_mixtures sum_t (aux_loss sum_i f_i p_ti + z_loss lse_t^2))

p_ti: the score of token t for expert i, of all experts, adding up to 1 for a token. lse_t: the
log-sum-exp of its logits. f_i = E c_i / (k T): of T tokens' k T choices (before any dropping), c_i
are for expert i, against an even share; 1 where experts are balanced. For the form "sequence" the T
tokens are those of t's own sequence, and (1/T) sum_t sum_i f_i p_ti is the published loss of that
sequence (2412.19437 equations 17 to 20; Switch, 2101.03961 equation 4, with k = 1); sequences
count by their tokens. "batch": the tokens of t's micro batch. "global": those, and all that have
passed backward since the step began.

f takes no gradient. So each token adds its own term once f is known, and micro batches, rows, and
ranks add up as the cross entropy does: summed here, divided by N once. A mixture does not return
its loss. It puts the gradient in on the way back (`_Attach`), times `scale`: whatever the summed
cross entropy is multiplied by before backward.

A parallel version sets `MoE.dispatch`, `MoE.ranks`, `MoE.scale`, the `Experts`' `grouped` and the
router's `project`, and changes nothing else.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from plait.models import layers as L
from plait.models.grouped import counts, grouped
from plait.models.permute import Way, combine, permute
from plait.models.routing import choose, log_sum_exp, within_capacity
from plait.spec.model import Model


class Router(nn.Module):
    """Scores experts: [T, hidden] -> logits [T, E], float32, or float64 for a float64 stream.

    Attributes:
        weight: [E, hidden]. bias: [E] or None. correction: [E] or None, added for the choice only.
        project: the map itself, (x, router) -> [T, E] without the bias.
    """

    def __init__(self, model: Model):
        super().__init__()
        moe = model.moe
        self.weight = nn.Parameter(torch.empty(moe.experts, model.hidden))
        nn.init.normal_(self.weight, std=0.02)
        self.bias = nn.Parameter(torch.zeros(moe.experts)) if moe.router_bias else None
        self.correction = nn.Parameter(torch.zeros(moe.experts)) if moe.correction else None
        self.project: Callable[[Tensor, nn.Module], Tensor] = project

    def forward(self, x: Tensor) -> Tensor:
        logits = self.project(x, self)
        return logits if self.bias is None else logits + self.bias.to(logits.dtype)


class _Project(torch.autograd.Function):
    """x W^T in at least float32. Keeps x and W in their own dtypes."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(L.accurate(x), L.accurate(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dx = (grad @ L.accurate(weight)).to(x.dtype)
        return dx, (grad.t() @ L.accurate(x)).to(weight.dtype)


def project(x: Tensor, router: nn.Module) -> Tensor:
    """[T, hidden] times router.weight [E, hidden] -> [T, E], at least float32."""
    return _Project.apply(x, router.weight)


class Bank(nn.Module):
    """One matrix of each expert: weight [E, out, in], bias [E, out] or None.

    Attributes:
        adds: whether the bias is added here, and not by another who makes a part of the result.
    """

    def __init__(self, experts: int, outputs: int, inputs: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        nn.init.normal_(self.weight, std=0.02)
        self.bias = nn.Parameter(torch.zeros(experts, outputs)) if bias else None
        self.adds = True


class Experts(nn.Module):
    """The MLPs of all experts. Their number is that of the banks: a part of them just works.

    Attributes:
        grouped: (x [M, in], bank, counts) -> [M, out], rows grouped by expert.
        count: index [T, k] -> how many rows each expert gets, on the host, for `at_home`: the one
            place where sizes depend on data.
    """

    def __init__(self, model: Model):
        super().__init__()
        moe, hidden = model.moe, model.hidden
        self.kind = model.mlp
        self.gate = Bank(moe.experts, moe.ffn, hidden, moe.bias) if model.gated else None
        self.up = Bank(moe.experts, moe.ffn, hidden, moe.bias)
        self.down = Bank(moe.experts, hidden, moe.ffn, moe.bias)
        self.grouped = grouped
        self.count: Callable[[Tensor], list[int]] = partial(counts, experts=moe.experts)

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        """[M, hidden] -> [M, hidden]: the first counts[0] rows by the first expert, and so on."""
        up = self.grouped(x, self.up, counts)
        if self.gate is None:
            y = L.activate(self.kind, up)
        else:
            y = L.gated(self.kind, self.grouped(x, self.gate, counts), up)
        return self.grouped(y, self.down, counts)


class Alone:
    """What ranks that share a micro batch do for each other's routing, where there is only one.

    Of the rows of a micro batch (as the residual stream has them) each rank routes its own. Ranks
    that have the same rows, as under tensor parallelism without sequence parallelism, do the same
    work and share nothing: then the router's gradient is whole on each, as its other inputs' are.
    """

    def total(self, counts: Tensor, form: str) -> Tensor:
        """Sums counts over the ranks whose tokens count together; `form` as `MoE.aux_form`."""
        return counts

    def own(self, rows: Tensor) -> Tensor:
        """This rank's part of a tensor that says something of each row of the stream."""
        return rows

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks that share these sequences, in any order."""
        return rows

    def part(self, rows: Tensor) -> Tensor:
        """The inverse of `gather`."""
        return rows


class MoE(nn.Module):
    """A mixture of experts in place of the MLP: [T, hidden] -> [T, hidden].

    Attributes:
        dispatch: (x [T, hidden], index int64 [T, k], weight [T, k]) -> [T, hidden], the weighted
            sum of what experts `index` make of x; an index of E means none. It uses `experts`.
        ranks: see `Alone`.
        scale: a number or scalar tensor; what the summed loss is multiplied by before backward.
        load: int64 [E], choices of each expert in the last forward, of this rank's tokens.
        received: those of them that are within its capacity; all of them where it has none.
        tally: what has passed backward, so each micro batch just once, since `take`, which a
            trainer calls once a step.
    """

    def __init__(self, model: Model, shared: nn.Module | None):
        super().__init__()
        self.moe = model.moe
        self.router = Router(model)
        self.experts = Experts(model)
        self.shared = shared
        self.dispatch: Callable[[Tensor, Tensor, Tensor], Tensor] = partial(at_home, self.experts)
        self.ranks = Alone()
        self.scale: float | Tensor = 1.0
        self.load: Tensor | None = None
        self.received: Tensor | None = None
        self.tally: tuple[Tensor, Tensor, Tensor] | None = None

    def forward(self, x: Tensor, ctx: Any) -> Tensor:
        """x: this rank's rows of the stream. ctx: a `transformer.Context`."""
        index, weight = self.route(x, ctx)
        y = self.dispatch(x, index, weight)
        return y if self.shared is None else y + self.shared(x)

    def route(self, x: Tensor, ctx: Any) -> tuple[Tensor, Tensor]:
        """[T, hidden] -> (index int64 [T, k], weight [T, k], at least float32)."""
        moe, rows = self.moe, ctx.rows
        logits = self.router(x)
        index, weight, scores = choose(moe, logits, self.router.correction)
        sequence = self.ranks.own(torch.arange(len(rows), device=rows.device) // ctx.seq)
        key = sequence[:, None] * moe.experts + index
        table = torch.zeros(ctx.batch * moe.experts, dtype=torch.int64, device=x.device)
        table = table.scatter_add_(0, key.flatten(), torch.ones_like(index).flatten())
        table = table.view(ctx.batch, moe.experts)
        self.load = self.received = table.sum(0)
        losses = logits.new_zeros(2)
        if self.training and (moe.aux_loss or moe.z_loss):
            losses = torch.stack(self._losses(logits, scores, sequence, table, ctx))
        keep = None
        if moe.capacity is not None:
            keep = self._keep(index, weight.detach(), sequence, ctx)
            self.received = torch.zeros_like(self.load)
            self.received.scatter_add_(0, index.flatten(), keep.flatten().to(torch.int64))
        weight = _Attach.apply(weight, losses, self.router.correction, self)
        if keep is not None:
            index = torch.where(keep, index, moe.experts)
            weight = torch.where(keep, weight, 0.0)
        return index, weight

    def take(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """(load int64 [E], received int64 [E], losses [2]: summed over tokens, aux and z,
        coefficients included) of what passed backward since the last time, this rank's; None if
        nothing did."""
        taken, self.tally = self.tally, None
        return taken

    def _losses(
        self, logits: Tensor, scores: Tensor, sequence: Tensor, table: Tensor, ctx: Any
    ) -> tuple[Tensor, Tensor]:
        moe = self.moe
        aux = z = logits.new_zeros(())
        if moe.aux_loss:
            if moe.aux_form != "sequence":
                table, sequence = table.sum(0, keepdim=True), torch.zeros_like(sequence)
            if moe.aux_form == "global":
                # Recomputed, it adds what it did: in a pipeline more has passed since.
                before = ctx.passed.setdefault(self, self.tally and self.tally[0])
                table = table if before is None else table + before
            table = self.ranks.total(table, moe.aux_form)
            table = table.to(scores.dtype)
            share = moe.experts * table / table.sum(1, keepdim=True)
            aux = moe.aux_loss * (share[sequence] * scores).sum()
        if moe.z_loss:
            z = moe.z_loss * log_sum_exp(logits).square().sum()
        return aux, z

    def _keep(self, index: Tensor, weight: Tensor, sequence: Tensor, ctx: Any) -> Tensor:
        """Which choices are within their expert's capacity, bool [T, k]."""
        moe, ranks = self.moe, self.ranks
        index, sequence = ranks.gather(index), ranks.gather(sequence)
        rows = ranks.gather(ranks.own(ctx.rows))
        seq = len(rows) // ctx.batch
        most = math.ceil(moe.capacity * seq * moe.topk / moe.experts)
        first = ranks.gather(weight) if moe.drop == "probability" else None
        return ranks.part(within_capacity(index, rows, sequence, moe.experts, most, first))


class _Attach(torch.autograd.Function):
    """The weights as they are; on the way back the losses' gradients join, each exactly once.

    The correction's "gradient" is, for each expert, E times its choices minus all choices: what
    it has beyond an even share. It is a sum over tokens like any gradient, so the sum over micro
    batches and ranks that makes gradients whole makes it whole too; its sign is what counts.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, losses: Tensor, correction: Tensor | None, moe: MoE
    ) -> Tensor:
        ctx.moe = moe
        ctx.save_for_backward(moe.load, moe.received, losses.detach())
        ctx.dtype = None if correction is None else correction.dtype
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        moe, (load, received, losses) = ctx.moe, ctx.saved_tensors
        moe.tally = _added(moe.tally, (load, received, losses))
        excess = None if ctx.dtype is None else (load * len(load) - load.sum()).to(ctx.dtype)
        return grad, torch.ones_like(losses) * moe.scale, excess, None


def _added(seen: tuple[Tensor, ...] | None, more: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return more if seen is None else tuple(a + b for a, b in zip(seen, more, strict=True))


@torch.no_grad()
def correct(correction: Tensor, excess: Tensor, speed: float) -> None:
    """The step of a router's correction from its gradient of the whole global batch, in place:
    an expert above an even share becomes less likely by `speed`, one below more (2408.15664)."""
    correction.sub_(excess.sign(), alpha=speed)


def mixtures(module: nn.Module) -> Iterator[MoE]:
    """The mixtures in a module, in their order."""
    return (m for m in module.modules() if isinstance(m, MoE))


def at_home(experts: Experts, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """`MoE.dispatch` on one device: rows are sorted by expert, computed, and summed by token."""
    count = experts.count(index)
    way = Way(index, sum(count))
    return combine(experts(permute(x, way), count), weight, way)
