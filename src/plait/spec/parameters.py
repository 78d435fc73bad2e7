"""The parameters of a model: names, shapes, how tensor parallelism cuts each, how each starts.

One table serves parameter counts, memory and traffic formulas, the sharding of the real program,
its initial values and its checkpoints. `models/` builds modules whose parameters carry exactly
these names and shapes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod, sqrt
from typing import Literal, NamedTuple

from plait.spec.layout import Layout
from plait.spec.model import Model

#: How tensor parallelism treats a parameter.
#:   column   dim 0 is cut: each rank makes its own outputs
#:   row      dim 1 is cut: each rank holds its own inputs
#:   vocab    dim 0 is cut in equal pieces, the last ones padded to the same size
#:   kv       column over KV heads; beyond their number each head lives on several ranks
#:   sequence whole on every rank; sees this rank's tokens only under sequence parallelism
#:   heads    whole on every rank; sees this rank's heads only
#:   router   whole on every rank; sees this rank's share of the tokens only
#: Those of experts lie on the expert grid: dim 0 is cut over ep, and over etp
#:   expert-column  dim 1 is cut
#:   expert-row     dim 2 is cut
#:   expert-bias    nothing more: added by one of the etp ranks
Split = Literal[
    "column",
    "row",
    "vocab",
    "kv",
    "sequence",
    "heads",
    "router",
    "expert-column",
    "expert-row",
    "expert-bias",
]


class Place(NamedTuple):
    """Where a rank is on the axes that cut parameters."""

    tp: int = 0
    etp: int = 0
    ep: int = 0


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
        name: path in the module tree, "layers.3.attention.q.weight".
        shape: whole shape; matrices are [outputs, inputs] as in torch.
        unit: what is gathered and released as one under ZeRO-3: "embed", "layers.3" or "head".
        split: how tensor parallelism cuts it.
        init: ("normal", standard deviation) or ("constant", value).
        decay: weight decay applies (matrices yes, vectors and biases no).
        by_load: moved by the load of experts instead of a gradient; see `MoE.correction`.
    """

    name: str
    shape: tuple[int, ...]
    unit: str
    split: Split
    init: tuple[str, float]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def decay(self) -> bool:
        return len(self.shape) > 1 and not self.name.endswith(".bias")

    @property
    def expert(self) -> bool:
        """Whether it is one of the routed experts' own."""
        return self.split.startswith("expert")

    @property
    def by_load(self) -> bool:
        return self.name.endswith(".router.correction")


def parameters(model: Model) -> Iterator[Parameter]:
    """Every parameter of a model in the order of the forward pass."""
    yield from _embed(model)
    for layer in range(model.layers):
        yield from _layer(model, layer)
    yield from _head(model)


def parameter_count(model: Model) -> int:
    """Total number of parameters, a tied table counted once."""
    return sum(p.numel for p in parameters(model))


def active_count(model: Model, input_table: bool = True) -> int:
    """Parameters that one token uses: `topk` of the routed experts.

    Publishers disagree on whether the input embedding counts: `input_table` leaves it out
    where an output table of its own exists.
    """
    total = parameter_count(model)
    if model.moe:
        routed = sum(p.numel for p in parameters(model) if p.expert)
        total -= routed - routed * model.moe.topk // model.moe.experts
    if not input_table and not model.tied:
        total -= model.vocab * model.hidden
    return total


def _normal(model: Model, residual: bool = False) -> tuple[str, float]:
    # GPT-2's rule: what writes to the residual stream starts smaller by sqrt(2 layers).
    return ("normal", 0.02 / sqrt(2 * model.layers) if residual else 0.02)


def _norm(model: Model, name: str, unit: str, size: int, split: Split) -> Iterator[Parameter]:
    one = ("constant", 0.0 if model.norm_offset else 1.0)
    yield Parameter(f"{name}.weight", (size,), unit, split, one)
    if model.norm == "layer":
        yield Parameter(f"{name}.bias", (size,), unit, split, ("constant", 0.0))


def _linear(
    model: Model, name: str, unit: str, shape: tuple[int, int], split: Split, bias: bool
) -> Iterator[Parameter]:
    init = _normal(model, residual=split == "row")
    yield Parameter(f"{name}.weight", shape, unit, split, init)
    if bias:
        # A row-parallel map adds its bias after the sum over ranks, so the bias stays whole.
        where: Split = "sequence" if split == "row" else split
        yield Parameter(f"{name}.bias", shape[:1], unit, where, ("constant", 0.0))


def _embed(model: Model) -> Iterator[Parameter]:
    table = (model.vocab, model.hidden)
    yield Parameter("embed.tokens.weight", table, "embed", "vocab", _normal(model))
    if model.positions == "learned":
        shape = (model.seq, model.hidden)
        yield Parameter("embed.positions.weight", shape, "embed", "sequence", _normal(model))
    if model.embed_norm:
        yield from _norm(model, "embed.norm", "embed", model.hidden, "sequence")


def _head(model: Model) -> Iterator[Parameter]:
    yield from _norm(model, "head.norm", "head", model.hidden, "sequence")
    if not model.tied:
        table = (model.vocab, model.hidden)
        yield Parameter("head.output.weight", table, "head", "vocab", _normal(model))


def _layer(model: Model, layer: int) -> Iterator[Parameter]:
    unit = f"layers.{layer}"
    for branch in ("attention", "mlp"):
        if model.norm_at in ("input", "both"):
            yield from _norm(model, f"{unit}.{branch}_norm", unit, model.hidden, "sequence")
        if branch == "attention":
            yield from _mla(model, unit) if model.mla else _attention(model, unit)
        elif model.is_moe(layer):
            yield from _moe(model, unit)
        else:
            yield from _mlp(model, f"{unit}.mlp", unit, model.ffn)
        if model.norm_at in ("output", "both"):
            yield from _norm(model, f"{unit}.{branch}_out_norm", unit, model.hidden, "sequence")


def _attention(model: Model, unit: str) -> Iterator[Parameter]:
    name, hidden = f"{unit}.attention", model.hidden
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    yield from _linear(model, f"{name}.q", unit, (q, hidden), "column", model.qkv_bias)
    yield from _linear(model, f"{name}.k", unit, (kv, hidden), "kv", model.qkv_bias)
    yield from _linear(model, f"{name}.v", unit, (kv, hidden), "kv", model.qkv_bias)
    if model.qk_norm == "head":
        yield from _norm(model, f"{name}.q_norm", unit, model.head_dim, "heads")
        yield from _norm(model, f"{name}.k_norm", unit, model.head_dim, "heads")
    elif model.qk_norm == "full":
        yield from _norm(model, f"{name}.q_norm", unit, q, "column")
        yield from _norm(model, f"{name}.k_norm", unit, kv, "kv")
    if model.sinks:
        yield Parameter(f"{name}.sinks", (model.heads,), unit, "column", ("constant", 0.0))
    yield from _linear(model, f"{name}.o", unit, (hidden, q), "row", model.o_bias)


def _mla(model: Model, unit: str) -> Iterator[Parameter]:
    name, hidden, mla = f"{unit}.attention", model.hidden, model.mla
    q = model.heads * (mla.nope_dim + mla.rope_dim)
    if mla.q_rank is None:
        yield from _linear(model, f"{name}.q", unit, (q, hidden), "column", False)
    else:
        yield from _linear(model, f"{name}.q_down", unit, (mla.q_rank, hidden), "sequence", False)
        yield from _norm(model, f"{name}.q_norm", unit, mla.q_rank, "sequence")
        yield from _linear(model, f"{name}.q_up", unit, (q, mla.q_rank), "column", False)
    latent = mla.kv_rank + mla.rope_dim
    yield from _linear(model, f"{name}.kv_down", unit, (latent, hidden), "sequence", False)
    yield from _norm(model, f"{name}.kv_norm", unit, mla.kv_rank, "sequence")
    kv = model.heads * (mla.nope_dim + mla.v_dim)
    yield from _linear(model, f"{name}.kv_up", unit, (kv, mla.kv_rank), "column", False)
    yield from _linear(
        model, f"{name}.o", unit, (hidden, model.heads * mla.v_dim), "row", model.o_bias
    )


def _mlp(model: Model, name: str, unit: str, ffn: int) -> Iterator[Parameter]:
    hidden, bias = model.hidden, model.mlp_bias
    if model.gated:
        yield from _linear(model, f"{name}.gate", unit, (ffn, hidden), "column", bias)
    yield from _linear(model, f"{name}.up", unit, (ffn, hidden), "column", bias)
    yield from _linear(model, f"{name}.down", unit, (hidden, ffn), "row", bias)


def _moe(model: Model, unit: str) -> Iterator[Parameter]:
    name, hidden, moe = f"{unit}.moe", model.hidden, model.moe
    shape = (moe.experts, hidden)
    yield Parameter(f"{name}.router.weight", shape, unit, "router", _normal(model))
    if moe.router_bias:
        bias = (moe.experts,)
        yield Parameter(f"{name}.router.bias", bias, unit, "router", ("constant", 0.0))
    if moe.correction:
        bias = (moe.experts,)
        yield Parameter(f"{name}.router.correction", bias, unit, "router", ("constant", 0.0))
    columns = ("gate", "up") if model.gated else ("up",)
    for part in (*columns, "down"):
        outputs, inputs = (hidden, moe.ffn) if part == "down" else (moe.ffn, hidden)
        init = _normal(model, residual=part == "down")
        shape = (moe.experts, outputs, inputs)
        split: Split = "expert-row" if part == "down" else "expert-column"
        yield Parameter(f"{name}.experts.{part}.weight", shape, unit, split, init)
        if moe.bias:
            bias = (moe.experts, outputs)
            zero = ("constant", 0.0)
            split = "expert-bias" if part == "down" else "expert-column"
            yield Parameter(f"{name}.experts.{part}.bias", bias, unit, split, zero)
    if moe.shared:
        ffn = moe.shared_ffn or moe.shared * moe.ffn
        yield from _mlp(model, f"{name}.shared", unit, ffn)


# ------------------------------------------------------------------------------------------
# What one tensor-parallel rank holds


#: Not cut over any axis.
_WHOLE = ("sequence", "heads", "router")
#: The dim of an expert's parameter that is cut over etp.
_EXPERT_DIM = {"expert-column": 1, "expert-row": 2}


def kv_copies(model: Model, layout: Layout) -> int:
    """Ranks that hold the same KV head: 1 until tp exceeds the number of KV heads."""
    return max(1, layout.tp // model.kv_heads)


def local_box(
    p: Parameter, model: Model, layout: Layout, place: Place
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The part of a parameter on one rank: (offset, size) in the whole one.

    The size leaves out padding: the last pieces of a padded vocabulary are smaller, even empty.
    """
    if p.expert:
        size = local_shape(p, model, layout)
        at = {0: place.ep, _EXPERT_DIM.get(p.split): place.etp}
        return tuple(at.get(d, 0) * n for d, n in enumerate(size)), size
    if layout.tp == 1 or p.split in _WHOLE:
        return (0,) * len(p.shape), p.shape
    dim = 1 if p.split == "row" else 0
    copies = kv_copies(model, layout) if p.split == "kv" else 1
    piece = local_shape(p, model, layout)[dim]
    start = min(place.tp // copies * piece, p.shape[dim])
    size = min(piece, p.shape[dim] - start)
    offset = tuple(start if d == dim else 0 for d in range(len(p.shape)))
    return offset, tuple(size if d == dim else n for d, n in enumerate(p.shape))


def local_shape(p: Parameter, model: Model, layout: Layout) -> tuple[int, ...]:
    """Shape of a parameter on each rank, padding included; the same on all."""
    if p.split in _WHOLE:
        return p.shape
    if p.expert:
        pieces = {0: layout.ep, _EXPERT_DIM.get(p.split): layout.etp}
        return tuple(n // pieces.get(d, 1) for d, n in enumerate(p.shape))
    dim = 1 if p.split == "row" else 0
    pieces = layout.tp // (kv_copies(model, layout) if p.split == "kv" else 1)
    return tuple(-(-n // pieces) if d == dim else n for d, n in enumerate(p.shape))


def tp_copies(p: Parameter, model: Model, layout: Layout) -> int:
    """Tensor-parallel ranks that hold the same values of a parameter: of the axis tp, of experts
    of the axis etp."""
    if p.split in _WHOLE:
        return layout.tp
    if p.expert:
        return layout.etp if p.split == "expert-bias" else 1
    return kv_copies(model, layout) if p.split == "kv" else 1


def partial_over(p: Parameter, model: Model, layout: Layout) -> Literal["", "tp", "kv", "etp"]:
    """Over which ranks the gradient of a parameter must still be summed after backward.

    "tp": each rank of the tp group saw a part (its tokens, its heads); "kv": each rank that
    holds a copy of a KV head saw the queries of its own heads; "etp": one of the etp ranks saw all;
    "": the gradient is whole.
    """
    if p.expert:
        return "etp" if p.split == "expert-bias" and layout.etp > 1 else ""
    if layout.tp == 1:
        return ""
    if p.split in ("heads", "router") or (p.split == "sequence" and layout.sequence_parallel):
        return "tp"
    return "kv" if p.split == "kv" and kv_copies(model, layout) > 1 else ""
