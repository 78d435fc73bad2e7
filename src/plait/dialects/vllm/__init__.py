"""vLLM: `vllm serve`, its API server started as a module, container files, `LLM(...)` in Python.

Its world is tp x pp x pcp, times dp. For a mixture of experts, dp ranks are one engine that runs
in step: its experts lie over dp x pcp x tp, whole ones with --enable-expert-parallel and cut
without. For a dense model they are engines that know nothing of each other. dcp takes no ranks of
its own. Ranks from the fastest axis: tp, pcp, pp, dp.
"""

from collections.abc import Mapping
from typing import Any

from plait.cost.serving import Serving, on
from plait.dialects.launch import Launch, Told, changed, note, refused
from plait.dialects.serve import options
from plait.dialects.serve.options import count, degree, switch, take
from plait.dialects.serve.words import Program, serves
from plait.dialects.settings import Settings
from plait.dialects.source import Source
from plait.dialects.vllm.validation import LOST, LOST_PASSES, LOST_SWITCHES, LOST_VARIABLES, check
from plait.dialects.vllm.writer import write
from plait.spec.findings import Finding
from plait.spec.layout import Layout
from plait.spec.model import Model

__all__ = ["VERSION", "check", "read", "settle", "write"]

#: What it is held against: the wheel of that version.
VERSION = "vLLM 0.33.0 (2026-11-01)"

PROGRAM = Program(
    "vLLM",
    ("vllm serve",),
    ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server"),
    ("vllm-openai", "vllm/vllm", "rocm/vllm"),
    {name: "--model" for name in ("LLM", "EngineArgs", "AsyncEngineArgs")},
    "vllm",
)

#: Variables that decide a rule.
_VARIABLES = (
    "VLLM_PP_LAYER_PARTITION",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
    "VLLM_DP_SIZE",
    "VLLM_RAY_DP_PACK_STRATEGY",
    *LOST_VARIABLES,
)


def read(source: Source, told: Told) -> Launch:
    """What a launch serves, of several servers the first."""
    found = serves(source, PROGRAM)
    serve, known = found[0], options.flags("vllm")
    settings = options.under_flags(serve, known, "--model", LOST_SWITCHES, source, told)
    fields, stored, notes = options.model_of(settings, "--model", told, source)
    model = options.shape(fields, told)
    own, facts = _degrees(settings, model, serve.environment)
    serving, of_file = _serving(settings, stored, model, facts)
    more, copies = options.whole_fields(own, serving, told, "vLLM")
    fields |= more
    roles = Layout(**{k: v for k, v in own.items() if k != "stages"})
    serving = on(serving, roles)
    notes += copies + of_file + _changes(settings, facts, serve.environment)
    notes += options.several(found, "vLLM", "vllm")
    environment = {k: v for k, v in serve.environment.items() if k in _VARIABLES}
    known_names = options.unread(settings, known)
    return Launch(fields, settings, known_names, notes, environment, serving, facts)


def _degrees(
    settings: Settings, model: Model | None, environment: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The layout, by its own names, and what the rules ask for besides."""
    moe = model is not None and model.moe is not None
    tp = degree(settings, "--tensor-parallel-size", "layout.tp")
    pp = degree(settings, "--pipeline-parallel-size", "layout.pp")
    pcp = degree(settings, "--prefill-context-parallel-size", "layout.cp")
    dcp = degree(settings, "--decode-context-parallel-size", "layout.dcp")
    means = "layout.dp_shard" if moe else "layout.dp_replicate"
    default = environment.get("VLLM_DP_SIZE", "")
    default = int(default) if default.isdecimal() and len(default) < 7 else 1
    dp = degree(settings, "--data-parallel-size", means, max(1, default))
    experts = switch(settings, "--enable-expert-parallel", "layout.ep")
    group = tp * pcp * (dp if moe else 1)
    own: dict[str, Any] = {"tp": tp, "pp": pp, "cp": pcp, "dcp": dcp}
    own |= {"dp_shard": dp, "dp_replicate": 1} if moe else {"dp_shard": 1, "dp_replicate": dp}
    own |= {"ep": group if experts and moe else 1, "etp": 1 if experts or not moe else group}
    stages = options.partition(environment.get("VLLM_PP_LAYER_PARTITION"))
    if stages is not None and pp > 1:
        own["stages"] = stages
    facts = {"experts": experts, "dp": dp, "partition": environment.get("VLLM_PP_LAYER_PARTITION")}
    facts["local"] = options.take(
        settings, "--data-parallel-size-local", int, None, "dp of this node"
    )
    facts["start"] = options.take(
        settings, "--data-parallel-start-rank", int, None, "first dp rank here"
    )
    facts["rank"] = take(settings, "--data-parallel-rank", int, None, "dp rank here")
    facts["dp_backend"] = take(settings, "--data-parallel-backend", str, "mp")
    for key, name in (
        ("hybrid", "--data-parallel-hybrid-lb"),
        ("external", "--data-parallel-external-lb"),
        ("ports", "--data-parallel-multi-port-external-lb"),
        ("headless", "--headless"),
        ("eplb", "--enable-eplb"),
        ("dbo", "--enable-dbo"),
        ("elastic", "--enable-elastic-ep"),
        ("hc_sp", "--enable-hc-sp"),
    ):
        facts[key] = switch(settings, name)
    facts["executor"] = take(settings, "--distributed-executor-backend", str, None)
    facts["nodes"] = take(settings, "--nnodes", int, 1, "nodes")
    facts["node_rank"] = take(settings, "--node-rank", int, 0)
    facts["eplb_config"] = options.config(settings, "--eplb-config")
    facts["passes"] = options.config(settings, "--compilation-config", ("-cc", "-O"))
    facts["transfer"] = options.config(settings, "--kv-transfer-config")
    facts["speculative"] = options.config(settings, "--speculative-config", ("-sc",))
    return own, facts


def _serving(
    settings: Settings,
    stored: str | None,
    model: Model | None,
    facts: dict[str, Any],
) -> tuple[Serving, list[Finding]]:
    """The engine's choices, without roles; and what is to be known of them."""
    quantization = take(settings, "--quantization", str, None, "how weights are stored")
    dtype = take(settings, "--dtype", str, "auto", "train.dtype")
    length = _length(settings)
    requests = count(settings, "--max-num-seqs", None, "requests of a step")
    tokens = count(settings, "--max-num-batched-tokens", None, "tokens of a step")
    redundant = facts["eplb_config"].get("num_redundant_experts", 0)
    text = str(redundant)  # "32" too
    facts["redundant"] = int(text) if text.isdecimal() and len(text) < 7 else 0
    block = count(settings, "--block-size", None, "tokens of a block of the cache")
    interleave = count(settings, "--cp-kv-cache-interleave-size", None, "tokens on one dcp rank")
    old = count(settings, "--dcp-kv-cache-interleave-size", None, "tokens on one dcp rank")
    fraction = take(settings, "--gpu-memory-utilization", float, 0.92, "share of memory")
    facts["fraction"] = fraction
    usual = 64 if model is not None and model.mla is not None else 16
    serving = Serving(
        "vllm",
        model=options.called(settings, "--model"),
        positions=options.positions(settings, "--model"),
        dtype=options.DTYPES.get(str(dtype).lower(), "bfloat16"),
        weights=options.weights_of(quantization, stored),
        kv_dtype=take(settings, "--kv-cache-dtype", str, "auto", "dtype of the cache") or "auto",
        max_len=length,
        max_requests=options.positive(requests),
        max_tokens=options.positive(tokens),
        fraction=fraction if isinstance(fraction, float) and 0 < fraction <= 1 else None,
        block=block if block and 0 < block <= 10**6 else usual,
        interleave=interleave or old or 1,
        redundant=facts["redundant"],
        balanced=facts["eplb"],
        backend=take(settings, "--all2all-backend", str, "allgather_reducescatter") or "",
        kv_exchange=take(settings, "--dcp-comm-backend", str, "ag_rs") or "ag_rs",
        q_copied=switch(settings, "--dcp-q-replicate"),
        nodes=facts["nodes"] if isinstance(facts["nodes"], int) else 1,
    )
    notes = []
    if stored and quantization and options.SCHEMES.get(quantization.lower(), stored) != stored:
        words = f"weights are stored as {stored}, by the model's name; {quantization} is asked for"
        notes.append(note("vLLM", "vllm-quantisation", words))
    facts["told_len"] = length
    return serving, notes


def _length(settings: Settings) -> int | None:
    setting = settings.said.get("--max-model-len")
    if setting is not None and str(setting.value).strip().lower() in ("auto", "-1"):
        settings.taken["--max-model-len"] = (setting.value, "as long as the cache allows")
        return None
    return options.positive(count(settings, "--max-model-len", None, "train.seq_len"))


def settle(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a changed launch, with what vLLM derives of them derived anew."""
    told = {k.removeprefix("layout."): v for k, v in fields.items() if k.startswith("layout.")}
    names = ("tp", "cp", "dp_shard", "pp", "dp_replicate")
    if not all(isinstance(told.get(n, 1), int) for n in (*names, "ep", "etp")):
        return dict(fields)
    tp, cp, dp, pp, copies = (told.get(n, 1) for n in names)
    group = tp * cp * dp
    derived: dict[str, Any] = {}
    if told.get("ep", 1) > 1:
        derived = {"layout.ep": group, "layout.etp": 1}
    elif told.get("etp", 1) > 1:
        derived = {"layout.etp": group}
    if "gpus" not in fields:
        derived["ranks"] = group * pp * copies
    return dict(fields) | derived


def _changes(
    settings: Settings, facts: Mapping[str, Any], environment: Mapping[str, str]
) -> list[Finding]:
    """What the launch alone shows: options that this version has lost, names that silently become
    something else."""
    found = options.lost(settings, LOST, "vLLM")
    found += options.ambiguous(settings, options.flags("vllm"), "vLLM")
    for key in facts["passes"]:
        name = key.removeprefix("pass_config.")
        if name in LOST_PASSES:
            words = (
                f"--compilation-config has no {key}: the compiled passes for sequence parallelism "
                "and for async tensor parallelism (GEMM fused with its collective) are gone since "
                "0.32. What remains: tokens of a mixture are cut over tp between attention and "
                "experts by themselves with expert parallelism, tp > 1 and dp > 1; "
                "and --enable-hc-sp of one model family"
            )
            found.append(refused("vLLM", "vllm-lost-pass", "at start", words, name))
    backend = settings.taken.get("--all2all-backend", ("", ""))[0]
    if backend in ("pplx", "naive"):
        words = f"--all2all-backend {backend} is gone; allgather_reducescatter runs in its place"
        found.append(changed("vLLM", "vllm-all2all", words, backend))
    elif backend == "flashinfer_all2allv":
        words = "flashinfer_all2allv is another name of flashinfer_nvlink_two_sided for now"
        found.append(changed("vLLM", "vllm-all2all", words, backend))
    for name, words in LOST_VARIABLES.items():
        if name in environment:
            found.append(changed("vLLM", "vllm-lost-variable", f"{name} {words}", name))
    if "--cpu-offload-gb" in settings.said:
        options.take(
            settings, "--cpu-offload-gb", float, 0.0, "weights kept on the host, GiB a device"
        )
        words = "weights that --cpu-offload-gb keeps on the host are counted on the device here"
        found.append(note("vLLM", "vllm-offload", words))
    if facts["speculative"]:
        words = "the weights and the cache of the model that drafts are not counted"
        found.append(note("vLLM", "vllm-draft", words))
    return found
