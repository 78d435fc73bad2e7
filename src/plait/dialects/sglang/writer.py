"""A job as SGLang launch commands."""

from dataclasses import replace
from math import ceil
from typing import Any

from plait.cost.serving import Serving, carried, on, stage_layers
from plait.dialects.launch import Written, note
from plait.dialects.serve.writer import (
    ADDRESS,
    command,
    devices_of_node,
    dropped,
    repository,
    scripts,
)
from plait.spec.job import Job

_ENGINE = "SGLang"
#: Words of a launch that SGLang has too.
_KV = frozenset(("auto", "fp8_e4m3", "fp8_e5m2", "bf16", "bfloat16"))


def write(job: Job, serving: Serving | None = None) -> Written:
    """The commands that serve a job.

    Args:
        serving: what a launch chose beside its layout.
    """
    layout, moe = job.layout, job.model.moe
    name, notes = repository(job, serving, _ENGINE)
    notes += dropped(job, _ENGINE)
    same = serving is not None and serving.engine == "sglang"
    chosen = on(serving if same and serving else _plain(serving), layout)
    # Without experts there is nothing for attention DP to lie beside, but it may be asked for.
    whole = layout.tp * layout.cp * layout.dp_shard
    ep, replicas = layout.ep if moe else 1, layout.dp_replicate
    if moe and (whole % ep or layout.etp != whole // ep):
        ep = ep if whole % ep == 0 else 1
        words = (
            f"experts lie over ep x their tp = {whole} devices of a stage: ep {ep} x "
            f"{whole // ep}, not {layout.ep} x {layout.etp}"
        )
        notes.append(note(_ENGINE, "sglang-expert-degrees", words))
    dcp = layout.dcp if layout.cp == 1 else 1
    if layout.dcp > 1 and layout.cp > 1:
        words = "decode context parallelism does not go with that of prefill; it is left out"
        notes.append(note(_ENGINE, "sglang-dcp", words))
    here = devices_of_node(job, serving)
    servers = replicas > 1 and (layout.dp_shard > 1 or whole * layout.pp * replicas > here)
    if servers:
        words = f"{replicas} replicas are as many servers: start this for each"
        notes.append(note(_ENGINE, "sglang-replicas", words))
    fraction = chosen.fraction if same else None
    flags: list[tuple[str, Any]] = [
        ("--model-path", name),
        ("--tp-size", whole if whole > 1 else None),
        ("--pp-size", layout.pp if layout.pp > 1 else None),
        ("--dp-size", None if servers or replicas == 1 else replicas),
        ("--attn-dp-size", layout.dp_shard if layout.dp_shard > 1 else None),
        ("--attn-cp-size", layout.cp if layout.cp > 1 else None),
        ("--enable-prefill-cp", layout.cp > 1),
        ("--cp-strategy", "zigzag" if layout.cp > 1 else None),
        ("--dcp-size", dcp if dcp > 1 else None),
        ("--ep-size", ep if ep > 1 else None),
        ("--moe-a2a-backend", chosen.backend if chosen.backend and ep == whole > 1 else None),
        ("--enable-eplb", chosen.balanced and ep > 1),
        *_choices(job, chosen, ep),
        ("--mem-fraction-static", fraction),
    ]
    environment = ""
    if layout.pp > 1 and layout.stages and len(layout.stages) == layout.pp:
        usual = stage_layers(on(Serving("sglang"), replace(layout, stages=None)), job.model)
        if tuple(layout.stages) != usual:
            environment = f"SGLANG_PP_LAYER_PARTITION={','.join(map(str, layout.stages))} "
    ranks = whole * layout.pp
    nodes = 1 if ranks <= here else next(n for n in range(ceil(ranks / here), ranks + 1)
                                         if ranks % n == 0)  # fmt: skip
    texts = []
    for rank in range(nodes):
        where: list[tuple[str, Any]] = [
            ("--nnodes", nodes),
            ("--node-rank", rank),
            ("--dist-init-addr", f"{ADDRESS}:20000"),
        ]
        own = flags + (where if nodes > 1 else [])
        texts.append(environment + command(["python3", "-m", "sglang.launch_server"], own))
    return Written(scripts(texts), notes)


def _plain(serving: Serving | None) -> Serving:
    """A launch of another engine: what it chose that SGLang has too."""
    if serving is None:
        return Serving("sglang")
    kv = {"fp8": "fp8_e4m3"}.get(serving.kv_dtype, serving.kv_dtype)
    return replace(carried(serving, "sglang"), kv_dtype=kv if kv in _KV else "auto")


def _choices(job: Job, serving: Serving, ep: int) -> list[tuple[str, Any]]:
    length = serving.max_len if serving.max_len is None else min(serving.max_len, job.train.seq_len)
    moe, redundant = job.model.moe, serving.redundant
    if moe is not None and ep > 1:
        redundant += -(moe.experts + redundant) % ep
    return [
        ("--ep-num-redundant-experts", redundant if redundant and ep > 1 else None),
        ("--enable-dp-lm-head", serving.head_apart),
        ("--moe-dense-tp-size", 1 if serving.dense_copied else None),
        ("--context-length", length),
        ("--max-running-requests", serving.max_requests),
        ("--chunked-prefill-size", serving.max_tokens),
        ("--kv-cache-dtype", None if serving.kv_dtype == "auto" else serving.kv_dtype),
        ("--page-size", serving.block if serving.block not in (None, 1) else None),
        ("--dtype", None if serving.dtype == "bfloat16" else serving.dtype),
    ]
