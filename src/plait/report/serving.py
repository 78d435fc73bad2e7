"""What a serving layout holds and sends, as REPORT says it."""

from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from typing import Any

from plait.cost.serving import Serving, limits, longest, of_rank, stage_layers
from plait.cost.serving_memory import (
    context_bytes,
    kv_copies,
    kv_heads,
    pool_bytes,
    request_bytes,
    share,
    stage_weights,
    token_bytes,
    tokens_that_fit,
    working_bytes,
)
from plait.cost.serving_traffic import BOTH, DECODE, PREFILL, collectives
from plait.spec.findings import Finding
from plait.spec.job import Job
from plait.spec.layout import Layout

_ROLES = (
    "attn_tp",
    "attn_dp",
    "stages",
    "moe_ep",
    "moe_tp",
    "kv_cp",
    "q_cp",
    "replicas",
    "dense_tp",
    "shared_tp",
    "embed_tp",
    "head_tp",
)
#: What is not known of a layout that is illegal.
_NUMBERS = (
    "weight_bytes",
    "kv_heads",
    "kv_bytes_per_token",
    "kv_copies",
    "request_bytes",
    "cache_bytes",
    "tokens",
    "tokens_in_all",
    "max_concurrency",
    "limiting_stage",
    "by_stage",
    "collectives",
)


def section(job: Job, serving: Serving, findings: Sequence[Finding], legal: bool) -> dict[str, Any]:
    """REPORT's `serving`: per rank the weights, KV heads, bytes of cache a token, how often the
    cache is kept, the tokens that fit (None without a device); what each limit counts; the
    collectives of a layer; and the rules that break. Bytes are of the fullest rank."""
    about = {
        "engine": serving.engine,
        "name": serving.kind.name,
        "model": serving.model or job.model.name,
        "roles": {role: getattr(serving, role) for role in _ROLES},
        "order": [*serving.kind.order, "replicas"],
        "weights": serving.weights or serving.dtype,
        "kv_dtype": serving.dtype if serving.kv_dtype == "auto" else serving.kv_dtype,
        "block_tokens": serving.tokens_of_block * serving.kv_cp,
        "max_len": longest(serving, job.model),
        "experts_per_rank": _experts(job, serving),
        "redundant_experts": serving.redundant,
        "exchange": serving.exchange if job.model.moe else None,
        "limits": [asdict(limit) for limit in limits(serving)],
        "rules": list(dict.fromkeys(f.rule for f in findings if f.level != "note")),
    }
    return about | (_numbers(job, serving) if legal else dict.fromkeys(_NUMBERS))


def _experts(job: Job, serving: Serving) -> int | None:
    """Experts of the fullest rank."""
    moe = job.model.moe
    return None if moe is None else -(-(moe.experts + serving.redundant) // serving.moe_ep)


def _numbers(job: Job, serving: Serving) -> dict[str, Any]:
    model, cluster = job.model, job.cluster
    length = longest(serving, model)
    weights = stage_weights(model, serving)
    each = [_whole(n) for n in token_bytes(model, serving)]
    requests = [round(n) for n in request_bytes(model, serving, length)]
    stages: list[dict[str, Any]] = [
        {
            "stage": stage,
            "layers": layers,
            "weight_bytes": sum(held.values()),
            "weights": held,
            "kv_bytes_per_token": each[stage],
            "request_bytes": requests[stage],
            "working_bytes": working,
            "cache_bytes": None,
            "tokens": None,
        }
        for stage, (layers, held, working) in enumerate(
            zip(stage_layers(serving, model), weights, working_bytes(model, serving), strict=True)
        )
    ]
    fit: dict[str, Any] = dict.fromkeys(
        ("cache_bytes", "tokens", "tokens_in_all", "max_concurrency", "limiting_stage", "fraction")
    )
    if cluster is not None:
        pools = pool_bytes(model, serving, cluster.memory)
        tokens = tokens_that_fit(model, serving, pools, length)
        for row, pool, fitting in zip(stages, pools, tokens, strict=False):
            row |= {"cache_bytes": pool, "tokens": fitting}
        least = min(range(len(tokens)), key=lambda s: tokens[s])
        room = min(
            max(0, pool) / of_request if of_request else float("inf")
            for pool, of_request in zip(pools, requests, strict=True)
        )
        fit = {
            "cache_bytes": pools[least],
            "tokens": tokens[least],
            "tokens_in_all": tokens[least] * serving.attn_dp * serving.replicas,
            "max_concurrency": round(room, 2),
            "limiting_stage": least,
            "fraction": share(serving, cluster.memory),
        }
    return {
        "weight_bytes": max(row["weight_bytes"] for row in stages),
        "kv_heads": kv_heads(model, serving),
        "kv_bytes_per_token": max(each),
        "kv_copies": _whole(kv_copies(model, serving)),
        "request_bytes": max(requests),
        **fit,
        "by_stage": stages,
        "collectives": _collectives(job, serving),
    }


def _collectives(job: Job, serving: Serving) -> list[dict[str, Any]]:
    """Each with its bytes in a step of the most tokens (prefill) and of the most requests
    (decode), where these are known."""
    tokens, requests = of_rank(serving, "max_tokens"), of_rank(serving, "max_requests")
    rows = []
    for c in collectives(job.model, serving, job.cluster):
        prefill = requests if c.of == "request" else tokens
        of_prefill = prefill if c.phase in (BOTH, PREFILL) else None
        of_decode = requests if c.phase in (BOTH, DECODE) else None
        row = asdict(c) | {
            "ranks": list(c.ranks),
            "bytes_per_token": _whole(c.bytes_per_token),
            "prefill_bytes": None if of_prefill is None else round(c.bytes_per_token * of_prefill),
            "decode_bytes": None if of_decode is None else round(c.bytes_per_token * of_decode),
        }
        rows.append(row)
    return rows


def _whole(n: float) -> float | int:
    return int(n) if n == int(n) else n


def memory(job: Job, serving: Serving) -> dict[str, Any]:
    """REPORT's `memory`: weights, what a step needs, and the cache of one longest request. It fits
    where the cache that is left on each stage has room for one."""
    model, cluster = job.model, job.cluster
    length = longest(serving, model)
    requests = [round(n) for n in request_bytes(model, serving, length)]
    rows = []
    for stage, (held, working, cache) in enumerate(
        zip(stage_weights(model, serving), working_bytes(model, serving), requests, strict=True)
    ):
        classes = dict.fromkeys(("gradients", "optimizer", "logits", "gathered", "buffers"), 0)
        weights = sum(held.values())
        rows.append(
            {"stage": stage, "moment": "serving", "parameters": weights}
            | classes
            | {"activations": working, "cache": cache, "total": weights + working + cache}
        )
    margin = None
    if cluster is not None:
        pools = pool_bytes(model, serving, cluster.memory)
        margin = min(pool - needed for pool, needed in zip(pools, requests, strict=True))
    return {
        "device_bytes": cluster.memory if cluster else None,
        "peak_bytes": max(row["total"] for row in rows),
        "reserved_bytes": 0,
        "context_bytes": context_bytes(serving),
        "margin_bytes": margin,
        "recipe": None,
        "by_stage": rows,
    }


def grids(layout: Layout, serving: Serving) -> dict[str, dict[str, int] | None]:
    """The ranks in the order of the engine, by the names of a layout's axes."""
    names = {"tp": "tp", "cp": "cp", "dp": "dp_shard", "pp": "pp"}
    dense = {names[axis]: getattr(layout, names[axis]) for axis in serving.kind.order}
    dense["dp_replicate"] = layout.dp_replicate
    # Data parallel ranks outside of the stages: experts lie on ranks that are no run of numbers.
    order = serving.kind.order
    apart = order.index("dp") > order.index("pp") and layout.pp > 1 and layout.dp_shard > 1
    if apart:
        return {"dense": dense, "expert": None}
    edp = prod(dense.values()) // max(1, layout.etp * layout.ep * layout.pp)
    expert = {"etp": layout.etp, "ep": layout.ep, "edp": edp, "pp": layout.pp}
    return {"dense": dense, "expert": expert}
