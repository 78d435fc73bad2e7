"""TensorRT-LLM's own rules: what it refuses and when, and what it silently changes.

Read in its source: mapping.py (Mapping.__init__, pp_layers), llmapi/llm_args.py, and in its
feature combination matrix.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from plait.cost.serving import allowed
from plait.dialects.launch import AT_START, Launch, changed, note, refused
from plait.spec.findings import Finding
from plait.spec.job import Job
from plait.spec.layout import divisors, nearest

_ENGINE = "TensorRT-LLM"


def check(launch: Launch, job: Job) -> list[Finding]:
    """Its own validation, on the whole job."""
    return [f for rule in _RULES for f in rule(launch.facts, launch, job)]


def _experts(facts: Mapping[str, Any], launch: Launch, job: Job) -> Iterator[Finding]:
    layout, moe, rule = job.layout, job.model.moe, "trtllm-experts"
    ep, cut, cluster = facts["said_ep"] or 1, facts["said_tp"], facts["cluster"]
    tp = layout.tp * layout.dp_shard
    group = tp * (layout.cp if layout.dcp > 1 else 1)
    if moe is None:
        if ep > 1:
            words = f"--ep_size {ep} of {job.model.name}, which has no experts"
            yield changed(_ENGINE, rule, words, ep)
        return
    whole = "tp x cp" if layout.dcp > 1 else "tp"
    if layout.ep * layout.etp != group:
        shown = f"moe_tp {cut}" if cut is not None else f"moe_tp {max(1, group // (ep * cluster))}"
        words = f"{shown} x moe_ep {ep} x cluster {cluster} must be {whole} = {group}"
        legal = nearest(layout.ep, divisors(group))
        yield refused(
            _ENGINE, rule, AT_START, words, layout.ep, layout__ep=legal,
            layout__etp=group // legal,
        )  # fmt: skip
    elif group > 1:
        words = f"experts lie over moe_ep {layout.ep}, each cut over moe_tp {layout.etp}"
        yield note(_ENGINE, "trtllm-expert-degrees", words, layout.ep)
    if cluster > 1 and ep > 1:
        words = f"--cluster_size {cluster} needs --ep_size 1, not {ep}"
        yield refused(_ENGINE, rule, AT_START, words, cluster)
    if layout.cp > 1 and layout.dcp == 1 and layout.ep > 1:
        words = f"context parallelism {layout.cp} of prefill does not go with --ep_size {layout.ep}"
        yield refused(_ENGINE, "trtllm-context-experts", AT_START, words, layout__ep=1,
                      layout__etp=tp)  # fmt: skip
    slots = facts["slots"]
    if isinstance(slots, int) and (slots < moe.experts or slots % layout.ep):
        least = -(-moe.experts // layout.ep) * layout.ep
        more = ", ".join(str(least + i * layout.ep) for i in range(3))
        words = f"num_slots {slots}: {moe.experts} experts over ep {layout.ep} take {more}, ..."
        yield Finding(
            "error", "trtllm-slots", f"{_ENGINE} refuses it {AT_START}: {words}",
            "moe_config.load_balancer.num_slots", slots,
            {"moe_config.load_balancer.num_slots": least},
        )  # fmt: skip


def _context(facts: Mapping[str, Any], launch: Launch, job: Job) -> Iterator[Finding]:
    layout, model = job.layout, job.model
    rule = "trtllm-helix"
    if layout.cp > 1 and not facts["cp_type"] and layout.dcp == 1:
        words = f"cp {layout.cp} without cp_config.cp_type: the kind depends on the release"
        yield note(_ENGINE, "trtllm-context", words, layout.cp)
    if facts["helix"] and layout.cp < 2:
        yield refused(_ENGINE, rule, AT_START, "Helix needs cp_size of 2 or more", layout__cp=2,
                      layout__dcp=2)  # fmt: skip
    if layout.dcp == 1:
        return
    if model.mla is None:
        words = f"Helix is for models with MLA first, and {model.name} has none"
        yield changed(_ENGINE, rule, words)
    if layout.dp_shard > 1:
        words = "Helix with attention DP has known issues"
        yield changed(_ENGINE, rule, words)
    if facts["speculative"]:
        yield refused(_ENGINE, rule, AT_START, "Helix does not go with speculation", layout__cp=1,
                      layout__dcp=1)  # fmt: skip
    words = "Helix runs on Blackwell, and on the decode side of a disaggregated pair only"
    yield note(_ENGINE, rule, words)


def _attention(facts: Mapping[str, Any], launch: Launch, job: Job) -> Iterator[Finding]:
    layout, serving = job.layout, launch.serving
    if layout.dp_shard > 1:
        words = (
            f"attention DP is over all {layout.dp_shard} of tp, with no tensor parallelism beside "
            "it: attention, MLPs and embeddings are copied"
        )
        yield note(_ENGINE, "trtllm-attention-dp", words, layout.dp_shard)
        most = serving.max_requests if serving and serving.max_requests else 2048
        words = (
            f"--max_batch_size {most} is of each attention-DP rank: {most * layout.dp_shard} in all"
        )
        yield note(_ENGINE, "trtllm-batch-of-a-rank", words, most)
    if layout.pp > 1 and facts["speculative"]:
        words = f"speculation does not go with pp_size {layout.pp}"
        yield refused(_ENGINE, "trtllm-speculation", AT_START, words, layout.pp, layout__pp=1)
    if layout.pp > 1 and facts["chunked"]:
        words = "chunked prefill with pipeline stages is untested"
        yield changed(_ENGINE, "trtllm-chunked-stages", words)
    parts = facts["partition"]
    if parts and (len(parts) != layout.pp or sum(parts) != job.model.layers):
        words = f"pp_partition {list(parts)[:16]} is not {layout.pp} stages of {job.model.layers}"
        yield refused(_ENGINE, "trtllm-layer-partition", AT_START, words)
    if layout.pp > job.model.layers:
        words = f"pp_size {layout.pp} is above the {job.model.layers} layers"
        yield refused(_ENGINE, "trtllm-stages", AT_START, words, layout__pp=job.model.layers)


def _values(facts: Mapping[str, Any], launch: Launch, job: Job) -> Iterator[Finding]:
    fraction = facts["fraction"]
    if not isinstance(fraction, float) or not 0 < fraction <= 1:
        words = f"free_gpu_memory_fraction {fraction} is not above 0 and at most 1"
        yield refused(_ENGINE, "trtllm-memory-fraction", AT_START, words, fraction)
    if facts["backend"] in ("tensorrt", "trt"):
        words = "--backend tensorrt is gone: pytorch and _autodeploy are there"
        yield refused(_ENGINE, "trtllm-backend", AT_START, words, facts["backend"])
    here = job.cluster.node if job.cluster else None
    node = facts["node"]
    if here is not None and node is not None and node != here:
        words = f"--gpus_per_node {node}, and a node of {job.cluster.name} has {here}"
        yield changed(_ENGINE, "trtllm-node", words, node)
    serving = launch.serving
    longest = allowed(serving, job.model) if serving else job.model.seq
    if serving is not None and serving.max_len and serving.max_len > longest:
        words = f"--max_seq_len {serving.max_len:,} is beyond the {longest:,} of the model"
        yield changed(_ENGINE, "trtllm-max-seq-len", words, serving.max_len)


_RULES = (_experts, _context, _attention, _values)
