"""What a rank of a serving layout sends: the collectives of a layer, in prefill and in decode."""

from collections.abc import Iterator
from dataclasses import dataclass

from plait.cost.serving import Serving
from plait.cost.serving_memory import kv_element_bytes, kv_heads
from plait.spec.cluster import Cluster
from plait.spec.job import DTYPE_BYTES
from plait.spec.model import Model

#: Ranks of the largest grid of which every group is looked at.
_LOOKED_AT = 4096
BOTH, PREFILL, DECODE = "prefill and decode", "prefill", "decode"


@dataclass(frozen=True)
class Collective:
    """One message of a layer, or of the ends of a model.

    Attributes:
        layer: "every layer", "dense layer", "mixture layer", "ends" or "stage boundary".
        where: behind or before what.
        collective: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send" or
            "broadcast".
        group: axes of the ranks that take part; `ranks`: those of rank 0's.
        size: ranks in a group.
        phase: "prefill", "decode" or both.
        bytes_per_token: of one token of a rank's step (of one request, where `of` says so), as
            the ledger counts them: of an all-reduce the tensor, of an all-gather the output, of a
            reduce-scatter the input.
        of: "token" or "request".
        formula: n tokens, h hidden, g ranks, k experts of a token, H heads of the group, d their
            size, V vocabulary.
        inter_node: some group leaves the fast links; None without a cluster.
    """

    layer: str
    where: str
    collective: str
    group: str
    ranks: tuple[int, ...]
    size: int
    phase: str
    bytes_per_token: float
    of: str
    formula: str
    inter_node: bool | None


def collectives(model: Model, serving: Serving, cluster: Cluster | None = None) -> list[Collective]:
    """What a rank sends, in the order of a forward pass; messages of one rank are left out."""
    made = []
    for layer, where, kind, group, size, phase, bytes_, formula in _messages(model, serving):
        if size > 1:
            ranks, far = _group(serving, cluster, group, size)
            of = "request" if layer == "ends" and "logits" in where else "token"
            made.append(
                Collective(layer, where, kind, group, ranks, size, phase, bytes_, of, formula, far)
            )
    return made


_Message = tuple[str, str, str, str, int, str, float, str]


def _messages(model: Model, s: Serving) -> Iterator[_Message]:
    wide = DTYPE_BYTES.get(s.dtype, 2)
    stream = model.hidden * wide
    ends = "+".join(axis for axis in ("tp", "cp", "dp") if _size(s, axis) > 1) or "tp"
    if s.embed_tp > 1:
        group = "tp" if s.embed_tp == s.attn_tp else ends
        yield "ends", "embedding", "all-reduce", group, s.embed_tp, BOTH, stream, "n h"
    yield from _attention(model, s, stream, wide)
    yield from _dense(model, s, stream)
    if model.moe:
        yield from _mixture(model, s, stream)
    if s.stages > 1:
        yield (
            "stage boundary", "hidden and residual", "send", "pp", s.stages, BOTH, 2 * stream,
            "2 n h",
        )  # fmt: skip
        yield "ends", "sampled tokens", "broadcast", "pp", s.stages, BOTH, 8, "a token"
    if s.head_tp > 1:
        group = "tp" if s.head_tp == s.attn_tp else ends
        yield "ends", "logits", "all-gather", group, s.head_tp, BOTH, model.vocab * wide, "V"


def _attention(model: Model, s: Serving, stream: int, wide: int) -> Iterator[_Message]:
    layer, mla = "every layer", model.mla
    if s.q_cp > 1 and not (s.engine == "trtllm" and s.kv_cp > 1):
        width = mla.kv_rank + mla.rope_dim if mla else 2 * kv_heads(model, s) * model.head_dim
        bytes_ = s.q_cp * width * kv_element_bytes(s)
        what = "keys and values of the new tokens"
        yield layer, what, "all-gather", "cp", s.q_cp, PREFILL, bytes_, "g n (K + V)"
    if s.kv_cp > 1:
        heads = model.heads // s.attn_tp * s.kv_cp
        query = mla.kv_rank + mla.rope_dim if mla else model.head_dim
        output = mla.kv_rank if mla else model.head_dim
        if not s.q_copied and s.engine != "trtllm":
            bytes_ = heads * query * wide
            yield layer, "queries", "all-gather", "dcp", s.kv_cp, DECODE, bytes_, "n H d"
        if s.kv_exchange == "a2a" or s.engine == "trtllm":
            bytes_ = heads * (output * wide + 4)
            what = "outputs and their log-sum-exp"
            yield layer, what, "all-to-all", "dcp", s.kv_cp, DECODE, bytes_, "n H (d + 1)"
        else:
            yield layer, "log-sum-exp", "all-gather", "dcp", s.kv_cp, DECODE, heads * 4, "n H"
            bytes_ = heads * output * wide
            what = "rescaled outputs"
            yield layer, what, "reduce-scatter", "dcp", s.kv_cp, DECODE, bytes_, "n H d"
    if s.attn_tp > 1:
        yield layer, "attention output", "all-reduce", "tp", s.attn_tp, BOTH, stream, "n h"


def _dense(model: Model, s: Serving, stream: int) -> Iterator[_Message]:
    if all(model.is_moe(i) for i in range(model.layers)):
        return
    layer = "dense layer" if model.moe else "every layer"
    if s.attn_dp > 1 and s.dense_tp > s.attn_tp:
        # Its ranks have different requests: each needs the tokens of all.
        yield from _round(layer, "MLP", "tp+dp", s.dense_tp, s.attn_dp * s.q_cp * stream)
    elif s.dense_tp > 1:
        yield layer, "MLP output", "all-reduce", "tp", s.dense_tp, BOTH, stream, "n h"


def _mixture(model: Model, s: Serving, stream: int) -> Iterator[_Message]:
    layer, size = "mixture layer", s.moe_ep * s.moe_tp
    axes = "+".join(axis for axis in ("tp", "cp", "dp") if _size(s, axis) > 1) or "tp"
    # Of the tokens of a step a rank has its share where they are cut over tp.
    own = s.attn_tp if s.moe_tokens_cut else 1
    if s.exchange == "dispatch":
        bytes_ = model.moe.topk * stream / own
        for where in ("to the experts", "back from the experts"):
            yield layer, where, "all-to-all", axes, size, BOTH, bytes_, "n k h"
    elif s.exchange == "gather":
        whole = s.moe_tokens_cut or s.attn_tp == 1
        group = axes if whole else "dp"
        size = size if whole else s.attn_dp
        yield from _round(layer, "experts", group, size, size * stream / own)
        if not whole:
            yield layer, "experts' output", "all-reduce", "tp", s.attn_tp, BOTH, stream, "n h"
    else:
        yield layer, "experts' output", "all-reduce", axes, size, BOTH, stream, "n h"
    if s.moe_tokens_cut:
        what = "tokens that were cut over tp"
        yield layer, what, "all-gather", "tp", s.attn_tp, BOTH, stream, "n h"


def _round(layer: str, what: str, group: str, size: int, bytes_: float) -> Iterator[_Message]:
    """Tokens of a group to each of its ranks, and their sums back."""
    yield layer, f"tokens before {what}", "all-gather", group, size, BOTH, bytes_, "sum of n h"
    yield layer, f"tokens after {what}", "reduce-scatter", group, size, BOTH, bytes_, "sum of n h"


def _size(s: Serving, axis: str) -> int:
    return {"tp": s.attn_tp, "cp": s.q_cp, "dp": s.attn_dp, "pp": s.stages}[axis]


def _group(
    s: Serving, cluster: Cluster | None, group: str, size: int
) -> tuple[tuple[int, ...], bool | None]:
    """Rank 0's group, and whether one of the groups leaves a fast domain."""
    grid = s.grid()
    if group == "dcp":
        # Consecutive ranks of tp; with prefill context parallelism its ranks, then those of tp.
        axes = ("cp",) if s.q_cp == s.kv_cp > 1 else ("tp", "cp")
    else:
        axes = tuple(group.split("+"))
    ranks = grid.group(0, *axes)
    ranks = ranks[:size] if group == "dcp" else ranks
    if cluster is None:
        return ranks, None
    whole = s.world * s.replicas
    starts = range(0, whole, s.world) if whole <= _LOOKED_AT else range(0, s.world, s.world)
    groups = grid.groups(*axes) if s.world <= _LOOKED_AT else [ranks]
    if group == "dcp":
        groups = [g[i : i + size] for g in groups for i in range(0, len(g), size)]
    far = any(
        cluster.crosses(tuple(start + rank for rank in g)) for start in starts for g in groups
    )
    return ranks, far
