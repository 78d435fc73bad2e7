"""Attention kernels that return the log-sum-exp of their scores, and their backward.

Fused ones where torch has them, for they hold no scores; values narrower than keys, as those of
latent attention, are padded for them. Elsewhere (soft caps, wider values, single precision on GPUs)
the same by matrix products, a block of queries at a time, so that memory is linear in the sequence
there too.

Shapes: q [B, S, heads, dim], k [B, K, kv heads, dim], v [B, K, kv heads, value dim], o like q with
v's dim, lse [B, S, heads], in float32 where q is of half precision and in q's dtype elsewhere.
Query head h goes with KV head h // (heads / kv heads), which is never copied.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_ATEN = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
#: Scores held at once by matrix products, in elements, if a few queries' do not exceed it.
_SCORES, _FEW_QUERIES = 2**22, 16


@dataclass(frozen=True)
class Scores:
    """How a score comes from the product of query and key.

    Attributes:
        scale: a factor.
        softcap: then softcap * tanh(score / softcap), as in Gemma 2 (None: not).
    """

    scale: float
    softcap: float | None = None


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scores: Scores) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; causal: the i-th query sees keys up to the i-th, S = K."""
    assert not causal or q.shape[1] == k.shape[1], (q.shape, k.shape)
    kernel = _fused(q, v, scores)
    if kernel is None:
        return _products(q, k, v, causal, scores)
    heads_first = _heads_first(q, k, _padded(v, q))
    if kernel == "cpu":
        o, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            *heads_first, 0.0, causal, scale=scores.scale
        )
    else:
        o, lse, *_ = _ATEN._scaled_dot_product_flash_attention(
            *heads_first, 0.0, causal, False, scale=scores.scale
        )
    return _cut(o.transpose(1, 2), v.shape[-1]), lse.transpose(1, 2)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    causal: bool,
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor]:
    """This piece's share of the gradients of q, k, v; o and lse are those of all keys."""
    kernel = _fused(q, v, scores)
    if kernel is None:
        return _products_backward(grad, q, k, v, o, lse, causal, scores)
    dim = v.shape[-1]
    grad, q, k, v, o = _heads_first(_padded(grad, q), q, k, _padded(v, q), _padded(o, q))
    lse = lse.transpose(1, 2)
    if kernel == "cpu":
        grads = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, o, lse, 0.0, causal, scale=scores.scale
        )
    else:
        # Neither packed lengths nor a state of random numbers: there is no dropout.
        state = torch.empty(2, dtype=torch.uint64, device=q.device)
        grads = _ATEN._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, o, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal,
            state, state.new_empty(0), scale=scores.scale,
        )  # fmt: skip
    dq, dk, dv = (g.transpose(1, 2) for g in grads)
    return dq, dk, _cut(dv, dim)


def _fused(q: Tensor, v: Tensor, scores: Scores) -> str | None:
    dim = q.shape[-1]
    if scores.softcap is not None or v.shape[-1] > dim:
        return None
    if q.device.type == "cpu":
        return "cpu"
    # The kernel itself takes whole 16 bytes only; torch pads before it calls it.
    return "cuda" if q.is_cuda and q.dtype in _HALF and dim % 8 == 0 and dim <= 256 else None


def _padded(x: Tensor, q: Tensor) -> Tensor:
    """With zeros to the width of queries, which change neither scores nor sums."""
    missing = q.shape[-1] - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


def _cut(x: Tensor, width: int) -> Tensor:
    """The other way round, without holding the padding."""
    return x if x.shape[-1] == width else x[..., :width].contiguous()


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """[B, S, heads, dim] -> [B, heads, S, dim]. The kernels follow the strides of all dims but the
    last, which they take to be dense without a look."""
    return [(t if t.stride(-1) == 1 else t.contiguous()).transpose(1, 2) for t in tensors]


def _products(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scores: Scores
) -> tuple[Tensor, Tensor]:
    o = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse = q.new_empty(q.shape[:-1], dtype=precise(q.dtype))
    values = v.to(lse.dtype)
    for rows, keys, score, slope in _score_blocks(q, k, causal, scores):
        total = score.logsumexp(-1)
        weights = score.sub_(total[..., None]).exp_()
        o[:, rows] = torch.einsum("bhgqk,bkhd->bqhgd", weights, values[:, keys]).flatten(2, 3)
        lse[:, rows] = total.permute(0, 3, 1, 2).flatten(2)
        del score, slope, weights
    return o, lse


def _products_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    causal: bool,
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = precise(q.dtype)
    dq, dk, dv = (torch.zeros_like(t, dtype=wide) for t in (q, k, v))
    kv_heads, values, whole_keys = k.shape[2], v.to(wide), k.to(wide)
    inner = (grad.to(wide) * o.to(wide)).sum(-1)
    for rows, keys, score, slope in _score_blocks(q, k, causal, scores):
        dy = _grouped(grad[:, rows].to(wide), kv_heads)
        total = _grouped(lse[:, rows], kv_heads).permute(0, 2, 3, 1)[..., None]
        weights = score.sub_(total).exp_()
        dv[:, keys] += torch.einsum("bhgqk,bqhgd->bkhd", weights, dy)
        ds = torch.einsum("bqhgd,bkhd->bhgqk", dy, values[:, keys])
        ds -= _grouped(inner[:, rows], kv_heads).permute(0, 2, 3, 1)[..., None]
        ds *= weights.mul_(scores.scale)
        if slope is not None:
            ds *= slope
        dq[:, rows] = torch.einsum("bhgqk,bkhd->bqhgd", ds, whole_keys[:, keys]).flatten(2, 3)
        dk[:, keys] += torch.einsum(
            "bhgqk,bqhgd->bkhd", ds, _grouped(q[:, rows].to(wide), kv_heads)
        )
        del score, slope, weights, ds
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _score_blocks(
    q: Tensor, k: Tensor, causal: bool, scores: Scores
) -> Iterator[tuple[slice, slice, Tensor, Tensor | None]]:
    """Blocks of queries: which, which keys they see, scores [B, kv heads, group, queries, keys],
    and with a soft cap its derivative."""
    (batch, length, heads, _), keys = q.shape, k.shape[1]
    step = max(_FEW_QUERIES, _SCORES // max(1, batch * heads * keys))
    whole_keys = k.to(precise(q.dtype))
    for start in range(0, length, step):
        stop, slope = min(start + step, length), None
        seen = slice(0, stop if causal else keys)
        block = _grouped(q[:, start:stop].to(whole_keys.dtype), k.shape[2])
        score = torch.einsum("bqhgd,bkhd->bhgqk", block, whole_keys[:, seen]).mul_(scores.scale)
        if scores.softcap is not None:
            score.div_(scores.softcap).tanh_()
            slope = (score * score).neg_().add_(1)
            score.mul_(scores.softcap)
        if causal:
            later = torch.ones(stop - start, stop, dtype=torch.bool, device=q.device)
            score.masked_fill_(later.triu_(start + 1), -torch.inf)
        yield slice(start, stop), seen, score, slope
        del score, slope  # a block's before the next one's are made


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[B, S, heads, ...] -> [B, S, kv heads, heads / kv heads, ...]."""
    return x.unflatten(2, (kv_heads, -1))


def precise(dtype: torch.dtype) -> torch.dtype:
    """What sums over keys are kept in."""
    return torch.float32 if dtype in _HALF else dtype
