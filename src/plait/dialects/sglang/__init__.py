"""SGLang: `python -m sglang.launch_server`, `sglang serve`, container files, `sgl.Engine(...)`.

Its `--tp-size` counts ALL devices of one pipeline stage of one replica, whatever they do inside:
attention takes attn_dp x attn_cp x (the rest: attention tp) of them, experts moe_dp x ep x (the
rest: expert tp). Its world is tp x pp, times dp for plain replicas. Ranks from the fastest axis:
attention tp, attention cp, attention dp, pp.
"""

from collections.abc import Mapping
from typing import Any

from plait.cost.serving import Serving, on
from plait.dialects.launch import Launch, Told, changed
from plait.dialects.serve import options
from plait.dialects.serve.options import count, degree, switch, take
from plait.dialects.serve.words import Program, serves
from plait.dialects.settings import Settings
from plait.dialects.sglang.validation import LOST, LOST_SWITCHES, check
from plait.dialects.sglang.writer import write
from plait.dialects.source import Source
from plait.spec.findings import Finding
from plait.spec.layout import Layout
from plait.spec.model import Model

__all__ = ["VERSION", "check", "read", "settle", "write"]

#: What it is held against: the wheel of that version.
VERSION = "SGLang 0.5.23"

PROGRAM = Program(
    "SGLang",
    ("sglang serve", "sglang.launch_server"),
    ("sglang.launch_server", "sglang.srt.entrypoints.http_server"),
    (),
    {name: "--model-path" for name in ("Engine", "ServerArgs", "Runtime")},
    "sglang",
)

_VARIABLES = ("SGLANG_PP_LAYER_PARTITION",)

#: All-to-all backends for which ep is all of tp (arg_groups/overrides.py _a2a_ep_size).
SPANNING = frozenset(
    "deepep deepep_v2 mooncake nixl mori flashinfer ascend_fuseep megamoe"
    " flashinfer_megamoe".split()
)


def read(source: Source, told: Told) -> Launch:
    """What a launch serves, of several servers the first."""
    found = serves(source, PROGRAM)
    serve, known = found[0], options.flags("sglang")
    settings = options.under_flags(serve, known, "--model-path", LOST_SWITCHES, source, told)
    fields, stored, notes = options.model_of(settings, "--model-path", told, source)
    model = options.shape(fields, told)
    own, facts, changes = _degrees(settings, model)
    stages = options.partition(serve.environment.get("SGLANG_PP_LAYER_PARTITION"))
    facts["partition"] = serve.environment.get("SGLANG_PP_LAYER_PARTITION")
    if stages is not None and own["pp"] > 1:
        own["stages"] = stages
    serving = _serving(settings, stored, model, facts)
    more, copies = options.whole_fields(own, serving, told, "SGLang")
    roles = Layout(**{k: v for k, v in own.items() if k != "stages"})
    notes += copies + changes + options.lost(settings, LOST, "SGLang")
    notes += options.ambiguous(settings, known, "SGLang")
    notes += options.several(found, "SGLang", "sglang")
    environment = {k: v for k, v in serve.environment.items() if k in _VARIABLES}
    names = options.unread(settings, known)
    return Launch(fields | more, settings, names, notes, environment, on(serving, roles), facts)


def _degrees(
    settings: Settings, model: Model | None
) -> tuple[dict[str, Any], dict[str, Any], list[Finding]]:
    """The layout, by its own names, what the rules ask for besides, and what is rewritten."""
    moe = model is not None and model.moe is not None
    pp = degree(settings, "--pp-size", "layout.pp")
    dp = degree(settings, "--dp-size", "layout.dp_replicate")
    attn_dp = degree(settings, "--attn-dp-size", "layout.dp_shard")
    found = []
    if switch(settings, "--enable-dp-attention", "--dp-size counts attention-DP groups"):
        words = (
            f"--dp-size {dp} --enable-dp-attention is read as --attn-dp-size {dp}; it goes away "
            "after 2026"
        )
        if attn_dp == 1:
            attn_dp, dp = dp, 1
        found.append(changed("SGLang", "sglang-dp-attention", words, attn_dp))
    cp = degree(settings, "--attn-cp-size", "layout.cp")
    said = settings.said.get("--tp-size")
    if said is not None and said.open:
        whole = degree(settings, "--tp-size", "layout.tp") * attn_dp * cp
    else:
        whole = degree(settings, "--tp-size", "devices of a stage")
    dcp = degree(settings, "--dcp-size", "layout.dcp")
    ep = degree(settings, "--ep-size", "layout.ep")
    moe_dp = degree(settings, "--moe-dp-size", "copies of the experts")
    backend = settings.take("--moe-a2a-backend", str, "none", "how tokens reach their experts")
    if backend in SPANNING and ep != whole:
        words = f"--moe-a2a-backend {backend} makes ep all of tp: {whole}, not {ep}"
        found.append(changed("SGLang", "sglang-a2a-ep", words, ep))
        ep = whole
    dwdp = degree(settings, "--dwdp-size", "weights pulled from peers")
    if dwdp > 1:
        words = f"--dwdp-size {dwdp} makes attention DP and ep {dwdp} and takes no exchange"
        found.append(changed("SGLang", "sglang-dwdp", words, dwdp))
        attn_dp, dp, ep, moe_dp, backend = dwdp, 1, dwdp, 1, "none"
    attn_tp = max(1, whole // max(1, attn_dp * cp))
    inside = max(1, whole // max(1, ep * moe_dp))
    own = {"tp": attn_tp, "pp": pp, "cp": cp, "dcp": dcp, "dp_shard": attn_dp}
    own |= {"dp_replicate": dp, "ep": ep if moe else 1, "etp": inside if moe else 1}
    facts: dict[str, Any] = {"whole": whole, "moe_dp": moe_dp, "said_ep": ep, "dwdp": dwdp}
    facts["backend"] = backend or "none"
    facts["dense_tp"] = take(settings, "--moe-dense-tp-size", int, None, "tp of dense MLPs")
    for key, name in (
        ("prefill_cp", "--enable-prefill-cp"),
        ("eplb", "--enable-eplb"),
        ("lm_head", "--enable-dp-lm-head"),
        ("layernorm_sp", "--enable-layernorm-sp"),
        ("mixed_overlap", "--enable-two-batch-overlap"),
        ("q_copied", "--dcp-replicate-q-proj"),
    ):
        facts[key] = switch(settings, name)
    facts["cp_strategy"] = take(settings, "--cp-strategy", str, None)
    facts["dispatch"] = take(settings, "--ep-dispatch-algorithm", str, None)
    facts["speculative"] = take(settings, "--speculative-algorithm", str, None)
    facts["disaggregation"] = take(settings, "--disaggregation-mode", str, "null")
    facts["nodes"] = take(settings, "--nnodes", int, 1, "nodes")
    facts["node_rank"] = take(settings, "--node-rank", int, 0)
    facts["redundant"] = options.take(
        settings, "--ep-num-redundant-experts", int, 0, "copies of experts"
    )
    return own, facts, found


def _serving(
    settings: Settings, stored: str | None, model: Model | None, facts: dict[str, Any]
) -> Serving:
    """The engine's choices, without roles."""
    quantization = take(settings, "--quantization", str, None, "how weights are stored")
    dtype = take(settings, "--dtype", str, "auto", "train.dtype")
    fraction = take(settings, "--mem-fraction-static", float, None, "share of memory")
    facts["fraction"] = fraction
    redundant = facts["redundant"]
    chunk = count(settings, "--chunked-prefill-size", None, "tokens of a prompt chunk")
    page = count(settings, "--page-size", None, "tokens of a block of the cache")
    exchange = take(settings, "--dcp-comm-backend", str, None)
    return Serving(
        "sglang",
        model=options.called(settings, "--model-path"),
        positions=options.positions(settings, "--model-path"),
        dtype=options.DTYPES.get(str(dtype).lower(), "bfloat16"),
        weights=options.weights_of(quantization, stored),
        kv_dtype=take(settings, "--kv-cache-dtype", str, "auto", "dtype of the cache") or "auto",
        max_len=options.positive(count(settings, "--context-length", None, "train.seq_len")),
        max_requests=options.positive(
            count(settings, "--max-running-requests", None, "requests running at once")
        ),
        max_tokens=options.positive(chunk),
        fraction=fraction if isinstance(fraction, float) and 0 < fraction < 1 else None,
        block=page if page and 0 < page <= 10**6 else 1,
        redundant=redundant if isinstance(redundant, int) and 0 <= redundant < 10**6 else 0,
        balanced=facts["eplb"],
        backend="" if facts["backend"] == "none" else facts["backend"],
        kv_exchange="ag_rs" if exchange == "ag_rs" else "a2a",
        q_copied=facts["q_copied"],
        dense_copied=facts["dense_tp"] == 1,
        head_apart=facts["lm_head"],
        nodes=facts["nodes"] if isinstance(facts["nodes"], int) else 1,
    )


def settle(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a changed launch, with what SGLang derives of them derived anew: expert tensor
    parallelism is what ep leaves of the devices of a stage."""
    told = {k.removeprefix("layout."): v for k, v in fields.items() if k.startswith("layout.")}
    names = ("tp", "cp", "dp_shard", "pp", "dp_replicate", "ep", "etp")
    if not all(isinstance(told.get(n, 1), int) for n in names):
        return dict(fields)
    tp, cp, dp, pp, copies, ep, etp = (told.get(n, 1) for n in names)
    whole = tp * cp * dp
    derived: dict[str, Any] = {}
    if ep > 1 or etp > 1:
        ep = ep if whole % max(1, ep) == 0 else whole
        derived = {"layout.ep": ep, "layout.etp": whole // ep}
    if "gpus" not in fields:
        derived["ranks"] = whole * pp * copies
    return dict(fields) | derived
