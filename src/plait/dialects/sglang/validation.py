"""SGLang's own rules: what it refuses and when, and what it silently changes.

Read in its source, 0.5.23: arg_groups/parallel_hook.py (handle_context_parallelism,
handle_decode_context_parallelism, handle_data_parallelism, handle_eplb_and_dispatch),
arg_groups/validation_hook.py (check_server_args, check_pipeline_parallel_compat),
arg_groups/overrides.py (_a2a_ep_size), configs/model_config.py get_num_kv_heads.
"""

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

from plait.cost.serving import allowed
from plait.dialects.launch import AT_START, Launch, changed, note, refused
from plait.spec.findings import Finding
from plait.spec.job import Job
from plait.spec.layout import divisors, nearest

#: Options that 0.5.23 does not have any more -> what is in their place.
LOST = {
    "--enable-ep-moe": "--ep-size says it",
    "--enable-deepep-moe": "--moe-a2a-backend deepep",
    "--enable-flashinfer-mla": "--attention-backend flashinfer",
    "--enable-flashmla": "--attention-backend flashmla",
    "--enable-flashinfer-moe": "--moe-runner-backend",
    "--enable-nsa-prefill-context-parallel": "--enable-prefill-cp",
    "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
    "--cuda-graph-bs": "--cuda-graph-bs-decode",
    "--nsa-prefill-backend": "--dsa-prefill-backend",
    "--nsa-decode-backend": "--dsa-decode-backend",
    "--mamba-scheduler-strategy": "",
    "--disable-piecewise-cuda-graph": "",
    "--enable-hip-attention": "",
    "--disable-mla": "",
}

#: Of these, those that took no value.
LOST_SWITCHES = frozenset(LOST) - {
    "--cuda-graph-max-bs", "--cuda-graph-bs", "--nsa-prefill-backend", "--nsa-decode-backend",
    "--mamba-scheduler-strategy",
}  # fmt: skip

_ENGINE = "SGLang"


def check(launch: Launch, job: Job) -> list[Finding]:
    """Its own validation, on the whole job."""
    return [f for rule in _RULES for f in rule(launch.facts, launch, job)]


def _whole(facts: Mapping[str, Any], job: Job) -> int:
    """--tp-size: as said, as long as the job is as it was said."""
    layout = job.layout
    made = layout.tp * layout.cp * layout.dp_shard
    near = max(1, facts["whole"] // max(1, layout.cp * layout.dp_shard))
    return facts["whole"] if near == layout.tp else made


def _devices(facts: Mapping[str, Any], launch: Launch, job: Job) -> Iterator[Finding]:
    layout, whole, rule = job.layout, _whole(facts, job), "sglang-tp-size"
    inside = layout.dp_shard * layout.cp
    if whole % layout.dp_shard:
        words = f"--tp-size {whole} is no multiple of --attn-dp-size {layout.dp_shard}"
        legal = nearest(layout.dp_shard, divisors(whole))
        yield refused(
            _ENGINE, rule, AT_START, words, whole, layout__dp_shard=legal,
            layout__tp=whole // legal,
        )  # fmt: skip
    elif whole % inside:
        words = f"--tp-size {whole} is no multiple of --attn-dp-size x --attn-cp-size = {inside}"
        legal = nearest(layout.cp, divisors(whole // layout.dp_shard))
        yield refused(
            _ENGINE, rule, AT_START, words, whole, layout__cp=legal,
            layout__tp=whole // layout.dp_shard // legal,
        )  # fmt: skip
    elif inside > 1:
        words = (
            f"--tp-size {whole} counts all devices of a stage: attention has tp {layout.tp} x cp "
            f"{layout.cp} x dp {layout.dp_shard}"
        )
        yield note(_ENGINE, "sglang-tp-size-means", words, whole)
    if layout.dp_shard > 1 and layout.dp_replicate > 1 and not launch_world_is_larger(launch, job):
        words = (
            f"replicas (--dp-size {layout.dp_replicate}) do not go with attention DP "
            f"(--attn-dp-size {layout.dp_shard})"
        )
        yield refused(_ENGINE, "sglang-replicas", AT_START, words, layout__dp_replicate=1)
    if layout.dp_shard > 1:
        words = (
            f"attention DP {layout.dp_shard} divides the chunk of prompts by {layout.dp_shard} and "
            "admits requests more freely (its conservativeness times 0.3)"
        )
        yield note(_ENGINE, "sglang-attention-dp", words, layout.dp_shard)


def launch_world_is_larger(launch: Launch, job: Job) -> bool:
    """Whether replicas were counted only because there are devices for them."""
    said = launch.serving
    return said is not None and said.replicas < job.layout.dp_replicate


def _experts(facts: Mapping[str, Any], launch: Launch, job: Job) -> Iterator[Finding]:
    layout, moe, rule = job.layout, job.model.moe, "sglang-experts"
    whole, moe_dp = _whole(facts, job), facts["moe_dp"]
    if moe is None:
        if facts["said_ep"] > 1 and not facts["dwdp"] > 1:
            words = f"--ep-size {facts['said_ep']} of {job.model.name}, which has no experts"
            yield changed(_ENGINE, rule, words, facts["said_ep"])
        if facts["eplb"]:
            words = f"--enable-eplb of {job.model.name}, which has no experts"
            yield refused(_ENGINE, "sglang-eplb", AT_START, words)
        return
    ep = layout.ep
    if whole % max(1, ep * moe_dp):
        words = f"--tp-size {whole} is no multiple of --ep-size {ep}" + (
            f" x --moe-dp-size {moe_dp}" if moe_dp > 1 else ""
        )
        legal = nearest(ep, divisors(max(1, whole // moe_dp)))
        yield refused(_ENGINE, rule, AT_START, words, ep, layout__ep=legal,
                      layout__etp=max(1, whole // moe_dp // legal))  # fmt: skip
    elif whole > 1:
        words = (
            f"experts lie over ep {ep}, each cut over tp / (ep x moe_dp) = {whole // (ep * moe_dp)}"
        )
        yield note(_ENGINE, "sglang-expert-degrees", words, ep)
    if moe_dp > 1 and layout.pp > 1:
        words = f"--moe-dp-size {moe_dp} with --pp-size {layout.pp}"
        yield refused(_ENGINE, rule, AT_START, words, layout.pp, layout__pp=1)
    if moe_dp > 1 and ep > 1 and ep * moe_dp != whole:
        words = f"--ep-size {ep} x --moe-dp-size {moe_dp} must be --tp-size {whole}"
        yield refused(_ENGINE, rule, AT_START, words, ep)
    if moe_dp > 1 and layout.cp != moe_dp:
        words = f"--moe-dp-size {moe_dp} is 1 or --attn-cp-size {layout.cp}"
        yield refused(_ENGINE, rule, AT_START, words, moe_dp)
    if facts["eplb"] and ep == 1:
        words = "--enable-eplb needs --ep-size above 1"
        yield refused(_ENGINE, "sglang-eplb", AT_START, words, ep)
    redundant = facts["redundant"]
    if isinstance(redundant, int) and ep > 1 and (moe.experts + redundant) % ep:
        least = -moe.experts % ep
        more = ", ".join(str(least + i * ep) for i in range(3))
        words = (
            f"{moe.experts} experts and {redundant} redundant ones do not divide over ep {ep}; "
            f"redundant experts may be {more}, ..."
        )
        yield Finding(
            "error", "sglang-redundant-experts", f"{_ENGINE} refuses it {AT_START}: {words}",
            "--ep-num-redundant-experts", redundant, {"--ep-num-redundant-experts": least},
        )  # fmt: skip
    if facts["backend"] == "none" and facts["dispatch"] in ("static", "lp"):
        words = (
            f"--ep-dispatch-algorithm {facts['dispatch']} picks a copy of an expert for each rank "
            "by itself, which without an all-to-all backend gives wrong sums; dynamic does not"
        )
        yield refused(_ENGINE, "sglang-dispatch", AT_START, words)
    if facts["dense_tp"] not in (None, 1, whole):
        words = f"--moe-dense-tp-size {facts['dense_tp']} is 1 or --tp-size {whole}"
        yield refused(_ENGINE, rule, AT_START, words, facts["dense_tp"])


def _context(facts: Mapping[str, Any], launch: Launch, job: Job) -> Iterator[Finding]:
    layout, rule, model = job.layout, "sglang-dcp", job.model
    if facts["prefill_cp"] and facts["cp_strategy"] is None:
        words = "--enable-prefill-cp needs --cp-strategy, zigzag or interleave"
        yield refused(_ENGINE, "sglang-prefill-cp", AT_START, words)
    if layout.cp > 1 and not facts["prefill_cp"]:
        words = (
            f"--attn-cp-size {layout.cp} without --enable-prefill-cp: prompts are not shared out, "
            "and attention is copied all the same"
        )
        yield changed(_ENGINE, "sglang-prefill-cp", words, layout.cp)
    if layout.dcp == 1:
        return
    if facts["prefill_cp"]:
        words = f"--dcp-size {layout.dcp} does not go with --enable-prefill-cp"
        yield refused(_ENGINE, rule, AT_START, words, layout.dcp, layout__dcp=1)
    if layout.tp % layout.dcp:
        words = f"attention tp {layout.tp} is no multiple of --dcp-size {layout.dcp}"
        legal = nearest(layout.dcp, divisors(layout.tp))
        yield refused(_ENGINE, rule, AT_START, words, layout.dcp, layout__dcp=legal)
        return
    cut = layout.tp // layout.dcp
    if model.mla is None:
        heads = max(1, model.kv_heads // cut)
        words = (
            f"--dcp-size {layout.dcp} cuts KV heads over tp / dcp = {cut}: {heads} a rank (vLLM "
            "keeps those of tp); only some model families have the layout of queries that it needs,"
            " and others give wrong answers without a word"
        )
        yield changed(_ENGINE, "sglang-dcp-families", words, layout.dcp)
    if facts["q_copied"] and launch.serving and launch.serving.kv_exchange == "ag_rs":
        words = "--dcp-replicate-q-proj needs --dcp-comm-backend a2a or fi_a2a"
        yield refused(_ENGINE, rule, AT_START, words)


def _stages(facts: Mapping[str, Any], launch: Launch, job: Job) -> Iterator[Finding]:
    layout = job.layout
    text, pp = facts["partition"], layout.pp
    if pp > 1:
        words = "pipeline stages turn the overlap scheduler off"
        yield changed(_ENGINE, "sglang-overlap", words, pp)
        algorithm = facts["speculative"]
        if algorithm and not (
            str(algorithm).upper() == "EAGLE" and facts["disaggregation"] == "prefill"
        ):
            words = f"--speculative-algorithm {algorithm} with --pp-size {pp}"
            yield refused(_ENGINE, "sglang-speculation", AT_START, words, pp, layout__pp=1)
    if text is not None and pp > 1:
        parts = text.split(",")
        whole = all(p.strip().isdecimal() and len(p) < 9 for p in parts)
        if not whole or len(parts) != pp or sum(map(int, parts)) != job.model.layers:
            words = (
                f"SGLANG_PP_LAYER_PARTITION={text[:60]} is not {pp} numbers that make "
                f"{job.model.layers} layers"
            )
            yield refused(_ENGINE, "sglang-layer-partition", AT_START, words, text[:60])


def _nodes(facts: Mapping[str, Any], launch: Launch, job: Job) -> Iterator[Finding]:
    layout, nodes, rule = job.layout, facts["nodes"], "sglang-nodes"
    said = launch.serving
    replicas = min(layout.dp_replicate, said.replicas) if said else layout.dp_replicate
    stage = layout.tp * layout.cp * layout.dp_shard
    if isinstance(nodes, int) and nodes > 1:
        if replicas > 1:
            words = f"replicas (--dp-size {replicas}) are of one node; --nnodes is {nodes}"
            yield refused(_ENGINE, rule, AT_START, words, nodes)
        if stage * layout.pp % nodes:
            words = f"tp x pp = {stage * layout.pp} does not divide over {nodes} nodes"
            yield refused(_ENGINE, rule, AT_START, words, nodes)
    here = job.cluster.node if job.cluster else None
    if here is not None and nodes == 1 and stage * layout.pp > here:
        words = (
            f"tp x pp = {stage * layout.pp} is more than the {here} devices of a node: say "
            f"--nnodes {ceil(stage * layout.pp / here)} with --node-rank and --dist-init-addr"
        )
        yield refused(_ENGINE, "sglang-one-node", AT_START, words, stage * layout.pp)
    fraction = facts["fraction"]
    if fraction is not None and not (isinstance(fraction, float) and 0 < fraction < 1):
        words = f"--mem-fraction-static {fraction} is not between 0 and 1"
        yield refused(_ENGINE, "sglang-memory-fraction", AT_START, words, fraction)
    serving = launch.serving
    longest = allowed(serving, job.model) if serving else job.model.seq
    if serving is not None and serving.max_len is not None and serving.max_len > longest:
        words = (
            f"--context-length {serving.max_len:,} is beyond the {longest:,} of {job.model.name}: "
            "refused unless SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"
        )
        yield changed(_ENGINE, "sglang-context-length", words, serving.max_len)


_RULES = (_devices, _experts, _context, _stages, _nodes)
