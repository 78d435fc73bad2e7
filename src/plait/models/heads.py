"""Self-attention in its two forms: grouped queries, and the latent attention of DeepSeek."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.models import layers as L
from plait.models.attention import attention
from plait.spec.model import Model

#: Of each sample the lengths of its documents, in order.
Documents = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Held:
    """The positions of each sample that are here, where they are not all.

    Attributes:
        positions: int64 [S], in the order in which the stream has them; or [B, S], where that is
            not the same for every sample.
        whole: positions of a whole sample.
    """

    positions: Tensor
    whole: int


@dataclass
class Context:
    """What every layer needs to know of the batch.

    Attributes:
        batch, seq: samples, tokens of each that are here.
        positions: int64 [seq], or [batch, seq].
        rows: int64 [T], each token's number in the whole data: sample * whole length + position.
        documents: of each sample the lengths of those that it holds, of which none sees another;
            None: a sample is one text.
        cos, sin: rotary tables [*positions, head_dim]; None without rotary embedding.
        local_cos, local_sin: the same for windowed layers; the same tensors unless the model
            gives those a theta of their own.
        passed: mixture -> the choices that had passed backward when it first ran on this batch.
    """

    batch: int
    seq: int
    positions: Tensor
    rows: Tensor
    documents: Documents | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    local_cos: Tensor | None = None
    local_sin: Tensor | None = None
    passed: dict[nn.Module, Tensor | None] = field(default_factory=dict)


class Heads(nn.Module):
    """What attention does once queries, keys and values are there.

    Attributes:
        scale, softcap: of the scores. window: positions looked back on (None: all).
        sinks: [heads], a logit that every query of a head also looks at (None: none).
    """

    def __init__(self, model: Model, layer: int):
        super().__init__()
        self.scale, self.softcap = model.attention_scale, model.attention_softcap
        self.window = None if model.is_full_attention(layer) else model.window
        self.sinks = nn.Parameter(torch.zeros(model.heads)) if model.sinks else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """[B, S, heads, dim] (k and v may have fewer heads, v a smaller dim) -> [B, S, heads,
        v's dim]."""
        short = self.window is not None and q.shape[1] > self.window
        if short or ctx.documents is not None or self.sinks is not None or self.softcap is not None:
            return attention(
                q, k, v, ctx.documents, self.window, self.scale, self.softcap, self.sinks
            )
        dim = v.shape[-1]
        if dim < q.shape[-1]:  # fused kernels want one width
            v = F.pad(v, (0, q.shape[-1] - dim))
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            scale=self.scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return y.transpose(1, 2)[..., :dim]

    def tables(self, ctx: Context) -> tuple[Tensor, Tensor]:
        """The rotary tables of this layer."""
        return (ctx.cos, ctx.sin) if self.window is None else (ctx.local_cos, ctx.local_sin)


class Attention(Heads):
    """Causal self-attention with grouped queries.

    Head counts come from the widths of q and k, so that a part of the heads just works.
    """

    def __init__(self, model: Model, layer: int):
        super().__init__(model, layer)
        hidden, dim = model.hidden, model.head_dim
        self.head_dim, self.qk_norm = dim, model.qk_norm
        self.fan_out = L.fan_out
        q, kv = model.heads * dim, model.kv_heads * dim
        self.q = nn.Linear(hidden, q, bias=model.qkv_bias)
        self.k = nn.Linear(hidden, kv, bias=model.qkv_bias)
        self.v = nn.Linear(hidden, kv, bias=model.qkv_bias)
        if model.qk_norm is not None:
            whole = model.qk_norm == "full"
            self.q_norm = L.norm(model, q if whole else dim)
            self.k_norm = L.norm(model, kv if whole else dim)
        self.o = nn.Linear(q, hidden, bias=model.o_bias)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        q, k, v = self.fan_out(x, self.q, self.k, self.v)
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        heads = (ctx.batch, ctx.seq, -1, self.head_dim)
        q, k, v = q.view(heads), k.view(heads), v.view(heads)
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if ctx.cos is not None:
            q, k = L.rotate(q, *self.tables(ctx)), L.rotate(k, *self.tables(ctx))
        y = self.attend(q, k, v, ctx)
        return self.o(y.reshape(ctx.batch * ctx.seq, -1))


class MLA(Heads):
    """Multi-head latent attention (DeepSeek-V2, 2405.04434 section 2.1) as it is trained: keys and
    values of every head are made from the latent.

    A head's query and key are [nope | rope]; the rotated part of the key is one for all heads.
    The rotation pairs feature i with i + dim / 2 (DeepSeek's checkpoints pair 2 i with 2 i + 1:
    `models/hf.py` sorts their rows).

    Attributes:
        latents: makes the latents; like `fan_out`, but of maps that no rank has a part of.
        fan_out: makes the heads' parts from a latent.
        spread: of the key's rotated part [T, rope_dim] what this device's heads need.
    """

    def __init__(self, model: Model, layer: int):
        super().__init__(model, layer)
        mla, hidden = model.mla, model.hidden
        self.nope_dim, self.rope_dim, self.v_dim = mla.nope_dim, mla.rope_dim, mla.v_dim
        self.kv_rank = mla.kv_rank
        self.latents = self.fan_out = L.fan_out
        self.spread = lambda rotated: rotated
        q = model.heads * (mla.nope_dim + mla.rope_dim)
        if mla.q_rank is None:
            self.q, self.q_down = nn.Linear(hidden, q, bias=False), None
        else:
            self.q_down = nn.Linear(hidden, mla.q_rank, bias=False)
            self.q_norm = L.norm(model, mla.q_rank)
            self.q_up = nn.Linear(mla.q_rank, q, bias=False)
        self.kv_down = nn.Linear(hidden, mla.kv_rank + mla.rope_dim, bias=False)
        self.kv_norm = L.norm(model, mla.kv_rank)
        self.kv_up = nn.Linear(mla.kv_rank, model.heads * (mla.nope_dim + mla.v_dim), bias=False)
        self.o = nn.Linear(model.heads * mla.v_dim, hidden, bias=model.o_bias)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        if self.q_down is None:
            (q,) = self.fan_out(x, self.q)
            (latent,) = self.latents(x, self.kv_down)
        else:
            narrow, latent = self.latents(x, self.q_down, self.kv_down)
            (q,) = self.fan_out(self.q_norm(narrow), self.q_up)
        latent, rotated = latent.split((self.kv_rank, self.rope_dim), -1)
        (kv,) = self.fan_out(self.kv_norm(latent), self.kv_up)
        rotated = self.spread(rotated)
        q, kv = (
            t.view(ctx.batch, ctx.seq, -1, w)
            for t, w in ((q, self.nope_dim + self.rope_dim), (kv, self.nope_dim + self.v_dim))
        )
        rotated = rotated.reshape(ctx.batch, ctx.seq, 1, -1)
        q_nope, q_rotated = q.split((self.nope_dim, self.rope_dim), -1)
        k_nope, v = kv.split((self.nope_dim, self.v_dim), -1)
        if ctx.cos is not None:
            q_rotated = L.rotate(q_rotated, *self.tables(ctx))
            rotated = L.rotate(rotated, *self.tables(ctx))
        q = torch.cat((q_nope, q_rotated), -1)
        k = torch.cat((k_nope, rotated.expand(-1, -1, k_nope.shape[2], -1)), -1)
        y = self.attend(q, k, v, ctx)
        return self.o(y.reshape(ctx.batch * ctx.seq, -1))
