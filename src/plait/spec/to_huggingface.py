"""A model as a Hugging Face `config.json`: the way back of `spec/huggingface.py`.

What was written is read again and compared: a config that would say something else is refused.
"""

from dataclasses import asdict
from math import isclose, log
from typing import Any

from plait.spec.architectures import ARCHITECTURES, GATED, KEYS, PLAIN
from plait.spec.findings import UserError, error
from plait.spec.huggingface import from_config
from plait.spec.model import Model, RopeScaling

#: model_type -> the class that `transformers` builds.
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}

#: What belongs to a training run and stands in no config.
OF_A_RUN = ("name", "dropout")
OF_A_ROUTERS_RUN = ("correction_speed", "aux_loss", "aux_form", "z_loss", "capacity", "drop")


def model_type(model: Model) -> str:
    """The architecture whose fixed choices are a model's own."""
    moe = model.moe
    if model.positions == "learned":
        return "gpt2"
    if model.sinks:
        return "gpt_oss"
    if model.mla is not None:
        return "deepseek_v3" if moe is not None and moe.correction else "deepseek_v2"
    if moe is not None:
        return {"head": "qwen3_moe", "full": "olmoe"}.get(model.qk_norm, "mixtral")
    if model.norm_at == "both":
        return "gemma3_text" if model.qk_norm else "gemma2"
    if model.norm_at == "output":
        return "olmo2"
    if model.norm_offset:
        return "gemma"
    if model.qk_norm:
        return "qwen3"
    if model.qkv_bias and not model.o_bias:
        return "qwen2"
    return "llama" if model.window is None else "mistral"


def to_config(model: Model) -> dict[str, Any]:
    """The content of a `config.json` that says what a model is; dropout is left out.

    Raises:
        UserError: names the fields that no config of the nearest architecture can say.
    """
    kind = model_type(model)
    arch = ARCHITECTURES[kind]
    config: dict[str, Any] = {"model_type": kind, "architectures": [CLASSES[kind]]}
    for field, keys in KEYS.items():
        if kind != "gpt2" or len(keys) > 1 or field in ("vocab", "tied"):
            config[keys[-1] if kind == "gpt2" else keys[0]] = getattr(model, field)
    if model.mla is not None:
        del config["head_dim"]
    if arch.attention_bias or kind.startswith("deepseek"):
        config["attention_bias"] = model.o_bias
    config |= _activation(model, kind)
    config |= _windows(model, kind)
    if model.positions == "rope":
        config["rope_parameters"] = _rotary(model)
    if model.attention_scale is not None and model.mla is None:
        scalar = round(model.attention_scale**-2, 9)
        config["query_pre_attn_scalar"] = int(scalar) if scalar.is_integer() else scalar
    for part, names in ((model.moe, arch.moe), (model.mla, arch.mla)):
        if part is not None and names is not None:
            for field, key in names.items():
                config[key if isinstance(key, str) else key[0]] = getattr(part, field)
    if model.moe is not None and kind.startswith("deepseek"):
        grouped = "group_limited_greedy" if model.moe.groups > 1 else "greedy"
        config["topk_method"] = "noaux_tc" if model.moe.correction else grouped
        config["scoring_func"] = model.moe.score
    if kind == "qwen3_moe" and model.moe.first_dense:
        config["mlp_only_layers"] = list(range(model.moe.first_dense))
    _compare(model, config)
    return config


def _activation(model: Model, kind: str) -> dict[str, str]:
    if kind == "gpt2":
        names = {ours: theirs for theirs, ours in reversed(PLAIN.items())}
        return {"activation_function": names.get(model.mlp, model.mlp)}
    names = {ours: theirs for theirs, ours in reversed(GATED.items())} | {"swiglu-clamped": "silu"}
    key = "hidden_activation" if kind.startswith("gemma") else "hidden_act"
    return {key: names.get(model.mlp, model.mlp)}


def _windows(model: Model, kind: str) -> dict[str, Any]:
    if kind == "gpt2":
        return {}
    result: dict[str, Any] = {"sliding_window": model.window}
    if kind.startswith("qwen"):
        result |= {"use_sliding_window": model.window is not None, "max_window_layers": 0}
    if model.full_every is not None:
        result["layer_types"] = [
            "full_attention" if model.is_full_attention(layer) else "sliding_attention"
            for layer in range(model.layers)
        ]
    return result


def _rotary(model: Model) -> dict[str, Any]:
    whole = _rope(model.rope_theta, model.rope_scaling)
    if model.mla is not None and model.attention_scale is not None and model.rope_scaling:
        # The scores' factor over its default is the square of 0.1 m ln(factor) + 1.
        root = (model.attention_scale * model.head_dim**0.5) ** 0.5
        whole["mscale_all_dim"] = round((root - 1) / (0.1 * log(model.rope_scaling.factor)), 9)
    if model.rope_local_theta is None:
        return whole
    return {"full_attention": whole, "sliding_attention": _rope(model.rope_local_theta, None)}


def _rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    result = {"rope_type": scaling.kind, "rope_theta": theta, "factor": scaling.factor}
    if scaling.kind != "linear":
        result["original_max_position_embeddings"] = scaling.original
    if scaling.kind == "llama3":
        result |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
    if scaling.kind == "yarn":
        result |= {"beta_slow": scaling.low, "beta_fast": scaling.high}
        result["truncate"] = scaling.truncate
        if scaling.attention_factor is not None:
            result["attention_factor"] = scaling.attention_factor
    return result


def _compare(model: Model, config: dict[str, Any]) -> None:
    """Raises a UserError that names what the config says otherwise."""
    meant, said = asdict(model), asdict(from_config(config, model.name))
    for one in (meant, said):
        if all(model.is_moe(layer) for layer in range(model.layers)):
            one["ffn"] = None  # no layer has that MLP
        one["moe"] = {k: v for k, v in (one["moe"] or {}).items() if k not in OF_A_ROUTERS_RUN}
    differing = [k for k in meant if k not in OF_A_RUN and not _same(meant[k], said[k])]
    if differing:
        raise UserError(
            error(
                f"model.{field}",
                meant[field],
                f"a Hugging Face config of the architecture {config['model_type']} cannot say it",
                rule="not-in-config",
            )
            for field in differing
        )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, float) and isinstance(b, float):
        return isclose(a, b, rel_tol=1e-12)
    return a == b
