"""A model from a Hugging Face `config.json`.

What an architecture is beyond its config is data, in `spec/architectures.py`. What `Model` cannot
express is refused rather than left out, where it changes the parameters or the arithmetic.
"""

from collections.abc import Iterator, Mapping
from math import log
from typing import Any

from plait.spec.architectures import (
    ARCHITECTURES,
    EXPRESSED,
    GATED,
    KEYS,
    PLAIN,
    TYPES,
    Architecture,
)
from plait.spec.build import check_fields, convert, describe
from plait.spec.findings import Finding, UserError, closest, error
from plait.spec.layout import divisors, nearest
from plait.spec.model import MLA, Model, MoE, RopeScaling

#: Largest size that is taken for one, and most layers.
LARGEST_SIZE, MOST_LAYERS = 10**9, 10_000


def from_config(config: Mapping[str, Any], name: str, where: str = "config") -> Model:
    """The model that a Hugging Face config describes.

    Dropout and the coefficients of a router's losses are not taken over: they belong to a
    training run.

    Args:
        config: the content of `config.json`; of a multi-modal one, its `text_config` is read.
        name: what to call the model.
        where: named in findings, usually the file.

    Raises:
        UserError: an unknown architecture (with the nearest), sizes that are missing or make no
            sense, and what `Model` cannot express: all at once.
    """
    if isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        match = closest(kind, ARCHITECTURES) if isinstance(kind, str) else None
        known = ", ".join(ARCHITECTURES)
        message = f"model_type {kind!r} is none of {known}"
        raise UserError([error(f"{where}.model_type", kind, message, match, "unknown-model")])
    arch = ARCHITECTURES[kind]
    given = {**arch.defaults, **{k: v for k, v in config.items() if v is not None}}
    for key in ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"):
        if key in config:  # here null says "without"
            given[key] = config[key]

    findings: list[Finding] = []
    _check_types(given, where, findings)
    numbers = _sizes(given, arch, where, findings)
    _refuse_unexpressed(given, arch, where, findings)
    if findings:
        raise UserError(findings)

    numbers["mla"] = _part(MLA, arch.mla, given, {}, where, findings)
    if numbers["mla"] is not None:
        numbers["head_dim"] = numbers["mla"].nope_dim + numbers["mla"].rope_dim
    numbers["moe"] = _moe(arch, given, numbers["layers"], where, findings)
    numbers |= _windows(arch, given, numbers["layers"], where, findings)
    if arch.fixed.get("positions", "rope") == "rope":
        numbers |= _rotary(given, where, findings)
    scalar = given.get("query_pre_attn_scalar")
    if scalar is not None and scalar <= 0:
        message = f"{scalar} is not above 0"
        findings.append(error(f"{where}.query_pre_attn_scalar", scalar, message))
    heads, kv_heads = numbers["heads"], numbers.get("kv_heads", numbers["heads"])
    if heads % kv_heads:
        legal = nearest(kv_heads, divisors(heads))
        message = f"{heads} heads are no multiple of {kv_heads} KV heads"
        findings.append(error(f"{where}.num_key_value_heads", kv_heads, message, legal))
    if "head_dim" not in numbers and numbers["hidden"] % heads:
        message = f"hidden {numbers['hidden']} is no multiple of {heads} heads"
        findings.append(error(f"{where}.num_attention_heads", heads, message))
    if findings:
        raise UserError(findings)
    if scalar is not None:
        numbers["attention_scale"] = scalar**-0.5
    elif numbers["mla"] is not None:
        numbers |= _mla_scale(given, numbers["head_dim"])
    return Model.of(name, **numbers)


def _check_types(given: dict[str, Any], where: str, findings: list[Finding]) -> None:
    """Convert what `TYPES` names; what is of another type is dropped with a finding."""
    for key, kind in TYPES.items():
        value = given.get(key)
        if value is not None:
            try:
                given[key] = convert(value, kind, f"{where}.{key}", findings)
            except (TypeError, ValueError, OverflowError):
                message = f"{value!r} is not {describe(kind)}"
                findings.append(error(f"{where}.{key}", value, message))
                del given[key]


def _sizes(
    given: Mapping[str, Any], arch: Architecture, where: str, findings: list[Finding]
) -> dict[str, Any]:
    """The Model fields that stand under a key of their own, checked one by one."""
    read = dict(arch.fixed)
    for name, keys in KEYS.items():
        value = _first(given, keys)
        if value is not None:
            read[name] = value
    for bias in arch.attention_bias:
        read[bias] = given.get("attention_bias", read.get(bias, False))
    read["mlp"] = _activation(given, arch, where, findings)
    numbers = check_fields(Model, read, where, findings)
    for size in ("layers", "hidden", "heads", "vocab", "seq", "ffn"):
        if size not in read and (size != "ffn" or read["mlp"] not in PLAIN.values()):
            findings.append(error(f"{where}.{KEYS[size][0]}", None, "is missing"))
    for size in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "seq"):
        value, most = numbers.get(size, 1), MOST_LAYERS if size == "layers" else LARGEST_SIZE
        if value < 1:
            findings.append(error(f"{where}.{size}", value, f"{size} {value} is below 1", 1))
        elif value > most:
            findings.append(error(f"{where}.{size}", value, f"{size} is above {most}", most))
    return numbers


def _first(given: Mapping[str, Any], keys: str | tuple[str, ...]) -> Any:
    keys = (keys,) if isinstance(keys, str) else keys
    return next((given[k] for k in keys if given.get(k) is not None), None)


def _activation(
    given: Mapping[str, Any], arch: Architecture, where: str, findings: list[Finding]
) -> str:
    key = next(k for k in ("hidden_activation", "activation_function", "hidden_act") if k in given)
    act = given[key]
    known = PLAIN if arch.fixed.get("positions") == "learned" else GATED
    if arch.fixed.get("mlp") == "geglu":
        # Gemma's first configs say "gelu" and mean its tanh form.
        known = {"gelu": "geglu"} | {k: v for k, v in GATED.items() if v == "geglu"}
    elif arch.fixed.get("mlp") == "swiglu-clamped":
        known = {"silu": "swiglu-clamped"}
    if isinstance(act, str) and act in known:
        return known[act]
    message = f"activation {act!r} is none of {', '.join(known)}"
    findings.append(error(f"{where}.{key}", act, message, closest(str(act), known)))
    return next(iter(known.values()))


def _refuse_unexpressed(
    given: Mapping[str, Any], arch: Architecture, where: str, findings: list[Finding]
) -> None:
    expressed = {**EXPRESSED, **arch.expressed}
    if not arch.attention_bias and "qkv_bias" not in arch.fixed:
        expressed["attention_bias"] = (False, None)
    for key, values in expressed.items():
        if given.get(key) not in values:
            message = f"{key} {given[key]!r} is not something that plait's model has"
            findings.append(error(f"{where}.{key}", given[key], message, values[0]))


def _part(
    cls: type,
    keys: Mapping[str, Any] | None,
    given: Mapping[str, Any],
    fixed: Mapping[str, Any],
    where: str,
    findings: list[Finding],
) -> Any:
    """An MoE or MLA out of its keys of the config; None for an architecture without."""
    if keys is None:
        return None
    read = {name: _first(given, key) for name, key in keys.items()}
    read = dict(fixed) | {name: value for name, value in read.items() if value is not None}
    before = len(findings)
    values = check_fields(cls, read, where, findings)
    for name, value in values.items():
        low = 0 if name in ("shared", "first_dense") else 1
        if isinstance(value, float):
            if value <= 0:
                findings.append(error(f"{where}.{name}", value, f"{value} is not above 0"))
        elif isinstance(value, int) and not isinstance(value, bool) and value < low:
            findings.append(error(f"{where}.{name}", value, f"{value} is below {low}", low))
    needed = ("kv_rank", "nope_dim", "rope_dim", "v_dim") if cls is MLA else ("topk", "ffn")
    for name in needed:
        if name not in read:
            key = keys[name] if isinstance(keys[name], str) else keys[name][0]
            findings.append(error(f"{where}.{key}", None, "is missing"))
    return cls(**values) if len(findings) == before else None


def _moe(
    arch: Architecture,
    given: Mapping[str, Any],
    layers: int,
    where: str,
    findings: list[Finding],
) -> MoE | None:
    if arch.moe is None or _first(given, arch.moe["experts"]) is None:
        return None  # a DeepSeek config without experts is dense
    if given.get("topk_method") == "greedy":
        given = {k: v for k, v in given.items() if k not in ("n_group", "topk_group")}
    moe = _part(MoE, arch.moe, given, arch.moe_fixed, where, findings)
    if moe is not None:
        findings += _groups(moe, where)
    dense = given.get("mlp_only_layers") or []
    if moe is not None and dense:
        if sorted(dense) != list(range(len(dense))) or moe.every > 1 or len(dense) > layers:
            message = "only leading layers can be dense in plait's model"
            findings.append(error(f"{where}.mlp_only_layers", dense, message, []))
        return MoE(**(vars(moe) | {"first_dense": len(dense)}))
    return moe


def _groups(moe: MoE, where: str) -> Iterator[Finding]:
    """What is wrong with the groups that routing is limited to."""
    if moe.experts % moe.groups:
        legal = nearest(moe.groups, divisors(moe.experts))
        message = f"{moe.experts} experts do not make {moe.groups} equal groups"
        yield error(f"{where}.n_group", moe.groups, message, legal)
    elif moe.topk_groups > moe.groups:
        message = f"{moe.topk_groups} of {moe.groups} groups cannot be chosen"
        yield error(f"{where}.topk_group", moe.topk_groups, message, moe.groups)
    elif moe.topk > moe.experts // moe.groups * moe.topk_groups:
        most = moe.experts // moe.groups * moe.topk_groups
        message = f"{moe.topk} experts cannot be chosen of {most} in the best groups"
        yield error(f"{where}.num_experts_per_tok", moe.topk, message, most)


def _windows(
    arch: Architecture,
    given: Mapping[str, Any],
    layers: int,
    where: str,
    findings: list[Finding],
) -> dict[str, int | None]:
    """window and full_every."""
    window = given.get("sliding_window")
    if not window or given.get("use_sliding_window") is False:
        return {}
    if window < 1:
        message = f"{window} is below 1"
        findings.append(error(f"{where}.sliding_window", window, message))
        return {}
    types = given.get("layer_types")
    if types is None:
        pattern = _first(given, ("sliding_window_pattern", "_sliding_window_pattern"))
        pattern = arch.pattern if pattern is None else max(pattern, 0)
        full = [i for i in range(layers) if pattern and i % pattern == pattern - 1]
        if given.get("use_sliding_window"):  # Qwen: the first layers see everything
            full = list(range(min(layers, given.get("max_window_layers", 0))))
    else:
        unknown = sorted({str(t) for t in types} - {"full_attention", "sliding_attention"})
        if unknown or len(types) != layers:
            message = (
                f"{', '.join(unknown)} is not something that plait's model has"
                if unknown
                else f"names {len(types)} layers of {layers}"
            )
            findings.append(error(f"{where}.layer_types", len(types), message))
            return {}
        full = [i for i, t in enumerate(types) if t == "full_attention"]
    if len(full) == layers:
        return {}
    if not full:
        return {"window": window}
    every = full[0] + 1
    if full != list(range(every - 1, layers, every)):
        message = "full attention must come in every n-th layer for plait's model"
        findings.append(error(f"{where}.layer_types", full, message))
    return {"window": window, "full_every": every}


def _rotary(
    given: Mapping[str, Any], where: str, findings: list[Finding]
) -> dict[str, float | RopeScaling | None]:
    """The rotary fields, from `rope_theta` with `rope_scaling` or from `rope_parameters`."""
    key = "rope_parameters" if given.get("rope_parameters") else "rope_scaling"
    rope = given.get(key) or {}
    local = given.get("rope_local_base_freq")
    if isinstance(rope.get("full_attention"), Mapping):
        if isinstance(rope.get("sliding_attention"), Mapping):
            local = rope["sliding_attention"].get("rope_theta", local)
        rope = rope["full_attention"]
    if rope.get("partial_rotary_factor", 1) != 1:
        message = "rotating a part of each head is not something that plait's model has"
        factor = rope["partial_rotary_factor"]
        findings.append(error(f"{where}.{key}.partial_rotary_factor", factor, message, 1.0))
    result = {"rope_theta": rope.get("rope_theta", given["rope_theta"])}
    if local is not None:
        result["rope_local_theta"] = local
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        names = {
            "factor": "factor",
            "original": "original_max_position_embeddings",
            "low": "beta_slow" if kind == "yarn" else "low_freq_factor",
            "high": "beta_fast" if kind == "yarn" else "high_freq_factor",
            "attention_factor": "attention_factor",
        }
        if kind == "yarn":
            names["truncate"] = "truncate"
        scaling = {name: rope[k] for name, k in names.items() if rope.get(k) is not None}
        if kind == "yarn":
            scaling = {"low": 1.0, "high": 32.0} | scaling
            if "mscale" in rope and "mscale_all_dim" in rope and "attention_factor" not in rope:
                one, other = _mscale(rope, "mscale"), _mscale(rope, "mscale_all_dim")
                scaling["attention_factor"] = one / other
        if kind not in ("linear", "llama3", "yarn"):
            message = f"rope scaling {kind!r} is none of linear, llama3, yarn"
            match = closest(str(kind), ("linear", "llama3", "yarn"))
            findings.append(error(f"{where}.{key}.rope_type", kind, message, match))
        elif "factor" not in scaling:
            findings.append(error(f"{where}.{key}.factor", None, "is missing"))
        else:
            result["rope_scaling"] = {"kind": kind} | scaling
    values = check_fields(Model, result, where, findings)
    scaling = values.get("rope_scaling")
    for name, value in (
        ("rope_theta", values.get("rope_theta", 1.0)),
        ("rope_local_theta", values.get("rope_local_theta", 1.0)),
        (f"{key}.factor", scaling.factor if scaling else 1.0),
        (f"{key}.original", scaling.original if scaling else 1),
    ):
        if value <= 0:
            findings.append(error(f"{where}.{name}", value, f"{value} is not above 0"))
    return values


def _mscale(rope: Mapping[str, Any], key: str) -> float:
    """Yarn's correction of the logits for a longer context: 0.1 m ln(factor) + 1."""
    factor, m = rope.get("factor"), rope.get(key)
    known = isinstance(factor, int | float) and isinstance(m, int | float)
    return 0.1 * m * log(factor) + 1.0 if known and factor > 1 and m > 0 else 1.0


def _mla_scale(given: Mapping[str, Any], head_dim: int) -> dict[str, float]:
    """DeepSeek multiplies the scores by the square of yarn's correction."""
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) == "default":
        return {}
    if not rope.get("mscale_all_dim"):
        return {}
    return {"attention_scale": head_dim**-0.5 * _mscale(rope, "mscale_all_dim") ** 2}
