"""A job as `vllm serve` commands."""

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
from plait.spec.findings import Finding
from plait.spec.job import Job

_ENGINE = "vLLM"


def write(job: Job, serving: Serving | None = None) -> Written:
    """The commands that serve a job.

    Args:
        serving: what a launch chose beside its layout.
    """
    layout, moe = job.layout, job.model.moe
    name, notes = repository(job, serving, _ENGINE)
    notes += dropped(job, _ENGINE) + _experts(job)
    serving = on(serving if serving and serving.engine == "vllm" else _plain(serving), layout)
    dp = layout.dp_shard if moe else layout.dp_shard * layout.dp_replicate
    if moe is not None and layout.dp_replicate > 1:
        words = f"{layout.dp_replicate} replicas are as many servers: start this for each"
        notes.append(note(_ENGINE, "vllm-replicas", words))
    experts = moe is not None and layout.ep > 1
    one = layout.tp * layout.pp * layout.cp
    environment = ""
    if layout.pp > 1 and layout.stages and len(layout.stages) == layout.pp:
        usual = on(Serving("vllm"), _without_stages(layout))
        if tuple(layout.stages) != stage_layers(usual, job.model):
            environment = f"VLLM_PP_LAYER_PARTITION={','.join(map(str, layout.stages))} "
    flags: list[tuple[str, Any]] = [
        ("--tensor-parallel-size", layout.tp if layout.tp > 1 else None),
        ("--pipeline-parallel-size", layout.pp if layout.pp > 1 else None),
        ("--prefill-context-parallel-size", layout.cp if layout.cp > 1 else None),
        ("--decode-context-parallel-size", layout.dcp if layout.dcp > 1 else None),
        ("--data-parallel-size", dp if dp > 1 else None),
        ("--enable-expert-parallel", experts),
        *_choices(job, serving, experts),
    ]
    here = devices_of_node(job, serving)
    nodes = _nodes(flags, one, dp, here)
    commands = [environment + command(["vllm", "serve", name], own) for own in nodes]
    return Written(scripts(commands), notes)


def _plain(serving: Serving | None) -> Serving:
    """A launch of another engine: what it chose that vLLM has too."""
    if serving is None:
        return Serving("vllm")
    kv = "fp8" if serving.kv_dtype.startswith("fp8") else serving.kv_dtype
    return replace(carried(serving, "vllm"), kv_dtype=kv if kv in _KV else "auto")


#: Words for the cache's dtype that other engines have too.
_KV = frozenset(("auto", "fp8", "nvfp4"))


def _without_stages(layout: Any) -> Any:
    return replace(layout, stages=None)


def _experts(job: Job) -> list[Finding]:
    """Expert degrees that vLLM does not have."""
    layout, moe = job.layout, job.model.moe
    group = layout.tp * layout.cp * layout.dp_shard
    if moe is None:
        if layout.dp_shard > 1:
            words = f"a dense model has no attention DP: its {layout.dp_shard} ranks are engines"
            return [note(_ENGINE, "vllm-dense-data-parallel", words)]
        return []
    if layout.ep in (1, group) and (layout.ep > 1 or layout.etp in (1, group)):
        if layout.ep == 1 < group and layout.etp == 1:
            words = f"experts cannot be whole on every rank: they are cut over {group} of them"
            return [note(_ENGINE, "vllm-expert-degrees", words)]
        return []
    how = f"ep {group}" if layout.ep > 1 else f"each expert cut over {group}"
    words = (
        f"ep {layout.ep} x etp {layout.etp} cannot be said: experts lie over tp x pcp x dp = "
        f"{group} ranks, whole or cut; written with {how}"
    )
    return [note(_ENGINE, "vllm-expert-degrees", words)]


def _choices(job: Job, serving: Serving, experts: bool) -> list[tuple[str, Any]]:
    """Lengths, limits, dtypes."""
    length = serving.max_len if serving.max_len is None else min(serving.max_len, job.train.seq_len)
    group = job.layout.tp * job.layout.cp * job.layout.dp_shard
    moe, balanced = job.model.moe, serving.balanced and experts and group > 1
    redundant = serving.redundant
    if moe is not None and balanced:
        redundant += -(moe.experts + redundant) % group
    block = serving.block if serving.block not in (None, 16, 64) else None
    backend = serving.backend if serving.backend not in ("", "allgather_reducescatter") else None
    backend = None if backend in ("pplx", "naive", "passthrough") else backend
    tokens = serving.max_tokens
    if tokens is not None and serving.max_requests is not None:
        tokens = max(tokens, serving.max_requests)  # fewer are refused
    return [
        ("--enable-eplb", balanced),
        ("--eplb-config.num_redundant_experts", redundant if balanced and redundant else None),
        ("--all2all-backend", backend if experts else None),
        ("--dcp-comm-backend", "a2a" if serving.kv_exchange == "a2a" else None),
        ("--max-model-len", length),
        ("--max-num-seqs", serving.max_requests),
        ("--max-num-batched-tokens", tokens),
        ("--gpu-memory-utilization", None if serving.fraction in (None, 0.92) else
         serving.fraction),
        ("--kv-cache-dtype", None if serving.kv_dtype == "auto" else serving.kv_dtype),
        ("--block-size", block),
        ("--dtype", None if serving.dtype == "bfloat16" else serving.dtype),
    ]  # fmt: skip


def _nodes(
    flags: list[tuple[str, Any]], one: int, dp: int, here: int
) -> list[list[tuple[str, Any]]]:
    """The flags of each node; `one`: ranks of a data-parallel rank, `here`: devices of a node."""
    if one * dp <= here:
        return [flags]
    if one <= here and here % one == 0:
        local = here // one
        made = []
        for rank in range(ceil(dp / local)):
            mine = min(local, dp - rank * local)
            where: list[tuple[str, Any]] = [
                ("--data-parallel-size-local", mine),
                ("--data-parallel-start-rank", rank * local if rank else None),
                ("--data-parallel-address", ADDRESS),
                ("--data-parallel-rpc-port", 13345),
                ("--headless", rank > 0),
            ]
            made.append(flags + where)
        return made
    nodes = next(n for n in range(ceil(one * dp / here), one * dp + 1) if one * dp % n == 0)
    return [
        [
            *flags,
            ("--nnodes", nodes),
            ("--node-rank", rank),
            ("--master-addr", ADDRESS),
            ("--headless", rank > 0),
        ]
        for rank in range(nodes)
    ]
