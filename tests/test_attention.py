"""Attention in dense calls against one masked softmax over everything, in float64."""

import math
from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plait.models import kernels
from plait.models.attention import attention, merge
from plait.models.kernels import Scores
from plait.spec.calls import Call, calls


def mask(seq: int, documents: tuple[int, ...], window: int | None) -> Tensor:
    """bool [S, S]: by definition, position by position."""
    document = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
    back = torch.arange(seq)[:, None] - torch.arange(seq)
    seen = (back >= 0) & (document[:, None] == document)
    return seen if window is None else seen & (back < window)


def masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: list[tuple[int, ...]],
    window: int | None,
    scale: float | None = None,
) -> Tensor:
    """torch's SDPA with a mask for each sample."""
    masks = torch.stack([mask(q.shape[1], s, window) for s in segments])[:, None]
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    y = F.scaled_dot_product_attention(
        *heads_first, attn_mask=masks, scale=scale, enable_gqa=q.shape[2] != k.shape[2]
    )
    return y.transpose(1, 2)


def inputs(
    batch: int, seq: int, heads: int, kv_heads: int, dim: int, value_dim: int | None = None
) -> list[Tensor]:
    torch.manual_seed(seq + heads)
    shapes = [(heads, dim), (kv_heads, dim), (kv_heads, value_dim or dim)]
    return [torch.randn(batch, seq, *s, dtype=torch.float64, requires_grad=True) for s in shapes]


def check_equal(ours: Tensor, theirs: Tensor, leaves: list[Tensor]) -> None:
    grad = torch.randn_like(theirs)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    pairs = (torch.autograd.grad(y, leaves, grad) for y in (ours, theirs))
    for mine, reference in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-12)


@st.composite
def packings(draw: st.DrawFn, seq: int) -> tuple[int, ...]:
    cuts = draw(st.sets(st.integers(1, seq - 1), max_size=5)) if seq > 1 else set()
    ends = [0, *sorted(cuts), seq]
    return tuple(b - a for a, b in pairwise(ends))


@settings(max_examples=80)
@given(st.data())
def test_any_length_packing_window_and_grouping(data):
    seq = data.draw(st.integers(1, 70), "seq")
    batch = data.draw(st.integers(1, 3), "batch")
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    window = data.draw(st.none() | st.integers(1, seq + 2), "window")
    scale = data.draw(st.sampled_from([None, 0.7]))
    segments = [data.draw(packings(seq)) for _ in range(batch)]
    leaves = inputs(batch, seq, kv_heads * group, kv_heads, 5)
    ours = attention(*leaves, segments, window, scale)
    check_equal(ours, masked(*leaves, segments, window, scale), leaves)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("value_dim", [3, 11])
def test_values_of_another_width(value_dim, window, monkeypatch):
    """Narrower ones by the fused kernel; wider ones by matrix products, in blocks of a few
    queries."""
    monkeypatch.setattr(kernels, "_SCORES", 1)
    if value_dim < 8:
        monkeypatch.delattr(kernels, "_products")
        monkeypatch.delattr(kernels, "_products_backward")
    leaves = inputs(2, 53, 6, 2, 8, value_dim)
    segments = [(20, 33), (53,)]
    check_equal(attention(*leaves, segments, window), masked(*leaves, segments, window), leaves)


@pytest.mark.parametrize("value_dim", [6, 4])
def test_any_strides(value_dim):
    """Views of every kind, and the gradient of a sum, which has no strides at all."""
    q, k, v = inputs(2, 21, 4, 2, 6, value_dim)
    packed = torch.cat((q.flatten(2), k.flatten(2), v.flatten(2)), -1)
    widths = (4 * 6, 2 * 6, 2 * value_dim)
    views = [
        p.unflatten(2, (heads, -1))
        for p, heads in zip(packed.split(widths, -1), (4, 2, 2), strict=True)
    ]
    turned = [t.transpose(1, 3).contiguous().transpose(1, 3) for t in (q, k, v)]
    wanted = masked(q, k, v, [(21,), (21,)], 8)
    grads = torch.autograd.grad(wanted.sum(), (q, k, v))
    for way in (views, turned):
        ours = attention(*way, window=8)
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)
        mine = torch.autograd.grad(ours.sum(), (q, k, v), retain_graph=True)
        for m, g in zip(mine, grads, strict=True):
            torch.testing.assert_close(m, g, rtol=0, atol=1e-12)


def explicit(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Every score written out."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seq = q.shape[1]
    scores = scores.masked_fill(~mask(seq, (seq,), window), -torch.inf)
    if sinks is not None:
        extra = sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, extra), -1)
    weights = scores.softmax(-1)[..., :seq]
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_soft_caps_and_sinks(window, softcap, with_sinks):
    leaves = inputs(2, 23, 4, 2, 8)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if with_sinks else None
    ours = attention(*leaves, window=window, softcap=softcap, sinks=sinks)
    theirs = explicit(*leaves, window, softcap, sinks)
    check_equal(ours, theirs, leaves + ([sinks] if with_sinks else []))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions_stay_as_near_as_torchs_own(dtype):
    """Many pieces are merged in float32: no further from float64 than one kernel, twice over."""
    exact = inputs(2, 96, 4, 2, 16)
    segments, window = [(40, 56), (96,)], 17
    grad = torch.randn(2, 96, 4, 16, dtype=torch.float64)

    def results(function, precision):
        leaves = [t.detach().to(precision).requires_grad_() for t in exact]
        y = function(*leaves, segments, window)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(precision))]

    ours, theirs = results(attention, dtype), results(masked, dtype)
    for mine, torchs, true in zip(ours, theirs, results(masked, torch.float64), strict=True):
        assert mine.dtype == dtype
        error, allowed = (mine - true).abs().max(), (torchs - true).abs().max()
        assert error <= 2 * allowed


@settings(max_examples=200)
@given(st.data())
def test_calls_cover_each_visible_pair_once_and_no_other(data):
    seq = data.draw(st.integers(1, 40))
    documents = data.draw(packings(seq))
    window = data.draw(st.none() | st.integers(1, seq + 1))
    cuts = sorted(data.draw(st.sets(st.integers(1, seq), max_size=6)))
    runs = list(zip([0, *cuts], [*cuts, seq], strict=True))
    shards = [
        tuple(r for r in data.draw(st.permutations(runs))[:4] if r[0] < r[1]) for _ in range(2)
    ]
    queries, keys = ([p for a, b in shard for p in range(a, b)] for shard in shards)
    seen = torch.zeros(len(queries), len(keys), dtype=torch.int64)
    for call in calls(*shards, documents, window):
        seen[call.q0 : call.q1, call.k0 : call.k1] += piece(call)
    wanted = mask(seq, documents, window)[queries][:, keys]
    assert torch.equal(seen, wanted.long())


def piece(call: Call) -> Tensor:
    whole = torch.ones(call.q1 - call.q0, call.k1 - call.k0, dtype=torch.int64)
    assert call.kind == "full" or whole.shape[0] == whole.shape[1], call
    return {"full": whole, "causal": whole.tril(), "anti": whole.triu()}[call.kind]


def test_the_calls_are_few():
    whole = ((0, 64),)
    assert calls(whole, whole, (64,)) == (Call("causal", 0, 64, 0, 64),)
    # A head and a tail with themselves are one triangle; with an earlier rank's head one
    # rectangle, with a later rank's two pieces another.
    ends = [0, *accumulate([8] * 8)]
    shards = [((ends[r], ends[r + 1]), (ends[7 - r], ends[8 - r])) for r in range(4)]
    assert calls(shards[1], shards[1], (64,)) == (Call("causal", 0, 16, 0, 16),)
    assert calls(shards[1], shards[0], (64,)) == (Call("full", 0, 16, 0, 8),)
    assert calls(shards[1], shards[2], (64,)) == (Call("full", 8, 16, 0, 16),)
    # A window: of every w queries a triangle on each side, and the first ones.
    assert len(calls(whole, whole, (64,), 16)) == 1 + 2 * 3


def test_merge_is_attention_over_both_sets_of_keys():
    q, k, v = (t.detach() for t in inputs(1, 12, 2, 2, 4))
    scores = Scores(0.5)
    whole, lse = kernels.forward(q, k, v, False, scores)
    first = kernels.forward(q, k[:, :5], v[:, :5], False, scores)
    second = kernels.forward(q, k[:, 5:], v[:, 5:], False, scores)
    o, total = merge(*first, *second)
    torch.testing.assert_close(o, whole, rtol=0, atol=1e-14)
    torch.testing.assert_close(total, lse, rtol=0, atol=1e-14)
    nothing = torch.zeros_like(whole), torch.full_like(lse, -torch.inf)
    assert torch.equal(merge(*nothing, *second)[0], second[0])
    assert torch.equal(merge(*nothing, *nothing)[0], nothing[0])


def test_memory_is_linear_in_the_sequence():
    """Saved for backward: inputs, output and log-sum-exp, and nothing of [S, S]."""
    seq, saved = 512, []
    leaves = inputs(1, seq, 2, 1, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        attention(*leaves, window=100)
    q, k, v = (t.numel() for t in leaves)
    assert sum(t.numel() for t in saved) == q + k + v + q + seq * 2
