"""Floating-point operations of a layer and of the head, on one rank, for one micro batch.

A matrix product of [T, a] and [a, b] takes 2 T a b. For each linear map the forward is one such
product, the gradient of its input another, the gradient of its weight a third (Kaplan et al.
2001.08361 section 2.1). Attention multiplies queries with keys, and scores with values; only what
a causal mask leaves is counted, s^2 / 2 pairs of a sample, w s - w^2 / 2 under a window w. It has
no weights: its backward, twice the forward, is all input gradient. Norms, rotations, the
embedding's lookup and the loss are left out; so is what a kernel computes twice by itself.
A layer that is recomputed has its forward in the backward once more, a module of it likewise.
"""

from itertools import groupby
from math import prod
from typing import NamedTuple

from plait.spec.chunks import chunk_layers
from plait.spec.layout import Layout
from plait.spec.model import Model
from plait.spec.parameters import Parameter, parameters


class Flops(NamedTuple):
    """Operations of the forward, of input gradients and of weight gradients."""

    forward: int
    input_grad: int
    weight_grad: int

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(*(a + b for a, b in zip(self, other, strict=True)))


NONE = Flops(0, 0, 0)


def layer_flops(model: Model, layout: Layout, seq_len: int) -> tuple[tuple[Flops, ...], Flops]:
    """What each layer takes, and the head, of a micro batch of `seq_len` tokens a sample.

    Experts are counted as if tokens spread over them, and over their ranks, evenly.
    """
    tokens = layout.micro_batch * seq_len // layout.cp
    layers, head = [], NONE
    for unit, members in groupby(parameters(model), key=lambda p: p.unit):
        maps = {p.name.removesuffix(".weight"): _map(p, model, layout, tokens) for p in members}
        if unit.startswith("layers."):
            layers.append(_layer(maps, len(layers), model, layout, seq_len))
        elif unit == "head":
            head = _linear(sum(maps.values()))
    if model.tied:
        head = _linear(2 * tokens * -(-model.vocab // layout.tp) * model.hidden)
    return tuple(layers), head


def chunk_flops(model: Model, layout: Layout, seq_len: int) -> tuple[Flops, ...]:
    """What each chunk takes (see `spec.chunks`), the head with the last one."""
    layers, head = layer_flops(model, layout, seq_len)
    chunks = [sum((layers[i] for i in own), NONE) for own in chunk_layers(model, layout)]
    chunks[-1] += head
    return tuple(chunks)


def _linear(products: int) -> Flops:
    return Flops(products, products, products)


def _map(p: Parameter, model: Model, layout: Layout, tokens: int) -> int:
    """The products of a linear map; 0 of what is none."""
    if len(p.shape) < 2 or not p.name.endswith(".weight"):
        return 0
    products = 2 * tokens * prod(p.shape)
    if p.expert:
        products = products * model.moe.topk // model.moe.experts
    elif p.split == "kv":
        return products // min(layout.tp, model.kv_heads)
    elif p.split == "sequence" and not layout.sequence_parallel:
        return products
    return products // layout.tp


def _layer(maps: dict[str, int], layer: int, model: Model, layout: Layout, seq_len: int) -> Flops:
    core = _attention(model, layout, layer, seq_len)
    mine = sum(maps.values())
    projections = sum(n for name, n in maps.items() if ".attention." in name)
    repeated = {"attention": projections + core, "mlp": mine - projections, "norm": 0}
    again = sum(repeated[module] for module in layout.recomputed)
    if layout.recompute == "full":
        again = mine + core
    return Flops(mine + core, mine + 2 * core + again, mine)


def _attention(model: Model, layout: Layout, layer: int, seq_len: int) -> int:
    """Scores and their sums of values, for the pairs that the mask leaves."""
    seen = seq_len if model.is_full_attention(layer) else min(model.window, seq_len)
    pairs = layout.micro_batch * (2 * seq_len * seen - seen * seen)  # twice their number
    widths = 2 * model.head_dim
    if model.mla is not None:
        widths = model.mla.nope_dim + model.mla.rope_dim + model.mla.v_dim
    return pairs * widths * model.heads // (layout.tp * layout.cp)
