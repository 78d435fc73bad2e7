"""The decoder-only transformer on one device. It knows nothing of ranks.

The residual stream is [T, hidden] with T = batch * sequence tokens; only attention looks at the
two apart. Parameters carry the names and shapes of `spec.parameters.parameters(model)`.
`parallel/` puts its own functions at `fan_out`, `latents`, `spread`, `attend` and `cross_entropy`,
its own modules at `o`, `down`, `tokens`, `q_norm`, `k_norm`, in mixtures at what `models/moe.py`
names, and needs to change nothing else.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from plait.models import layers as L
from plait.models.heads import MLA, Attention, Context, Held
from plait.models.moe import MoE
from plait.spec.findings import UserError, error
from plait.spec.model import Model


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
            x = x + self.positions(ctx.positions.repeat(ctx.batch))
        if self.norm is not None:
            x = self.norm(x)
        return self.dropout(x, ctx.rows)


class Mlp(nn.Module):
    """The feed-forward branch, gated (SwiGLU, GeGLU: 2002.05202) or not; `ffn` wide."""

    def __init__(self, model: Model, ffn: int):
        super().__init__()
        hidden, bias = model.hidden, model.mlp_bias
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
    """Attention and MLP, each a branch that adds to the residual stream.

    Of `mlp` and `moe` one is None.
    """

    def __init__(self, model: Model, layer: int):
        super().__init__()

        def maybe_norm(*places: str) -> nn.Module | None:
            return L.norm(model, model.hidden) if model.norm_at in places else None

        self.attention_norm = maybe_norm("input", "both")
        self.attention = (MLA if model.mla else Attention)(model, layer)
        self.attention_out_norm = maybe_norm("output", "both")
        self.attention_dropout = L.Dropout(model.dropout)
        self.mlp_norm = maybe_norm("input", "both")
        self.mlp = self.moe = None
        if model.is_moe(layer):
            moe = model.moe
            shared = Mlp(model, moe.shared_ffn or moe.shared * moe.ffn) if moe.shared else None
            self.moe = MoE(model, shared)
        else:
            self.mlp = Mlp(model, model.ffn)
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
        y = self.moe(y, ctx) if self.mlp is None else self.mlp(y)
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

    def context(
        self, batch: int, seq: int, index: Tensor | None = None, held: Held | None = None
    ) -> Context:
        """What the layers need to know of `batch` samples of `seq` tokens.

        index: int64 [batch], the samples' numbers in the whole data (0, 1, ... when None).
        held: which positions these are (the whole samples when None).
        """
        model, some = self.model, next(self.parameters())
        device, dtype = some.device, some.dtype
        positions, whole = torch.arange(seq, device=device), seq
        if held is not None:
            positions, whole = held.positions, held.whole
        samples = torch.arange(batch, device=device) if index is None else index
        rows = (samples[:, None] * whole + positions).reshape(-1)
        ctx = Context(batch, seq, positions, rows)
        if model.positions == "rope":
            dim = model.mla.rope_dim if model.mla else model.head_dim
            ctx.cos, ctx.sin = L.rope_tables(
                positions, dim, model.rope_theta, model.rope_scaling, dtype
            )
            ctx.local_cos, ctx.local_sin = ctx.cos, ctx.sin
            if model.rope_local_theta is not None:
                ctx.local_cos, ctx.local_sin = L.rope_tables(
                    positions, dim, model.rope_local_theta, None, dtype
                )
        return ctx

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        index: Tensor | None = None,
        stream: Tensor | None = None,
        held: Held | None = None,
    ) -> Tensor:
        """One pass through the model, or through this run of its layers.

        Args:
            tokens: int64 [B, S].
            targets: int64 [B, S], -1 where there is nothing to predict.
            index: int64 [B], the samples' numbers in the whole data; dropout depends on them.
            stream: [T, hidden], what the layers before have made; where there is no embedding.
            held: which positions of the samples S counts (all of them when None).

        Returns:
            With targets the cross entropy summed over valid tokens (a scalar, at least float32),
            without them logits [B * S, vocab]; without a head the residual stream.
        """
        ctx = self.context(*tokens.shape, index, held)
        x = stream if self.embed is None else self.embed(tokens.reshape(-1), ctx)
        for layer in self.layers.values():
            x = layer(x, ctx)
        if self.head is None:
            return x
        return self.head(x, ctx, None if targets is None else targets.reshape(-1))


def refuse(model: Model) -> None:
    """Raises a UserError where a model has something that cannot be trained yet."""
    if model.positions == "alibi":
        message = f"{model.name} has ALiBi positions, which can be planned but not trained yet"
        raise UserError([error("model.positions", "alibi", message, rule="not-trainable")])
