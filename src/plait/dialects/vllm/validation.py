"""vLLM's own rules: what it refuses and when, and what it silently changes.

Read in its source, 0.33.0: config/parallel.py (_validate_parallel_config, __post_init__),
config/model.py (verify_with_parallel_config), engine/arg_utils.py (create_engine_config),
config/scheduler.py, layers/vocab_parallel_embedding.py.
"""

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

from plait.cost.serving import allowed
from plait.dialects.launch import AT_START, Launch, changed, note, refused
from plait.spec.findings import Finding, closest
from plait.spec.job import Job
from plait.spec.layout import divisors, nearest

#: Options that 0.33 does not have any more -> what is in their place.
LOST = {
    "--disable-log-requests": "requests are not logged; --enable-log-requests logs them",
    "--use-v2-block-manager": "",
    "--num-scheduler-steps": "",
    "--multi-step-stream-outputs": "",
    "--enable-reasoning": "--reasoning-parser alone",
    "--guided-decoding-backend": "--structured-outputs-config.backend",
    "--swap-space": "",
    "--preemption-mode": "",
    "--task": "--runner and --convert",
    "--worker-use-ray": "--distributed-executor-backend ray",
    "--engine-use-ray": "",
    "--max-seq-len-to-capture": "--compilation-config.cudagraph_capture_sizes",
    "--cuda-graph-sizes": "--cudagraph-capture-sizes",
    "--full-cuda-graph": "--compilation-config.cudagraph_mode",
    "--num-lookahead-slots": "",
    "--speculative-model": "--speculative-config.model",
    "--num-speculative-tokens": "--speculative-config.num_speculative_tokens",
    "--rope-scaling": "--hf-overrides",
    "--rope-theta": "--hf-overrides",
    "--device": "",
    "--enable-prompt-adapter": "",
    "--disable-frontend-multiprocessing": "",
    "--disable-async-output-proc": "",
    "--disable-mm-preprocessor-cache": "--mm-processor-cache-gb 0",
    "--enable-multimodal-encoder-data-parallel": "--mm-encoder-tp-mode data",
    "--num-redundant-experts": "--eplb-config.num_redundant_experts",
    "--eplb-window-size": "--eplb-config.window_size",
    "--eplb-step-interval": "--eplb-config.step_interval",
    "--eplb-log-balancedness": "--eplb-config.log_balancedness",
}

#: Of these, those that took no value.
LOST_SWITCHES = frozenset(
    "--disable-log-requests --use-v2-block-manager --enable-reasoning --worker-use-ray"
    " --engine-use-ray --multi-step-stream-outputs --full-cuda-graph --enable-prompt-adapter"
    " --disable-frontend-multiprocessing --disable-async-output-proc"
    " --disable-mm-preprocessor-cache --enable-multimodal-encoder-data-parallel"
    " --eplb-log-balancedness".split()
)

#: Keys of pass_config that are gone.
LOST_PASSES = (
    "enable_sequence_parallelism",
    "enable_sp",
    "enable_async_tp",
    "fuse_gemm_comms",
    "sp_min_token_num",
)

#: Variables that nothing reads any more.
LOST_VARIABLES = {
    "VLLM_ALL2ALL_BACKEND": "is not read any more: --all2all-backend says it",
    "VLLM_USE_V1": "is not read any more: there is one engine",
}

BACKENDS = (
    "allgather_reducescatter",
    "deepep_high_throughput",
    "deepep_low_latency",
    "deepep_v2",
    "mori_high_throughput",
    "mori_low_latency",
    "moonep",
    "nixl_ep",
    "flashinfer_nvlink_one_sided",
    "flashinfer_nvlink_two_sided",
    "flashinfer_all2allv",
    "pplx",
    "naive",
)

_ENGINE = "vLLM"


def check(launch: Launch, job: Job) -> list[Finding]:
    """Its own validation, on the whole job."""
    return [f for rule in _RULES for f in rule(launch.facts, launch, job)]


def _experts(facts: Mapping[str, Any], launch: Launch, job: Job) -> Iterator[Finding]:
    moe, layout = job.model.moe, job.layout
    group = layout.tp * layout.cp * layout.dp_shard
    if facts["experts"] and moe is None:
        words = f"--enable-expert-parallel, and {job.model.name} has no experts"
        yield refused(_ENGINE, "vllm-expert-parallel-dense", AT_START, words, layout__ep=1)
    if facts["experts"] and moe is not None and group == 1:
        words = "--enable-expert-parallel on one rank of a stage shares nothing"
        yield note(_ENGINE, "vllm-expert-parallel-alone", words)
    if facts["experts"] and moe is not None and group > 1:
        words = (
            f"expert parallelism has no size of its own: dp {layout.dp_shard} x pcp {layout.cp} x "
            f"tp {layout.tp} = {group} ranks of a stage share {moe.experts} experts"
        )
        yield note(_ENGINE, "vllm-expert-parallel-size", words, group)
    if not facts["experts"] and moe is not None and group > 1:
        words = (
            f"without --enable-expert-parallel each expert is cut over dp {layout.dp_shard} x pcp "
            f"{layout.cp} x tp {layout.tp} = {group} ranks"
        )
        yield note(_ENGINE, "vllm-experts-cut", words, group)
    yield from _balancing(facts, job, group)


def _balancing(facts: Mapping[str, Any], job: Job, group: int) -> Iterator[Finding]:
    """EPLB."""
    moe, redundant, config = job.model.moe, facts["redundant"], facts["eplb_config"]
    rule = "vllm-eplb"
    if not facts["eplb"]:
        if redundant:
            words = f"{redundant} redundant experts without --enable-eplb"
            yield refused(_ENGINE, rule, AT_START, words, redundant)
        return
    if moe is None:
        yield refused(_ENGINE, rule, AT_START, "--enable-eplb of a model without experts")
        return
    if not facts["experts"]:
        words = "--enable-eplb needs --enable-expert-parallel"
        yield refused(_ENGINE, rule, AT_START, words, layout__ep=group, layout__etp=1)
    if group == 1:
        words = "--enable-eplb needs more than one rank of tp x pcp x dp"
        yield refused(_ENGINE, rule, AT_START, words)
    least = -moe.experts % group
    if (moe.experts + redundant) % group and facts["experts"]:
        more = [least + i * group for i in range(3)]
        words = (
            f"{moe.experts} experts and {redundant} redundant ones do not divide over {group} "
            f"ranks; redundant experts may be {', '.join(map(str, more))}, ..."
        )
        best = nearest(redundant, more)
        yield Finding(
            "error", rule, f"{_ENGINE} refuses it {AT_START}: {words}",
            "--eplb-config.num_redundant_experts", redundant,
            {"--eplb-config.num_redundant_experts": best},
        )  # fmt: skip
    elif facts["experts"]:
        slots = (moe.experts + redundant) // group
        words = f"{slots} experts a rank, {redundant} of {moe.experts + redundant} redundant"
        yield note(_ENGINE, "vllm-eplb-slots", words, slots)
    communicator = config.get("communicator")
    if config.get("use_async", True) and communicator in ("torch_nccl", "pynccl"):
        words = f"EPLB in the background cannot use {communicator}; torch_gloo or nixl can"
        yield refused(_ENGINE, rule, AT_START, words, communicator)


def _decode_context(facts: Mapping[str, Any], launch: Launch, job: Job) -> Iterator[Finding]:
    model, layout = job.model, job.layout
    tp, pcp, dcp = layout.tp, layout.cp, layout.dcp
    rule = "vllm-dcp"
    if dcp == 1:
        return
    if pcp == 1 and tp % dcp:
        words = f"tp {tp} is no multiple of dcp {dcp}"
        legal = nearest(dcp, _legal_dcp(job))
        yield refused(_ENGINE, rule, AT_START, words, dcp, layout__dcp=legal)
        return
    if pcp > 1 and dcp not in (1, pcp, tp * pcp):
        words = f"with pcp {pcp} and tp {tp}, dcp is 1, {pcp} or {tp * pcp}, not {dcp}"
        legal = nearest(dcp, sorted({1, pcp, tp * pcp}))
        yield refused(_ENGINE, rule, AT_START, words, dcp, layout__dcp=legal)
        return
    if model.mla is not None or model.kv_heads < 1:
        return
    kv = model.kv_heads
    legal = nearest(dcp, _legal_dcp(job))
    if tp <= kv:
        words = f"dcp {dcp} needs tp above the {kv} KV heads, not {tp}: no head is copied"
        yield refused(_ENGINE, rule, AT_START, words, dcp, layout__dcp=1)
    elif dcp > tp // kv:
        words = f"dcp {dcp} is above tp / KV heads = {tp} / {kv} = {tp // kv}"
        yield refused(_ENGINE, rule, AT_START, words, dcp, layout__dcp=legal)
    elif model.heads // kv % dcp:
        words = f"{model.heads // kv} query heads for each KV head do not divide by dcp {dcp}"
        yield refused(_ENGINE, rule, AT_START, words, dcp, layout__dcp=legal)


def _legal_dcp(job: Job) -> list[int]:
    model, tp = job.model, job.layout.tp
    if model.mla is not None:
        return divisors(tp)
    if tp <= model.kv_heads or tp % model.kv_heads:
        return [1]
    per_head = model.heads // model.kv_heads
    return [c for c in divisors(tp // model.kv_heads) if per_head % c == 0]


def _cache(facts: Mapping[str, Any], launch: Launch, job: Job) -> Iterator[Finding]:
    serving, layout = launch.serving, job.layout
    assert serving is not None
    block, interleave = serving.tokens_of_block, serving.interleave
    if layout.dcp > 1 and (interleave > block or block % max(1, interleave)):
        words = f"blocks of {block} tokens are no multiple of the {interleave} that lie together"
        yield refused(_ENGINE, "vllm-interleave", AT_START, words, interleave)
    if layout.dcp > 1:
        words = (
            f"dcp {layout.dcp} reuses the ranks of tp; the attention backend must return the "
            "log-sum-exp of its scores (found out after the weights are loaded)"
        )
        yield note(_ENGINE, "vllm-dcp-backend", words)
    fraction = facts["fraction"]
    if not isinstance(fraction, float) or not 0 < fraction <= 1:
        words = f"--gpu-memory-utilization {fraction} is not above 0 and at most 1"
        yield refused(_ENGINE, "vllm-memory-fraction", AT_START, words, fraction)
    length, longest = serving.max_len, allowed(serving, job.model)
    lets_pass = launch.environment.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1"
    if length is not None and length > longest and facts["told_len"] is not None:
        words = f"--max-model-len {length:,} is beyond the {longest:,} of {job.model.name}"
        if lets_pass:
            words += ", which VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 lets pass"
            yield changed(_ENGINE, "vllm-max-model-len", words, length)
        else:
            yield refused(
                _ENGINE, "vllm-max-model-len", AT_START, words, length, train__seq_len=longest
            )
    requests, tokens = serving.max_requests, serving.max_tokens
    if requests is not None and tokens is not None and tokens < requests:
        words = f"--max-num-batched-tokens {tokens} is below --max-num-seqs {requests}"
        yield refused(_ENGINE, "vllm-batched-tokens", AT_START, words, tokens)
    transfer = str(facts["transfer"].get("kv_connector", ""))
    if "Nixl" in transfer and layout.dcp > 1:
        whole = max(layout.tp, layout.cp)
        if job.model.mla is None or layout.dcp != whole:
            words = f"with {transfer}, dcp is 1, or of MLA also {whole}"
            best = whole if job.model.mla else 1
            yield refused(
                _ENGINE, "vllm-dcp-transfer", AT_START, words, layout.dcp, layout__dcp=best
            )


def _stages(facts: Mapping[str, Any], launch: Launch, job: Job) -> Iterator[Finding]:
    text, layers, pp = facts["partition"], job.model.layers, job.layout.pp
    if text is None or pp == 1:
        return
    parts = text.split(",")
    rule = "vllm-layer-partition"
    if not all(p.strip().isdecimal() and len(p) < 9 for p in parts):
        words = f"VLLM_PP_LAYER_PARTITION={text[:60]} is no list of numbers"
        yield refused(_ENGINE, rule, AT_START, words, text[:60])
    elif len(parts) != pp:
        words = f"VLLM_PP_LAYER_PARTITION names {len(parts)} stages, pp is {pp}"
        yield refused(_ENGINE, rule, AT_START, words, text[:60])
    elif sum(map(int, parts)) != layers:
        words = f"VLLM_PP_LAYER_PARTITION has {sum(map(int, parts))} layers, the model {layers}"
        yield refused(_ENGINE, rule, AT_START, words, text[:60])


def _vocabulary(facts: Mapping[str, Any], launch: Launch, job: Job) -> Iterator[Finding]:
    vocab, tp = job.model.vocab, job.layout.tp
    padded = ceil(vocab / 64) * 64
    if padded % tp:
        words = f"the vocabulary of {vocab}, padded to {padded}, does not divide over tp {tp}"
        fitting = [t for t in divisors(job.model.heads) if padded % t == 0]
        best = nearest(tp, fitting)
        yield refused(_ENGINE, "vllm-vocabulary", AT_START, words, tp, layout__tp=best)


def _data_parallel(facts: Mapping[str, Any], launch: Launch, job: Job) -> Iterator[Finding]:
    dp, local = facts["dp"], facts["local"]
    moe, rule = job.model.moe, "vllm-data-parallel"
    if local is not None and local > dp:
        words = f"--data-parallel-size-local {local} is above --data-parallel-size {dp}"
        yield refused(_ENGINE, rule, AT_START, words, local)
    if facts["hybrid"] and facts["external"]:
        words = "--data-parallel-hybrid-lb and --data-parallel-external-lb exclude each other"
        yield refused(_ENGINE, rule, AT_START, words)
    external = facts["external"] or facts["rank"] is not None or facts["ports"]
    if external and dp == 1 and facts["external"]:
        words = "--data-parallel-external-lb needs a data-parallel size above 1"
        yield refused(_ENGINE, rule, AT_START, words)
    if external and dp > 1 and moe is None:
        words = (
            f"{job.model.name} has no experts: its data-parallel ranks are plain servers, to be "
            "started one by one without --data-parallel options"
        )
        yield refused(_ENGINE, rule, AT_START, words)
    elif external and facts["rank"] is None and not facts["ports"] and facts["nodes"] == 1:
        words = "--data-parallel-external-lb needs --data-parallel-rank"
        yield refused(_ENGINE, rule, AT_START, words)
    if external and local not in (1, None) and not facts["ports"]:
        words = f"a rank of its own has --data-parallel-size-local 1, not {local}"
        yield refused(_ENGINE, rule, AT_START, words, local)
    if facts["hybrid"] and local is None:
        words = "--data-parallel-hybrid-lb needs --data-parallel-size-local"
        yield refused(_ENGINE, rule, AT_START, words)
    elif facts["hybrid"] and local == 1:
        words = "one rank a node: the hybrid load balancer becomes an external one"
        yield changed(_ENGINE, rule, words, local)
    elif facts["hybrid"] and local == dp:
        words = "all ranks are on this node: the hybrid load balancer becomes an internal one"
        yield changed(_ENGINE, rule, words, local)
    if facts["hybrid"] and facts["headless"]:
        words = "--headless has no load balancer, and --data-parallel-hybrid-lb is one"
        yield refused(_ENGINE, rule, AT_START, words)
    if dp > 1:
        means = (
            f"dp {dp} ranks of one engine run in step: attention has requests of its own on each, "
            "experts lie over all"
            if moe is not None
            else f"{job.model.name} has no experts: its {dp} data-parallel ranks are engines that "
            "know nothing of each other"
        )
        yield note(_ENGINE, "vllm-data-parallel-means", means, dp)


def _nodes(facts: Mapping[str, Any], launch: Launch, job: Job) -> Iterator[Finding]:
    layout, nodes, executor = job.layout, facts["nodes"], facts["executor"]
    dp = facts["dp"]
    one = layout.tp * layout.pp * layout.cp
    rule = "vllm-nodes"
    if isinstance(nodes, int) and nodes > 1:
        if executor not in (None, "mp", "uni", "external_launcher"):
            words = f"--nnodes {nodes} needs the mp executor, not {executor}"
            yield refused(_ENGINE, rule, AT_START, words, nodes)
        if facts["dp_backend"] != "mp":
            words = f"--nnodes {nodes} needs --data-parallel-backend mp"
            yield refused(_ENGINE, rule, AT_START, words, nodes)
        if one * dp % nodes:
            words = f"tp x pp x pcp x dp = {one * dp} ranks do not divide over {nodes} nodes"
            yield refused(_ENGINE, rule, AT_START, words, nodes)
        if not 0 <= (facts["node_rank"] or 0) < nodes:
            words = f"--node-rank {facts['node_rank']} is not from 0 to {nodes - 1}"
            yield refused(_ENGINE, rule, AT_START, words, facts["node_rank"])
    here = job.cluster.node if job.cluster else None
    if here is None or nodes != 1 or executor in ("ray", "external_launcher"):
        return
    ranks = one * (facts["local"] if facts["local"] is not None else dp)
    if one > here and facts["dp_backend"] != "ray":
        words = (
            f"tp x pp x pcp = {one} is more than the {here} devices of a node: say --nnodes "
            f"{ceil(one / here)} with --node-rank and --master-addr on each, or "
            "--distributed-executor-backend ray"
        )
        yield refused(_ENGINE, "vllm-one-node", AT_START, words, one)
    elif ranks > here and facts["rank"] is None and facts["dp_backend"] != "ray":
        words = (
            f"{ranks} ranks are more than the {here} devices of a node: "
            f"--data-parallel-size-local says how many of the {dp} are here"
        )
        yield refused(_ENGINE, "vllm-one-node", AT_START, words, ranks)


def _options(facts: Mapping[str, Any], launch: Launch, job: Job) -> Iterator[Finding]:
    layout, serving = job.layout, launch.serving
    assert serving is not None
    backend = serving.backend
    if backend not in BACKENDS:
        near = closest(backend, BACKENDS) or BACKENDS[0]
        words = f"--all2all-backend {backend[:40]!r} is none it has; the nearest is {near}"
        yield refused(_ENGINE, "vllm-all2all", AT_START, words, backend[:40])
    if serving.kv_exchange not in ("ag_rs", "a2a"):
        words = f"--dcp-comm-backend {serving.kv_exchange[:40]!r} is neither ag_rs nor a2a"
        yield refused(_ENGINE, "vllm-dcp", AT_START, words)
    if facts["dbo"] and (layout.pp > 1 or layout.cp > 1 or layout.dcp > 1 or facts["speculative"]):
        words = (
            "two-batch overlap is off with pipeline stages, context parallelism, adapters or "
            "speculation"
        )
        yield changed(_ENGINE, "vllm-overlap", words)
    if facts["elastic"] and not facts["eplb"]:
        yield refused(_ENGINE, "vllm-elastic", AT_START, "--enable-elastic-ep needs --enable-eplb")
    if facts["elastic"] and layout.pp > 1:
        words = f"--enable-elastic-ep has no pipeline stages, and pp is {layout.pp}"
        yield refused(_ENGINE, "vllm-elastic", AT_START, words, layout.pp)
    if facts["hc_sp"] and layout.tp > 1:
        words = "--enable-hc-sp is for one model family, which this is not"
        yield refused(_ENGINE, "vllm-hc-sp", AT_START, words)
    if serving.moe_tokens_cut and layout.tp > 1 and layout.dp_shard > 1 and layout.ep > 1:
        words = (
            "between attention and experts tokens are cut over tp (sequence parallelism of "
            "mixtures), and shared experts are copied"
        )
        yield note(_ENGINE, "vllm-moe-tokens-cut", words)


_RULES = (
    _experts,
    _decode_context,
    _cache,
    _stages,
    _vocabulary,
    _data_parallel,
    _nodes,
    _options,
)
