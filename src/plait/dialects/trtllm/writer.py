"""A job as a `trtllm-serve` command, with its file of options where flags do not say it all."""

from math import ceil
from typing import Any

from plait.cost.serving import Serving, carried
from plait.dialects.launch import Written, note
from plait.dialects.serve.writer import command, devices_of_node, dropped, repository
from plait.spec.findings import Finding
from plait.spec.job import Job

_ENGINE = "TensorRT-LLM"
_OPTIONS = "options.yaml"


def write(job: Job, serving: Serving | None = None) -> Written:
    """The command that serves a job.

    Args:
        serving: what a launch chose beside its layout.
    """
    layout, moe = job.layout, job.model.moe
    name, notes = repository(job, serving, _ENGINE)
    notes += dropped(job, _ENGINE)
    if layout.dp_replicate > 1:
        words = f"{layout.dp_replicate} replicas are as many servers: start this for each"
        notes.append(note(_ENGINE, "trtllm-replicas", words))
    tp, cp, helix, more = _context(job)
    notes += more
    adp = layout.dp_shard > 1
    if adp and layout.tp > 1:
        words = (
            f"attention with tp {layout.tp} x dp {layout.dp_shard} cannot be said: attention DP is "
            f"over all {tp * layout.dp_shard}"
        )
        notes.append(note(_ENGINE, "trtllm-attention-dp", words))
    tp *= layout.dp_shard
    tree: dict[str, Any] = {}
    ep = None
    if moe is not None:
        ep, more = _experts(job, tp * (cp if helix else 1), cp > 1 and not helix)
        notes += more
    chosen = serving if serving and serving.engine == "trtllm" else None
    if helix:
        tree["cp_config"] = {"cp_type": "HELIX"}
    if layout.stages and layout.pp > 1 and len(layout.stages) == layout.pp:
        tree["pp_partition"] = list(layout.stages)
    if chosen is not None:
        if chosen.head_apart and adp:
            tree["enable_lm_head_tp_in_adp"] = True
        if chosen.balanced and moe is not None and ep:
            slots = moe.experts + chosen.redundant
            tree["moe_config"] = {"load_balancer": {"num_slots": slots + -slots % ep}}
        if chosen.block not in (None, 32):
            tree["kv_cache_config"] = {"tokens_per_block": chosen.block}
        if chosen.dtype != "bfloat16":
            tree["dtype"] = chosen.dtype
    here = devices_of_node(job, serving)
    ranks = tp * cp * layout.pp
    flags: list[tuple[str, Any]] = [
        ("--tp_size", tp if tp > 1 else None),
        ("--pp_size", layout.pp if layout.pp > 1 else None),
        ("--cp_size", cp if cp > 1 else None),
        ("--ep_size", ep if ep and ep > 1 else None),
        ("--enable_attention_dp", adp),
        ("--gpus_per_node", here if ranks > here else None),
        *_choices(job, serving, chosen),
        ("--config", _OPTIONS if tree else None),
    ]
    words = ["trtllm-serve", name]
    if ranks > here:
        nodes = ceil(ranks / here)
        start = f"srun --nodes={nodes} --ntasks={ranks} --ntasks-per-node={here} --mpi=pmix"
        words = [*start.split(), "trtllm-llmapi-launch", *words]
    files = {"serve.sh": f"#!/bin/sh\n{command(words, flags)}\n"}
    if tree:
        files[_OPTIONS] = _yaml(tree)
    return Written(files, notes)


def _context(job: Job) -> tuple[int, int, bool, list[Finding]]:
    """tp, cp, and whether cp is Helix."""
    layout = job.layout
    if layout.dcp == 1:
        return layout.tp, layout.cp, False, []
    if layout.cp > 1:
        return layout.tp, layout.cp, layout.dcp == layout.cp, []
    if job.model.mla is None:
        words = f"decode context parallelism {layout.dcp} (Helix) is for MLA; it is left out"
        return layout.tp, 1, False, [note(_ENGINE, "trtllm-helix", words)]
    tp = layout.tp // layout.dcp
    words = (
        f"ranks that share a cache are ranks of their own (Helix): tp {tp} x cp {layout.dcp} in "
        f"place of tp {layout.tp} x dcp {layout.dcp}"
    )
    return tp, layout.dcp, True, [note(_ENGINE, "trtllm-helix", words)]


def _experts(job: Job, group: int, alone: bool) -> tuple[int, list[Finding]]:
    """ep, the rest of the group being tensor parallelism inside experts."""
    layout = job.layout
    ep = layout.ep if group % layout.ep == 0 else 1
    ep = 1 if alone else ep
    if ep == layout.ep and layout.etp == group // ep:
        return ep, []
    words = (
        f"experts lie over moe_ep x moe_tp = {group} ranks: {ep} x {group // ep}, not "
        f"{layout.ep} x {layout.etp}"
    )
    return ep, [note(_ENGINE, "trtllm-expert-degrees", words)]


def _choices(job: Job, serving: Serving | None, chosen: Serving | None) -> list[tuple[str, Any]]:
    if serving is None:
        return []
    length = serving.max_len if serving.max_len is None else min(serving.max_len, job.train.seq_len)
    kv = "fp8" if serving.kv_dtype.startswith("fp8") else serving.kv_dtype
    fraction = chosen.fraction if chosen else None
    return [
        ("--max_seq_len", length),
        ("--max_batch_size", (chosen or carried(serving, "trtllm")).max_requests),
        ("--max_num_tokens", chosen.max_tokens if chosen else None),
        ("--kv_cache_free_gpu_memory_fraction", None if fraction in (None, 0.9) else fraction),
        ("--kv_cache_dtype", kv if kv in ("fp8", "nvfp4") else None),
    ]


def _yaml(tree: dict[str, Any], deep: int = 0) -> str:
    """A small tree as YAML."""
    lines = []
    for key, value in tree.items():
        if isinstance(value, dict):
            lines.append(f"{'  ' * deep}{key}:\n{_yaml(value, deep + 1)}".rstrip("\n"))
        else:
            shown = str(value).lower() if isinstance(value, bool) else value
            lines.append(f"{'  ' * deep}{key}: {shown}")
    return "\n".join(lines) + "\n"
