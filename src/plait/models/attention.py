"""Causal attention as dense calls of a kernel, put together by their log-sum-exps.

What the causal mask, a sliding window and the documents of a packed sample leave of the scores is
cut into rectangles and triangles of [queries, keys]. Each is one call of a kernel that returns its
output and the log-sum-exp of its scores; two results for the same queries and different keys are
merged exactly. No mask of [S, S] is ever made, what is masked is not computed, and memory is
linear in the sequence.

Backward is exact piece by piece: with the log-sum-exp of *all* keys a piece knows its own
probabilities, exp(score - lse), and with the whole output its share of the softmax's gradient
(Dao et al. 2205.14135, appendix B.2; Liu et al. 2310.01889).

Where keys and values come from is a `Source`: here they are all at hand, `parallel/context.py`
brings them from other ranks.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.models import kernels
from plait.models.kernels import Scores
from plait.spec.calls import Call, calls

#: Which samples of the batch, and their calls.
Plan = Sequence[tuple[slice, tuple[Call, ...]]]


class Source(Protocol):
    """Where keys and values come from, block by block."""

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[Plan, Tensor, Tensor]]:
        """From this rank's k and v: blocks with their calls."""
        ...

    def gradients(
        self, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor
    ) -> Iterator[tuple[Plan, Tensor, Tensor, Tensor, Tensor]]:
        """The blocks again, each with zeros to which its gradients are added before the next one
        is asked for. At the end dk and dv, zeros before, hold the gradients of k and v."""
        ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Sequence | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of whole samples on one device.

    Args:
        q: [B, S, heads, dim].
        k, v: [B, S, kv heads, dim], heads a multiple of kv heads; v may have another dim.
        segments: lengths of the documents that are packed into a sample, of which none sees
            another: a tuple for all samples, or one for each; None: a sample is one document.
        window: a query sees itself and the window - 1 positions before it; None: all before it.
        scale, softcap: see `Scores`; scale None: 1 / sqrt(dim).
        sinks: [heads], a logit that every query also looks at, with a value of zero (gpt-oss).

    Returns:
        [B, S, heads, v's dim].
    """
    whole = ((0, q.shape[1]),)
    each = per_sample(segments, q.shape[:2])
    found = [calls(whole, whole, documents, window) for documents in each]
    return attend(q, k, v, AtHand(plan(found)), make_scores(q, scale, softcap), sinks)


def attend(
    q: Tensor, k: Tensor, v: Tensor, source: Source, scores: Scores, sinks: Tensor | None = None
) -> Tensor:
    """Attention of this rank's queries over every block of a source; shapes as in `attention`."""
    return _Attention.apply(q, k, v, sinks, source, scores)


def make_scores(q: Tensor, scale: float | None, softcap: float | None) -> Scores:
    return Scores(1 / math.sqrt(q.shape[-1]) if scale is None else scale, softcap)


def per_sample(segments: Sequence | None, shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Document lengths: of one sample where all are alike, else of every sample."""
    batch, seq = shape
    if segments is None:
        return [(seq,)]
    each = [tuple(segments)] if isinstance(segments[0], int) else [tuple(s) for s in segments]
    assert len(each) in (1, batch), (len(each), batch)
    assert all(sum(documents) == seq for documents in each), (each, seq)
    return each[:1] if len(set(each)) == 1 else each


def plan(found: Sequence[tuple[Call, ...]]) -> Plan:
    """The calls of one sample for the whole batch, or those of every sample."""
    if len(found) == 1:
        return [(slice(None), found[0])]
    return [(slice(b, b + 1), some) for b, some in enumerate(found)]


# ------------------------------------------------------------------------------------------
# Running them


class AtHand(NamedTuple):
    """A source that has everything itself."""

    plan: Plan

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[Plan, Tensor, Tensor]]:
        yield self.plan, k, v

    def gradients(
        self, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor
    ) -> Iterator[tuple[Plan, Tensor, Tensor, Tensor, Tensor]]:
        yield self.plan, k, v, dk, dv


def merge(o: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The output over two sets of keys from the outputs over each; lse -inf: over none.

    o [..., dim], lse [...].
    """
    total = torch.logaddexp(lse, other_lse)
    # Where neither has seen a key the weights are 0, not exp(-inf + inf).
    base = total.clamp_min(torch.finfo(total.dtype).min)
    mine, theirs = (lse - base).exp_()[..., None], (other_lse - base).exp_()[..., None]
    return o * mine + other * theirs, total


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        source: Source,
        scores: Scores,
    ) -> Tensor:
        o = lse = None
        for some, keys, values in source.blocks(k, v):
            o, lse = _add(o, lse, q, keys, values, some, scores)
            del keys, values  # the source may need their memory
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype))
            o, lse = o * (lse - total).exp_()[..., None], total
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse, sinks)
        ctx.source, ctx.scores = source, scores
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, sinks = ctx.saved_tensors
        wide, dsinks = kernels.precise(q.dtype), None
        call = _only_call(ctx.source.plan, q) if isinstance(ctx.source, AtHand) else None
        if call is not None and call.kind == "causal":  # then it is of all keys too
            dq, dk, dv = kernels.backward(grad, q, k, v, o, lse, True, ctx.scores)
        else:
            dq, dk, dv = _gradients(grad, q, k, v, o, lse, ctx.source, ctx.scores)
        if sinks is not None:
            weight = (sinks.to(wide) - lse).exp_()
            dsinks = -(weight * (grad.to(wide) * o.to(wide)).sum(-1)).sum((0, 1)).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None


def _only_call(some: Plan, q: Tensor) -> Call | None:
    """The call, if it is the only one, of every sample and query, and needs no turning."""
    if len(some) == 1 and some[0][0] == slice(None) and len(some[0][1]) == 1:
        (call,) = some[0][1]
        return call if call.kind != "anti" and (call.q0, call.q1) == (0, q.shape[1]) else None
    return None


def _gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    source: Source,
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of q, k and v, in `kernels.precise`, call by call."""
    dq, dk, dv = (torch.zeros_like(t, dtype=lse.dtype) for t in (q, k, v))
    for some, keys, values, dkeys, dvalues in source.gradients(k, v, dk, dv):
        for samples, found in some:
            for call in found:
                parts = (t[samples] for t in (grad, q, keys, values, o, lse, dq, dkeys, dvalues))
                _add_gradients(call, *parts, scores)
        del keys, values, dkeys, dvalues  # the source may need their memory
    return dq, dk, dv


def _add(
    o: Tensor | None,
    lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    some: Plan,
    scores: Scores,
) -> tuple[Tensor, Tensor]:
    """Adds a block of keys to the output (in `kernels.precise`, None at first)."""
    wide = kernels.precise(q.dtype)
    call = _only_call(some, q) if o is None else None
    if call is not None:
        keys = slice(call.k0, call.k1)
        o, lse = kernels.forward(q, k[:, keys], v[:, keys], call.kind == "causal", scores)
        return o.to(wide), lse
    if o is None:
        o = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=wide)
        lse = q.new_full(q.shape[:-1], -torch.inf, dtype=wide)
    for samples, found in some:
        for call in found:
            rows, keys = slice(call.q0, call.q1), slice(call.k0, call.k1)
            parts = _turned(call, q[samples, rows], k[samples, keys], v[samples, keys])
            piece = kernels.forward(*parts, call.kind != "full", scores)
            o[samples, rows], lse[samples, rows] = merge(
                o[samples, rows], lse[samples, rows], *_turned(call, *piece)
            )
    return o, lse


def _add_gradients(
    call: Call,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    scores: Scores,
) -> None:
    rows, keys = slice(call.q0, call.q1), slice(call.k0, call.k1)
    parts = (grad[:, rows], q[:, rows], k[:, keys], v[:, keys], o[:, rows], lse[:, rows])
    shares = kernels.backward(*_turned(call, *parts), call.kind != "full", scores)
    for whole, where, share in zip(
        (dq, dk, dv), (rows, keys, keys), _turned(call, *shares), strict=True
    ):
        whole[:, where] += share


def _turned(call: Call, *parts: Tensor) -> tuple[Tensor, ...]:
    """An anti-causal triangle read backwards, [B, S, ...] along S, is a causal one."""
    return tuple(t.flip(1) for t in parts) if call.kind == "anti" else parts
