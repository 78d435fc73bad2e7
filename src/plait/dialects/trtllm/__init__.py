"""TensorRT-LLM: `trtllm-serve`, its options in a YAML file, `LLM(...)` in Python.

Its world is tp x pp x cp. Experts lie over moe_tp x moe_ep x cluster = tp (with Helix tp x cp).
Attention DP is always over all of tp, and attention has no tensor parallelism then. What the file
of options says is stronger than the flags. Ranks from the fastest axis: tp, cp, pp.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from plait.cost.serving import Serving, on
from plait.dialects.launch import Launch, Told
from plait.dialects.serve import options
from plait.dialects.serve.words import Program, serves
from plait.dialects.settings import Setting, Settings
from plait.dialects.source import Source
from plait.dialects.trtllm.validation import check
from plait.dialects.trtllm.writer import write
from plait.spec.findings import Finding, error
from plait.spec.layout import LARGEST, Layout
from plait.spec.model import Model

__all__ = ["VERSION", "check", "read", "settle", "write"]

#: What it is held against: the list of its flags that its own tests keep.
VERSION = "TensorRT-LLM main (flags of trtllm_serve_cli.yaml, 2026)"

PROGRAM = Program(
    "TensorRT-LLM",
    ("trtllm-serve",),
    ("tensorrt_llm.commands.serve",),
    (),
    {"LLM": "model", "LlmArgs": "model", "TorchLlmArgs": "model"},
    "tensorrt_llm",
)


def read(source: Source, told: Told) -> Launch:
    """What a launch serves, of several servers the first."""
    found = serves(source, PROGRAM)
    serve, known = found[0], options.flags("trtllm", short=False)
    words = serve.words
    if words and words[0].text == "serve":
        words = words[1:]
    said = options.read(replace(serve, words=words, settings=()), known, "model")
    trouble: list[Finding] = []
    inside = list(serve.settings)
    for setting in said:
        if setting.name == "--config" and isinstance(setting.value, str):
            inside += options.options_file(setting.value, serve, source, trouble)
    settings = Settings([*said, *_bare(inside)], told.given)
    settings.findings += trouble
    options.file_taken(settings, "--config", "a file of options, stronger than flags")
    fields, stored, notes = options.model_of(settings, "model", told, source)
    model = options.shape(fields, told)
    own, facts = _degrees(settings, model)
    serving = _serving(settings, stored, facts)
    more, copies = options.whole_fields(own, serving, told, "TensorRT-LLM")
    roles = Layout(**{k: v for k, v in own.items() if k != "stages"})
    notes += copies + options.several(found, "TensorRT-LLM", "trtllm")
    names = _known(settings, known.arity)
    return Launch(fields | more, settings, names, notes, {}, on(serving, roles), facts)


def _bare(said: Iterable[Setting]) -> Iterator[Setting]:
    """Options of a file or of Python by their own names, tables key by key."""
    for s in said:
        name = s.name.removeprefix("--").replace("-", "_")
        if isinstance(s.value, Mapping) and s.value:
            for key, value in options.dotted(s.value).items():
                yield Setting(f"{name}.{key}", value, s.where, s.open)
        else:
            yield Setting(name, s.value, s.where, s.open)


def _known(settings: Settings, arity: Mapping[str, str]) -> set[str]:
    """Names that it knows: flags, options of a file, and keys of their tables."""
    keys = options.names("trtllm-options")
    return {*arity, *keys, *(n for n in settings.said if n.partition(".")[0] in keys)}


def _either(
    settings: Settings, flag: str, key: str, kind: Any, default: Any, means: str = ""
) -> Any:
    """An option that a flag or the file says; the file is stronger."""
    take = settings.take if means.startswith("layout.") else partial(options.take, settings)
    if key in settings:
        if flag in settings:
            options.take(settings, flag, kind, default, "overruled by the file of options")
        return take(key, kind, default, means)
    return take(flag, kind, default, means)


def _degree(settings: Settings, flag: str, key: str, means: str, default: int | None = 1) -> Any:
    name = key if key in settings else flag
    if means in settings.told and name in settings and settings.said[name].open:
        return options.degree(settings, name, means)
    value = _either(settings, flag, key, int, default, means)
    if value is None or (isinstance(value, int) and 1 <= value <= LARGEST):
        return value
    if isinstance(value, int) and value == -1 and default is None:
        return None
    message = f"{value} is no number of ranks"
    settings.findings.append(error(name, value, message, 1))
    return default


def _degrees(settings: Settings, model: Model | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The layout, by its own names, and what the rules ask for besides."""
    moe = model is not None and model.moe is not None
    tp = _degree(settings, "--tensor_parallel_size", "tensor_parallel_size", "layout.tp")
    pp = _degree(settings, "--pipeline_parallel_size", "pipeline_parallel_size", "layout.pp")
    cp = _degree(settings, "--context_parallel_size", "context_parallel_size", "layout.cp")
    ep = _degree(
        settings, "--moe_expert_parallel_size", "moe_expert_parallel_size", "layout.ep", None
    )
    moe_tp = settings.take("moe_tensor_parallel_size", int, None, "layout.etp")
    moe_tp = moe_tp if isinstance(moe_tp, int) and 1 <= moe_tp <= LARGEST else None
    cluster = _degree(
        settings, "--moe_cluster_parallel_size", "moe_cluster_parallel_size", "experts' clusters",
        None,
    )  # fmt: skip
    adp = bool(
        _either(settings, "--enable_attention_dp", "enable_attention_dp", bool, False,
                "layout.dp_shard")
    )  # fmt: skip
    asked = settings.said.get("enable_attention_dp", settings.said.get("--enable_attention_dp"))
    if asked is not None and asked.open and "layout.dp_shard" in settings.told:
        shared = options.degree(settings, "--enable_attention_dp", "layout.dp_shard")
        adp, tp = shared > 1, tp * shared if settings.told.get("layout.tp") else tp
    kind = str(settings.take("cp_config.cp_type", str, None, "how context is shared") or "").upper()
    helix = kind.rpartition(".")[2] == "HELIX"
    group = tp * (cp if helix else 1)
    cut = max(1, group // max(1, (ep or 1) * (cluster or 1))) if moe_tp is None else moe_tp
    whole = ep if ep is not None else max(1, group // max(1, cut * (cluster or 1)))
    own: dict[str, Any] = {"tp": 1 if adp else tp, "pp": pp, "cp": cp}
    own |= {"dcp": cp if helix else 1, "dp_shard": tp if adp else 1, "dp_replicate": 1}
    own |= {"ep": whole if moe else 1, "etp": cut * (cluster or 1) if moe else 1}
    stages = settings.take("pp_partition", tuple[int, ...], None, "layout.stages")
    if stages and pp > 1:
        own["stages"] = tuple(stages)
    facts: dict[str, Any] = {"tp": tp, "said_ep": ep, "said_tp": moe_tp, "cluster": cluster or 1}
    facts |= {"adp": adp, "helix": helix, "cp_type": kind, "partition": stages}
    facts["node"] = _either(settings, "--gpus_per_node", "gpus_per_node", int, None)
    facts["head"] = bool(settings.take("enable_lm_head_tp_in_adp", bool, False))
    facts["slots"] = settings.take("moe_config.load_balancer.num_slots", int, None, "experts")
    facts["speculative"] = any(n.startswith("speculative_config") for n in settings.said)
    facts["chunked"] = bool(
        _either(settings, "--enable_chunked_prefill", "enable_chunked_prefill", bool, False)
    )
    facts["backend"] = _either(settings, "--backend", "backend", str, "pytorch")
    facts["experts"] = model.moe.experts if moe and model and model.moe else None
    return own, facts


def _serving(settings: Settings, stored: str | None, facts: dict[str, Any]) -> Serving:
    """The engine's choices, without roles."""
    dtype = settings.take("dtype", str, "auto", "train.dtype")
    algorithm = settings.take("quant_config.quant_algo", str, None, "how weights are stored")
    fraction = _either(settings, "--free_gpu_memory_fraction",
                       "kv_cache_config.free_gpu_memory_fraction", float, 0.9,
                       "share of what weights leave")  # fmt: skip
    facts["fraction"] = fraction
    block = settings.take("kv_cache_config.tokens_per_block", int, 32, "tokens of a block")
    kv = _either(settings, "--kv_cache_dtype", "kv_cache_config.dtype", str, "auto")
    numbers = {
        key: _either(settings, f"--{key}", key, int, None, means)
        for key, means in (
            ("max_seq_len", "train.seq_len"),
            ("max_batch_size", "requests of a step"),
            ("max_num_tokens", "tokens of a step"),
        )
    }
    slots, experts = facts["slots"], facts["experts"]
    more = slots - experts if isinstance(slots, int) and experts else 0
    facts["redundant"] = more
    return Serving(
        "trtllm",
        model=options.called(settings, "model"),
        positions=options.positions(settings, "model"),
        dtype=options.DTYPES.get(str(dtype).lower(), "bfloat16"),
        weights=options.weights_of(algorithm, stored),
        kv_dtype=str(kv or "auto").lower(),
        max_len=options.positive(numbers["max_seq_len"]),
        max_requests=options.positive(numbers["max_batch_size"]),
        max_tokens=options.positive(numbers["max_num_tokens"]),
        fraction=fraction if isinstance(fraction, float) and 0 < fraction <= 1 else None,
        block=block if isinstance(block, int) and 0 < block <= 10**6 else 32,
        redundant=max(0, min(more, 10**6)),
        balanced=slots is not None,
        head_apart=facts["head"],
        node=facts["node"] if isinstance(facts["node"], int) and facts["node"] > 0 else None,
    )


def settle(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a changed launch, with what TensorRT-LLM derives of them derived anew: expert
    tensor parallelism is what ep leaves of tp."""
    told = {k.removeprefix("layout."): v for k, v in fields.items() if k.startswith("layout.")}
    names = ("tp", "cp", "dp_shard", "pp", "dp_replicate", "ep", "etp", "dcp")
    if not all(isinstance(told.get(n, 1), int) for n in names):
        return dict(fields)
    tp, cp, dp, pp, copies, ep, etp, dcp = (told.get(n, 1) for n in names)
    group = tp * dp * (cp if dcp > 1 else 1)
    derived: dict[str, Any] = {"layout.dcp": cp} if dcp > 1 else {}
    if ep > 1 or etp > 1:
        ep = ep if group % max(1, ep) == 0 else group
        derived |= {"layout.ep": ep, "layout.etp": group // ep}
    if "gpus" not in fields:
        derived["ranks"] = tp * cp * dp * pp * copies
    return dict(fields) | derived
