"""What a rank of a serving layout holds: weights, the cache of keys and values, what a step needs.

    GQA, a token and rank   2 x layers of the stage x KV heads of the rank x head size x bytes
    MLA                         layers of the stage x (latent + rotary dims) x bytes, for any tp

both divided by the ranks that share a request's cache token by token. Prefill context parallelism
divides neither: the whole cache is gathered on each of its ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod

from plait.cost.device import COMMUNICATOR_BYTES, CONTEXT_BYTES
from plait.cost.serving import Serving, of_rank, stage_layers
from plait.spec.job import DTYPE_BYTES
from plait.spec.model import Model
from plait.spec.parameters import Parameter, parameters


@dataclass(frozen=True)
class Scheme:
    """How weights are stored.

    Attributes:
        bytes: of an element, its share of scales and zeros included.
        rows, columns: of a block that has one scale, outputs and inputs; a rank must hold whole
            ones.
        only: "experts", or "" for every matrix of a layer. Embedding, head, norms and routers
            stay as they are.
    """

    bytes: float
    rows: int = 1
    columns: int = 1
    only: str = ""


# A scale is float32 a block of 128 x 128 (DeepSeek), float16 with 4 bits of zero a group of 128
# (AWQ, GPTQ), 8 bits a group of 16 (NVFP4) or 32 (MXFP4), float32 a group of 64 (bitsandbytes).
SCHEMES = {
    "fp8": Scheme(1.0),
    "fp8-block": Scheme(1 + 4 / 128**2, 128, 128),
    "int8": Scheme(1.0),
    "awq": Scheme(0.5 + 2.5 / 128, columns=128),
    "gptq": Scheme(0.5 + 2.5 / 128, columns=128),
    "nvfp4": Scheme(0.5 + 1 / 16, columns=16),
    "nvfp4-experts": Scheme(0.5 + 1 / 16, columns=16, only="experts"),
    # Kernels for MXFP4 pad what a rank holds to whole groups.
    "mxfp4": Scheme(0.5 + 1 / 32),
    "mxfp4-experts": Scheme(0.5 + 1 / 32, only="experts"),
    "int4-experts": Scheme(0.5 + 2 / 32, columns=32, only="experts"),
    "bnb-4bit": Scheme(0.5 + 4 / 64),
}

#: Bytes of an element of the cache, by words in the engine's name of its dtype.
_KV_BYTES = (("nvfp4", 0.5 + 1 / 16), ("int4", 0.5), ("4bit", 0.5), ("fp8", 1.0), ("int8", 1.0))


def kv_element_bytes(serving: Serving) -> float:
    """Bytes of an element of the cache."""
    named = (size for word, size in _KV_BYTES if word in serving.kv_dtype)
    own = DTYPE_BYTES.get(serving.kv_dtype, DTYPE_BYTES.get(serving.dtype, 2))
    return next(named, own)


# ------------------------------------------------------------------------------------------
# Weights


def stage_weights(model: Model, serving: Serving) -> list[dict[str, int]]:
    """Bytes of weights of a rank, by what they are of, for each stage."""
    counts = stage_layers(serving, model)
    starts = [sum(counts[:i]) for i in range(len(counts))]
    stages: list[dict[str, int]] = [{} for _ in counts]
    last = len(counts) - 1
    for p in parameters(model):
        at = {"embed": 0, "head": last}.get(p.unit)
        if at is None:
            layer = int(p.unit.removeprefix("layers."))
            at = max(i for i, start in enumerate(starts) if start <= layer and counts[i])
        size = round(_elements(p, model, serving) * _bytes(p, serving))
        _add(stages[at], _kind(p), size)
        if model.tied and last and p.name == "embed.tokens.weight":
            # The last stage needs the table again, as its head.
            _add(stages[last], "head", size)
    return stages


def _add(held: dict[str, int], kind: str, size: int) -> None:
    held[kind] = held.get(kind, 0) + size


def _kind(p: Parameter) -> str:
    if p.unit in ("embed", "head"):
        return {"embed": "embedding"}.get(p.unit, "head")
    if p.expert:
        return "experts"
    if ".moe.shared." in p.name:
        return "shared experts"
    if ".moe." in p.name:
        return "router"
    if ".mlp." in p.name:
        return "mlp"
    return "attention" if ".attention." in p.name else "norms"


def _elements(p: Parameter, model: Model, serving: Serving) -> int:
    """Elements that a rank holds, padding included."""
    moe = model.moe
    if p.expert and moe is not None:
        own = ceil((moe.experts + serving.redundant) / serving.moe_ep)
        rest = p.numel // moe.experts
        return own * (rest if p.split == "expert-bias" else ceil(rest / serving.moe_tp))
    if p.split == "vocab":
        step = serving.kind.vocabulary
        rows = ceil(p.shape[0] / step) * step
        cut = serving.embed_tp if p.unit == "embed" else serving.head_tp
        return ceil(rows / cut) * prod(p.shape[1:])
    if p.split == "kv":
        return p.numel // model.kv_heads * kv_heads(model, serving)
    if p.split in ("column", "row"):
        return ceil(p.numel / _cut(p, serving))
    return p.numel


def _cut(p: Parameter, serving: Serving) -> int:
    """Ranks over which a matrix is cut."""
    if ".attention." in p.name:
        copied = serving.q_copied and ".q" in p.name
        return max(1, serving.attn_tp // serving.kv_cp) if copied else serving.attn_tp
    return serving.shared_tp if ".moe.shared." in p.name else serving.dense_tp


def quantised(p: Parameter, scheme: Scheme) -> bool:
    """Whether a scheme is of this parameter."""
    matrix = len(p.shape) > 1 and not p.name.endswith(".bias")
    inside = p.unit not in ("embed", "head") and p.split != "router"
    return matrix and inside and (p.expert or scheme.only != "experts")


def _bytes(p: Parameter, serving: Serving) -> float:
    scheme = SCHEMES.get(serving.weights or "")
    if scheme and quantised(p, scheme):
        return scheme.bytes
    return DTYPE_BYTES.get(serving.dtype, 2)


def whole_blocks(model: Model, serving: Serving) -> Iterator[tuple[str, int, int, int]]:
    """(what, its size, ranks, block) of matrices of which a rank does not hold whole blocks."""
    scheme = SCHEMES.get(serving.weights or "")
    if scheme is None:
        return
    seen = set()
    for p in parameters(model):
        if not quantised(p, scheme) or p.split in ("sequence", "heads", "router", "kv"):
            continue
        dim = {"column": 0, "row": 1, "expert-column": 1, "expert-row": 2}[p.split]
        block = scheme.rows if p.split.endswith("column") else scheme.columns
        size, cut = p.shape[dim], serving.moe_tp if p.expert else _cut(p, serving)
        kind = _kind(p)
        if cut > 1 and size % cut == 0 and size // cut % block and (kind, size) not in seen:
            seen.add((kind, size))
            yield kind, size, cut, block


# ------------------------------------------------------------------------------------------
# The cache


def kv_heads(model: Model, serving: Serving) -> int:
    """KV heads of a rank; of MLA the one latent that all heads share."""
    return 1 if model.mla else max(1, model.kv_heads // serving.kv_tp)


def kv_copies(model: Model, serving: Serving) -> float:
    """Ranks of an engine's stage that hold the same part of a request's cache."""
    heads = 1 if model.mla else model.kv_heads
    ranks = serving.attn_tp * serving.q_cp
    return ranks * kv_heads(model, serving) / (heads * serving.kv_cp)


def layer_bytes(model: Model, serving: Serving) -> float:
    """Bytes of the cache a token and layer on a rank that holds the token."""
    if model.mla:
        width = model.mla.kv_rank + model.mla.rope_dim
    else:
        width = 2 * kv_heads(model, serving) * model.head_dim
    return width * kv_element_bytes(serving)


def token_bytes(model: Model, serving: Serving) -> list[float]:
    """Bytes of the cache a token on a rank of each stage, on average over the kv_cp ranks."""
    each = layer_bytes(model, serving) / serving.kv_cp
    return [layers * each for layers in stage_layers(serving, model)]


def request_bytes(model: Model, serving: Serving, tokens: int) -> list[float]:
    """Bytes of the cache of a request of so many tokens on a rank of each stage: whole blocks,
    of windowed layers no more than the window."""
    block, each = serving.tokens_of_block, layer_bytes(model, serving)

    def held(layer: int) -> float:
        full = model.is_full_attention(layer) or model.window is None
        seen = tokens if full else min(tokens, model.window)
        return ceil(seen / (block * serving.kv_cp)) * block * each

    counts = stage_layers(serving, model)
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return [sum(map(held, range(a, a + n))) for a, n in zip(starts, counts, strict=True)]


# ------------------------------------------------------------------------------------------
# What fits


#: Requests and tokens of a step where neither the launch nor the engine says how many.
REQUESTS, TOKENS = 256, 8192


def working_bytes(model: Model, serving: Serving) -> list[int]:
    """What a step of the most tokens needs beside weights and cache, for each stage: an estimate
    of the stream, of the widest map of a layer, and of the logits of the most requests."""
    tokens = of_rank(serving, "max_tokens") or TOKENS
    requests = of_rank(serving, "max_requests") or REQUESTS
    width = DTYPE_BYTES.get(serving.dtype, 2)
    gates = 2 if model.gated else 1
    maps = [(model.heads + 2 * model.kv_heads) * model.head_dim // serving.attn_tp]
    maps.append(gates * model.ffn // serving.dense_tp)
    if model.moe:
        maps.append((gates + 1) * model.moe.topk * model.moe.ffn // serving.moe_tp)
    layer = tokens * (3 * model.hidden + max(maps)) * width
    logits = min(requests, tokens) * model.vocab * 4
    return [layer + (logits if s == serving.stages - 1 else 0) for s in range(serving.stages)]


def context_bytes(serving: Serving) -> int:
    """CUDA context and communicators: an estimate."""
    sizes = (serving.attn_tp, serving.q_cp, serving.stages, serving.attn_dp, serving.kv_cp)
    return CONTEXT_BYTES + sum(size > 1 for size in sizes) * COMMUNICATOR_BYTES


def share(serving: Serving, device: int) -> float:
    """The fraction of memory that the engine uses, where it decides by itself.

    SGLang (arg_groups/memory_hook.py) keeps 512 MiB, 1.5 MiB a token of a chunk and 128 MiB a
    rank, and at least 10 GiB of devices above 60 GiB.
    """
    if serving.fraction is not None:
        return serving.fraction
    if serving.kind.fraction is not None:
        return serving.kind.fraction
    mib = 2**20
    kept = 512 + 1.5 * max(serving.max_tokens or TOKENS, 2048) + 128 * serving.world
    kept = max(kept, 10240) if device > 60 * 1024 * mib else kept
    return round(max(0.0, 1 - kept * mib / device), 3)


def pool_bytes(model: Model, serving: Serving, device: int) -> list[int]:
    """What is left for the cache on a rank of each stage, bytes; below 0 where weights alone do
    not fit."""
    fraction, context = share(serving, device), context_bytes(serving)
    pools = []
    weights = [sum(held.values()) for held in stage_weights(model, serving)]
    for held, working in zip(weights, working_bytes(model, serving), strict=True):
        if serving.kind.of == "free":
            free = device - held - working - context
            pools.append(int(free * fraction) if free > 0 else free)
        else:
            besides = working + context if serving.kind.of == "device" else 0
            pools.append(int(device * fraction) - held - besides)
    return pools


def tokens_that_fit(model: Model, serving: Serving, pools: list[int], length: int) -> list[int]:
    """Tokens whose cache a rank's group holds, for each stage: whole blocks; of a model with
    windows as many as requests of `length` have."""
    block, found = serving.tokens_of_block, []
    for stage, (pool, layers) in enumerate(zip(pools, stage_layers(serving, model), strict=True)):
        if not layers:
            continue
        if model.window is None:
            blocks = max(0, pool) // (block * layers * layer_bytes(model, serving))
            found.append(int(blocks) * block * serving.kv_cp)
        else:
            of_request = request_bytes(model, serving, length)[stage]
            found.append(int(max(0, pool) / of_request * length))
    return found
