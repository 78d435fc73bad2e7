"""What vLLM 0.33 can split when it serves a model, with the flag, and what a rank holds then.

Flags and rules were read in its source (0.33.0). What it holds is computed here: weights as the
layouts of this program cut them, keys and values by

    GQA   2 x layers of the stage x max(1, G / t) x head size x bytes        (/ c under DCP)
    MLA       layers of the stage x (latent + rotary dims) x bytes, for any t (/ c under DCP)

a token and rank, with G KV heads, t = tensor and c = decode context parallel degree.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

from plait.rules.legality import tp_cuts
from plait.spec.chunks import chunk_layers, chunk_parameters
from plait.spec.layout import Layout, divisors
from plait.spec.model import Model
from plait.spec.parameters import local_shape

#: Bytes of an element of weights and of the cache: bfloat16.
BYTES = 2


@dataclass(frozen=True)
class Serving:
    """A strategy of serving, or one of training that serving has no use for.

    Attributes:
        supported: "yes", "no" or in part.
        flag: N is the degree.
        shards, copies: what a rank has a part of, and what it has like all others.
        degrees: layout field -> degree as the ranks are used, "N" all of them, "C" the decode
            context degree; None where nothing is computed.
        experts: of a mixture only.
    """

    name: str
    supported: str
    flag: str
    shards: str
    copies: str
    degrees: dict[str, str] | None = None
    experts: bool = False


_NOTHING = "nothing to shard: serving has no gradients and no optimizer states"

SERVING = (
    Serving(
        "tensor parallel",
        "yes",
        "-tp N",
        "heads, MLP width, vocabulary; KV heads down to one a rank",
        "norms, router; KV heads beyond their number; all latents of MLA",
        {"tp": "N", "etp": "N"},
    ),
    Serving(
        "pipeline parallel",
        "yes, where the model class says so",
        "-pp N",
        "layers, and the cache of these layers",
        "nothing; the cache of N batches under way is held at once",
        {"pp": "N"},
    ),
    Serving(
        "data parallel",
        "yes",
        "-dp N",
        "requests and their cache",
        "all weights but those of experts, which are cut over all ranks",
        {"etp": "N"},
    ),
    Serving(
        "expert parallel",
        "yes; its size is dp x pcp x tp, no flag sets it",
        "-tp N --enable-expert-parallel",
        "experts, whole ones; the rest as under tensor parallel",
        "router",
        {"tp": "N", "ep": "N"},
        experts=True,
    ),
    Serving(
        "data parallel attention + expert parallel",
        "yes",
        "-dp N --enable-expert-parallel",
        "requests and their cache; experts, whole ones",
        "attention, router, shared experts, embeddings",
        {"ep": "N"},
        experts=True,
    ),
    Serving(
        "expert load balancing",
        "yes, with expert parallel",
        "--enable-eplb",
        "load: busy experts get more copies",
        "the redundant experts",
        experts=True,
    ),
    Serving(
        "decode context parallel",
        "yes, where attention returns its log-sum-exp",
        "-tp N -dcp C",
        "the cache along its tokens, over ranks that tensor parallel has already",
        "as tensor parallel; copies of KV heads are what it removes",
        {"tp": "N", "etp": "N", "dcp": "C"},
    ),
    Serving(
        "prefill context parallel",
        "yes, where the attention backend says so",
        "-pcp N",
        "tokens of a prompt, in two pieces a rank; experts",
        "the other weights, and the whole cache: it is gathered on each rank",
        {"cp": "N", "etp": "N"},
    ),
    Serving(
        "sequence parallel of mixtures",
        "yes, by itself where ep, tp > 1 and dp > 1",
        "",
        "tokens between attention and experts",
        "nothing more",
        experts=True,
    ),
    Serving(
        "sequence parallel (norm regions)",
        "no: the compiled passes for it and for async TP are gone",
        "",
        "",
        "the residual stream on every tensor parallel rank",
    ),
    Serving("ring attention, Ulysses", "no; see context parallel", "", "", ""),
    Serving(
        "DDP", "as replicas: data parallel, or servers of their own", "-dp N", "requests", "all"
    ),
    Serving("ZeRO, FSDP, HSDP", f"no: {_NOTHING}", "", "", ""),
)


def vllm(model: Model, ranks: int) -> list[dict[str, Any]]:
    """A row for each strategy: whether it is supported, its flag, and what a rank holds.

    Rows that use ranks have `weight_bytes` of the fullest stage and `cache_bytes_per_token` of a
    rank, of its own requests where these are split; `why` says what is illegal about N ranks.
    """
    return [_row(s, model, ranks) for s in SERVING if model.moe or not s.experts]


def _row(serving: Serving, model: Model, ranks: int) -> dict[str, Any]:
    row = {
        "strategy": serving.name,
        "supported": not serving.supported.startswith("no"),
        "support": serving.supported,
        "flag": "",
        "shards": serving.shards,
        "copies": serving.copies,
        "weight_bytes": None,
        "cache_bytes_per_token": None,
        "cache_copies": None,
        "why": None,
    }
    context = decode_context(model, ranks)
    row["flag"] = serving.flag.replace("N", str(ranks)).replace("C", str(context))
    if serving.degrees is None:
        return row
    # Without a mixture there is nothing for the expert grid to cut.
    wanted = {k: v for k, v in serving.degrees.items() if model.moe or k not in ("ep", "etp")}
    degrees = {k: {"N": ranks, "C": context}[v] for k, v in wanted.items()}
    why = _illegal(model, degrees)
    if why is None:
        # Only what a rank has of the model is asked: the other degrees do not matter.
        layout = Layout(**{"zero": 0, **degrees})
        row["weight_bytes"] = BYTES * _elements(model, layout)
        row["cache_bytes_per_token"] = cache_bytes(model, layout)
        row["cache_copies"] = _copies(model, layout)
    return row | {"why": why}


def decode_context(model: Model, tp: int) -> int:
    """The largest decode context degree: the copies of a KV head, or tp for latents.

    vLLM checks that it is at most tp / G and divides tp, and forgets that it must divide tp / G
    too: otherwise a group holds two different heads.
    """
    if model.mla:
        return tp
    copies = max(1, tp // model.kv_heads)
    fitting = (c for c in divisors(copies) if model.heads // model.kv_heads % c == 0)
    return max(fitting, default=1)


def cache_bytes(model: Model, layout: Layout) -> float:
    """Bytes of keys and values, or of latents, a token on a rank, of the stage with most layers."""
    layers = max(map(len, chunk_layers(model, layout)))
    if model.mla:
        width = model.mla.kv_rank + model.mla.rope_dim
    else:
        width = 2 * max(1, model.kv_heads // layout.tp) * model.head_dim
    return layers * width * BYTES / layout.dcp


def _copies(model: Model, layout: Layout) -> float:
    """Ranks that hold the same part of a request's cache."""
    heads = 1 if model.mla else model.kv_heads
    return layout.cp * max(1, layout.tp // heads) / layout.dcp


def _elements(model: Model, layout: Layout) -> int:
    """Parameters that a rank of the fullest stage has."""
    return max(
        sum(prod(local_shape(p, model, layout)) for p in chunk_parameters(model, layout, chunk))
        for chunk in range(layout.pp)
    )


def _illegal(model: Model, degrees: dict[str, int]) -> str | None:
    """Why these degrees do not go with the model."""
    tp, pp = degrees.get("tp", 1), degrees.get("pp", 1)
    for _, cut, suits in tp_cuts(model):
        if not suits(tp):
            return f"{cut} do not divide over tp {tp}"
    if pp > model.layers:
        return f"{model.layers} layers are fewer than pp {pp}"
    if degrees.get("dcp") == 1:
        return f"tp {tp} copies no KV head: the {model.kv_heads} of them leave nothing to share"
    if model.moe and model.moe.ffn % degrees.get("etp", 1):
        return f"{model.moe.ffn} columns of an expert do not divide over {degrees['etp']}"
    if model.moe and model.moe.experts % degrees.get("ep", 1):
        return f"{model.moe.experts} experts do not divide over {degrees['ep']} ranks here"
    return None
