"""The decoder-only transformer on one device. It knows nothing of ranks.

The residual stream is [T, hidden] with T = batch * sequence tokens; only attention looks at the
two apart. Parameters carry the names and shapes of `spec.parameters.parameters(model)`.
`parallel/` puts its own functions at `fan_out` and `cross_entropy`, its own modules at `o`,
`down`, `tokens`, `q_norm`, `k_norm`, and needs to change nothing else.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.models import layers as L
from plait.spec.findings import UserError, error
from plait.spec.model import Model


@dataclass
class Context:
    """What every layer needs to know of the batch.

    Attributes:
        batch, seq: samples, tokens of each.
        positions: int64 [seq].
        rows: int64 [T], each token's number in the whole data: sample * seq + position.
        cos, sin: rotary tables [seq, head_dim]; None without rotary embedding.
        local_cos, local_sin: the same for windowed layers; the same tensors unless the model
            gives those a theta of their own.
        mask: bool [seq, seq], what windowed layers see; None where the window covers everything.
    """

    batch: int
    seq: int
    positions: Tensor
    rows: Tensor
    cos: Tensor | None = None
    sin: Tensor | None = None
    local_cos: Tensor | None = None
    local_sin: Tensor | None = None
    mask: Tensor | None = None


class Embed(nn.Module):
    """Tokens to the residual stream."""

    def __init__(self, model: Model):
        super().__init__()
        self.scale = math.sqrt(model.hidden) if model.embed_scale else None
        self.tokens = nn.Embedding(model.vocab, model.hidden)
        learned = model.positions == "learned"
        self.positions = nn.Embedding(model.seq, model.hidden) if learned else None
        self.norm = L.norm(model, model.hidden) if model.embed_norm else None
        self.dropout = L.Dropout(model.dropout)

    def forward(self, tokens: Tensor, ctx: Context) -> Tensor:
        """int64 [T] -> [T, hidden]."""
        x = self.tokens(tokens)
        if self.scale is not None:
            # The factor has the dtype of the stream, as in Gemma's own code.
            x = x * torch.tensor(self.scale, dtype=x.dtype, device=x.device)
        if self.positions is not None:
            x = x + self.positions(ctx.rows % ctx.seq)
        if self.norm is not None:
            x = self.norm(x)
        return self.dropout(x, ctx.rows)


class Attention(nn.Module):
    """Causal self-attention with grouped queries.

    Head counts come from the widths of q and k, so that a part of the heads just works.
    """

    def __init__(self, model: Model, layer: int):
        super().__init__()
        hidden, dim = model.hidden, model.head_dim
        self.head_dim, self.scale = dim, model.attention_scale
        self.window = None if model.is_full_attention(layer) else model.window
        self.qk_norm = model.qk_norm
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
            tables = (ctx.cos, ctx.sin) if self.window is None else (ctx.local_cos, ctx.local_sin)
            q, k = L.rotate(q, *tables), L.rotate(k, *tables)
        y = self.attend(q, k, v, ctx)
        return self.o(y.reshape(ctx.batch * ctx.seq, -1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """[B, S, heads, dim] (k and v may have fewer heads) -> [B, S, heads, dim]."""
        mask = None if self.window is None else ctx.mask
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return y.transpose(1, 2)


class Mlp(nn.Module):
    """The feed-forward branch, gated (SwiGLU, GeGLU: 2002.05202) or not."""

    def __init__(self, model: Model):
        super().__init__()
        hidden, ffn, bias = model.hidden, model.ffn, model.mlp_bias
        self.kind = model.mlp
        self.fan_out = L.fan_out
        self.gate = nn.Linear(hidden, ffn, bias=bias) if model.gated else None
        self.up = nn.Linear(hidden, ffn, bias=bias)
        self.down = nn.Linear(ffn, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        if self.gate is None:
            (up,) = self.fan_out(x, self.up)
            return self.down(L.activate(self.kind, up))
        gate, up = self.fan_out(x, self.gate, self.up)
        return self.down(L.gated(self.kind, gate, up))


class Layer(nn.Module):
    """Attention and MLP, each a branch that adds to the residual stream."""

    def __init__(self, model: Model, layer: int):
        super().__init__()

        def maybe_norm(*places: str) -> nn.Module | None:
            return L.norm(model, model.hidden) if model.norm_at in places else None

        self.attention_norm = maybe_norm("input", "both")
        self.attention = Attention(model, layer)
        self.attention_out_norm = maybe_norm("output", "both")
        self.attention_dropout = L.Dropout(model.dropout)
        self.mlp_norm = maybe_norm("input", "both")
        self.mlp = Mlp(model)
        self.mlp_out_norm = maybe_norm("output", "both")
        self.mlp_dropout = L.Dropout(model.dropout)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        y = x if self.attention_norm is None else self.attention_norm(x)
        y = self.attention(y, ctx)
        if self.attention_out_norm is not None:
            y = self.attention_out_norm(y)
        x = x + self.attention_dropout(y, ctx.rows)
        y = x if self.mlp_norm is None else self.mlp_norm(x)
        y = self.mlp(y)
        if self.mlp_out_norm is not None:
            y = self.mlp_out_norm(y)
        return x + self.mlp_dropout(y, ctx.rows)


class Head(nn.Module):
    """The residual stream to logits, or to the loss."""

    def __init__(self, model: Model):
        super().__init__()
        self.softcap = model.logit_softcap
        self.fan_out = L.fan_out
        self.cross_entropy = L.cross_entropy
        self.norm = L.norm(model, model.hidden)
        self.output = nn.Linear(model.hidden, model.vocab, bias=False)

    def forward(self, x: Tensor, ctx: Context, targets: Tensor | None = None) -> Tensor:
        """[T, hidden] -> logits [T, vocab]; with targets [T] the summed loss, a scalar."""
        (logits,) = self.fan_out(self.norm(x), self.output)
        logits = L.softcap(logits, self.softcap)
        return logits if targets is None else self.cross_entropy(logits, targets)


class Transformer(nn.Module):
    """A decoder-only transformer, or a run of its layers.

    May be built on the meta device and given storage later. Parts that are left out are None;
    layers keep their numbers in the whole model, so that parameters keep their names.

    Args:
        model: what to build.
        layers: which layers (all when None).
        embed, head: whether the embedding and the output head are part of it.

    Raises:
        UserError: the model has something that cannot be trained yet.
    """

    def __init__(
        self,
        model: Model,
        layers: Sequence[int] | None = None,
        embed: bool = True,
        head: bool = True,
    ):
        super().__init__()
        refuse(model)
        self.model = model
        self.embed = Embed(model) if embed else None
        numbers = range(model.layers) if layers is None else layers
        self.layers = nn.ModuleDict({str(i): Layer(model, i) for i in numbers})
        self.head = Head(model) if head else None
        if model.tied and embed and head:
            self.head.output.weight = self.embed.tokens.weight
        for name, module in self.named_modules():
            if isinstance(module, L.Dropout):
                module.site = name

    def context(self, batch: int, seq: int, index: Tensor | None = None) -> Context:
        """What the layers need to know of `batch` samples of `seq` tokens.

        index: int64 [batch], the samples' numbers in the whole data (0, 1, ... when None).
        """
        model, some = self.model, next(self.parameters())
        device, dtype = some.device, some.dtype
        positions = torch.arange(seq, device=device)
        samples = torch.arange(batch, device=device) if index is None else index
        rows = (samples[:, None] * seq + positions).reshape(-1)
        ctx = Context(batch, seq, positions, rows)
        if model.positions == "rope":
            dim = model.head_dim
            ctx.cos, ctx.sin = L.rope_tables(
                positions, dim, model.rope_theta, model.rope_scaling, dtype
            )
            ctx.local_cos, ctx.local_sin = ctx.cos, ctx.sin
            if model.rope_local_theta is not None:
                ctx.local_cos, ctx.local_sin = L.rope_tables(
                    positions, dim, model.rope_local_theta, None, dtype
                )
        if model.window is not None and seq > model.window:
            ctx.mask = L.window_mask(positions, model.window)
        return ctx

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        index: Tensor | None = None,
        stream: Tensor | None = None,
    ) -> Tensor:
        """One pass through the model, or through this run of its layers.

        Args:
            tokens: int64 [B, S].
            targets: int64 [B, S], -1 where there is nothing to predict.
            index: int64 [B], the samples' numbers in the whole data; dropout depends on them.
            stream: [T, hidden], what the layers before have made; where there is no embedding.

        Returns:
            With targets the cross entropy summed over valid tokens (a scalar, at least float32),
            without them logits [B * S, vocab]; without a head the residual stream.
        """
        ctx = self.context(*tokens.shape, index)
        x = stream if self.embed is None else self.embed(tokens.reshape(-1), ctx)
        for layer in self.layers.values():
            x = layer(x, ctx)
        if self.head is None:
            return x
        return self.head(x, ctx, None if targets is None else targets.reshape(-1))


def refuse(model: Model) -> None:
    """Raises a UserError that names everything in a model that cannot be trained yet."""
    missing = {
        "moe": ("mixture of experts", model.moe is not None),
        "mla": ("multi-head latent attention", model.mla is not None),
        "attention_softcap": ("soft-capped attention scores", model.attention_softcap is not None),
        "sinks": ("attention sinks", model.sinks),
        "positions": ("ALiBi positions", model.positions == "alibi"),
    }
    problems = [
        error(
            f"model.{name}",
            getattr(model, name) if name == "positions" else model.name,
            f"{model.name} has {what}, which can be planned but not trained yet",
            rule="not-trainable",
        )
        for name, (what, present) in missing.items()
        if present
    ]
    if problems:
        raise UserError(problems)
