"""The model in Megatron's arguments.

Sources: megatron/training/arguments.py, core/transformer/transformer_config.py,
core/transformer/moe/moe_utils.py, core/models/gpt/gpt_model.py.
"""

from math import log, sqrt
from typing import Any

from plait.dialects.megatron.arguments import Arguments
from plait.dialects.megatron.moe import moe_fields
from plait.dialects.megatron.vocabulary import vocabulary
from plait.spec.model import Model

#: Arguments of layers that plait's transformer does not have -> what they are.
STRANGE = {
    "hybrid_layer_pattern": "a hybrid of Mamba, attention and MLP layers",
    "hybrid_override_pattern": "a hybrid of Mamba, attention and MLP layers",
    "experimental_attention_variant": "another attention than softmax over all tokens",
    "linear_attention_freq": "layers of linear attention",
    "heterogeneous_layers_config_path": "layers that differ from each other",
}

#: Words and switches that plait's model has no field for -> what is counted instead.
UNSAID = {
    "mtp_num_layers": "layers that predict further tokens: not counted",
    "moe_latent_size": "experts on a latent of the hidden state: counted on the whole of it",
    "no_rope_freq": "layers without rotary embedding: counted with it, the same in shape",
    "fp8": "matrices multiplied in FP8: counted in the training dtype",
    "fp4": "matrices multiplied in FP4: counted in the training dtype",
    "moe_shared_expert_gate": "a gate of one number a token at the shared experts: not counted",
    "attention_output_gate": "a gate at the attention's output: not counted",
    "qk_l2_norm": "norms of queries and keys without weights: not counted",
    "squared_relu": "squared ReLU: counted as GELU, the same in shape",
    "enable_mhc_connections": "several residual streams: one is counted",
    "apply_residual_connection_post_layernorm": "the residual taken after the norm: not told apart",
}


def model_fields(arguments: Arguments, told: Model | None) -> dict[str, Any]:
    """`model.*`; nothing where the launch says too little of a model, or a person names one.

    Args:
        told: the model that a person names in place of the launch's.
    """
    sizes = _sizes(arguments)
    parts = (_attention(arguments), _mlp(arguments), _norm(arguments), _positions(arguments))
    moe = moe_fields(arguments, sizes.get("model.layers"))
    vocab = vocabulary(arguments, told)
    if told is not None or len(sizes) < 3:
        return {}
    fields = sizes | {"model.vocab": vocab} | moe
    for part in parts:
        fields |= part
    if "model.mla.kv_rank" in fields:
        fields["model.head_dim"] = fields["model.mla.nope_dim"] + fields["model.mla.rope_dim"]
        fields["model.kv_heads"] = sizes["model.heads"]
        fields.pop("model.qk_norm", None)
    fields["model.ffn"] = fields["model.ffn"] or _ffn(fields["model.hidden"], fields["model.mlp"])
    if moe and fields["model.moe.ffn"] is None:
        fields["model.moe.ffn"] = fields["model.ffn"]
    _say_strange(arguments)
    return {path: value for path, value in fields.items() if value is not None}


def _sizes(arguments: Arguments) -> dict[str, Any]:
    take = arguments.take
    layers = take("num_layers", int, None, "model.layers")
    layers = layers or take("encoder_num_layers", int, None, "model.layers")
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        pattern = take(name, str, None, "model.layers")
        if pattern:
            # What follows "/" is of further predicted tokens; "|" parts stages.
            layers = len(pattern.strip("'\"").partition("/")[0].replace("|", ""))
    arguments.values["num_layers"] = layers
    fields = {
        "model.layers": layers,
        "model.hidden": take("hidden_size", int, None, "model.hidden"),
        "model.heads": take("num_attention_heads", int, None, "model.heads"),
    }
    longest = take("max_position_embeddings", int, None, "model.seq")
    fields = {path: value for path, value in fields.items() if value is not None}
    return fields | ({"model.seq": longest} if longest and len(fields) == 3 else {})


def _attention(arguments: Arguments) -> dict[str, Any]:
    take, switch = arguments.take, arguments.switch
    heads = arguments.values.get("num_attention_heads")
    grouped = switch("group_query_attention", False, "model.kv_heads")
    groups = take("num_query_groups", int, 1, "model.kv_heads")
    if arguments.spell("group_query_attention") is None:  # a target without the switch
        grouped = "num_query_groups" in arguments.given
    qk_norm = switch("qk_layernorm", False, "model.qk_norm")
    fields = {
        "model.kv_heads": groups if grouped else heads,
        "model.head_dim": take("kv_channels", int, None, "model.head_dim"),
        "model.qk_norm": "head" if qk_norm else None,
    }
    window = arguments.numbers("window_size", "model.window", False)
    each = take("window_attn_skip_freq", None, None, "model.full_every", False)
    if window and window[0] > 0:
        fields["model.window"] = window[0] + 1
        if isinstance(each, int | str) and str(each).isdecimal() and len(str(each)) < 6:
            fields["model.full_every"] = int(each)
        elif each is not None:
            arguments.note("megatron-window", f"window by layer ({each}): counted on all", each)
    if take("softmax_type", str, "vanilla", "model.sinks", False) == "learnable":
        fields["model.sinks"] = True
    if switch("multi_latent_attention", False, "model.mla"):
        fields |= {
            "model.mla.kv_rank": take("kv_lora_rank", int, 32, "model.mla.kv_rank"),
            "model.mla.q_rank": take("q_lora_rank", int, None, "model.mla.q_rank"),
            "model.mla.nope_dim": take("qk_head_dim", int, 128, "model.mla.nope_dim"),
            "model.mla.rope_dim": take("qk_pos_emb_head_dim", int, 64, "model.mla.rope_dim"),
            "model.mla.v_dim": take("v_head_dim", int, 128, "model.mla.v_dim"),
        }
    return fields


def _mlp(arguments: Arguments) -> dict[str, Any]:
    take, switch = arguments.take, arguments.switch
    bias = switch("add_bias_linear", True, "model.mlp_bias")
    qkv = switch("add_qkv_bias", False, "model.qkv_bias")
    fused = switch("bias_gelu_fusion", True, "model.mlp: GELU in its tanh form")
    clamp = take("activation_func_clamp_value", float, None, "model.mlp")
    mlp = "gelu-tanh" if fused and bias else "gelu"
    if switch("swiglu", False, "model.mlp"):
        mlp = "swiglu"
    elif switch("quick_geglu", False, "model.mlp"):
        mlp = "swiglu-clamped" if clamp else "geglu"
    return {
        "model.ffn": take("ffn_hidden_size", int, None, "model.ffn"),
        "model.mlp": mlp,
        "model.mlp_bias": bias,
        "model.o_bias": bias,
        "model.qkv_bias": bias or qkv,
        "model.dropout": take("hidden_dropout", float, 0.1, "model.dropout", False),
    }


def _ffn(hidden: int, mlp: str) -> int:
    """Megatron's own width: two thirds of 4 x hidden with SwiGLU, in steps of 64."""
    return int(hidden * 8 / 3 / 64) * 64 if mlp == "swiglu" else 4 * hidden


def _norm(arguments: Arguments) -> dict[str, Any]:
    take = arguments.take
    kind = take("normalization", str, "LayerNorm", "model.norm")
    untied = arguments.switch("untie_embeddings_and_output_weights", False, "model.tied")
    fields = {
        "model.norm": "rms" if kind == "RMSNorm" else "layer",
        "model.norm_eps": take("layernorm_epsilon", float, 1e-5, "model.norm_eps", False),
        "model.tied": not untied,
    }
    if arguments.switch("layernorm_zero_centered_gamma", False, "model.norm_offset"):
        fields["model.norm_offset"] = True
    return fields


def _positions(arguments: Arguments) -> dict[str, Any]:
    take, switch = arguments.take, arguments.switch
    kind = take("position_embedding_type", str, "learned_absolute", "model.positions")
    if switch("use_rotary_position_embeddings", False, "model.positions"):
        kind = "rope"
    theta = take("rotary_base", float, 10000, "model.rope_theta", False)
    percent = take("rotary_percent", float, 1.0, "part of a head that is rotated", False)
    if percent != 1.0:
        arguments.note("megatron-rotary-percent", f"rotates {percent} of a head; all is counted")
    if kind in ("learned_absolute", "none"):
        return {"model.positions": "learned" if kind == "learned_absolute" else "none"}
    if kind == "relative":
        arguments.note("megatron-positions", "relative positions are counted as none")
        return {"model.positions": "none"}
    fields = {"model.positions": "rope", "model.rope_theta": theta}
    return fields | _scaling(arguments, kind)


def _scaling(arguments: Arguments, kind: str) -> dict[str, Any]:
    """How rotary frequencies are stretched."""
    take, where = arguments.take, "model.rope_scaling"
    latent = arguments.values.get("multi_latent_attention")
    linear = take("rotary_seq_len_interpolation_factor", int, None, where, False)
    if kind == "yarn" or (latent and take("rope_type", str, "yarn", where) == "yarn"):
        prefix = "" if latent else "yarn_"
        factor = take("rotary_scaling_factor", float, 1.0, f"{where}.factor", False)
        original = take(f"{prefix}original_max_position_embeddings", int, 4096,
                        f"{where}.original", False)  # fmt: skip
        fast = take(f"{prefix}beta_fast", float, 32.0, f"{where}.high", False)
        slow = take(f"{prefix}beta_slow", float, 1.0, f"{where}.low", False)
        said = {"kind": "yarn", "factor": factor, "original": original, "low": slow, "high": fast}
        fields = {f"{where}.{name}": value for name, value in said.items()}
        if factor is None or factor <= 1:
            return {}
        if not latent:
            rounded = arguments.switch("yarn_correction_range_round_to_int", True, where)
            return fields | {f"{where}.truncate": rounded}
        one = take("mscale", float, 1.0, "model.rope_scaling.attention_factor", False)
        whole = take("mscale_all_dim", float, 0.0, "model.attention_scale", False)
        ratio = magnitude(factor, one) / magnitude(factor, whole)
        fields[f"{where}.attention_factor"] = round(ratio, 9)
        values = arguments.values
        width = (values.get("qk_head_dim") or 0) + (values.get("qk_pos_emb_head_dim") or 0)
        if whole and width > 0:
            fields["model.attention_scale"] = magnitude(factor, whole) ** 2 / sqrt(width)
        return fields
    if arguments.switch("use_rope_scaling", False, where):
        factor = take("rope_scaling_factor", float, 8.0, f"{where}.factor", False)
        said = {"kind": "llama3", "factor": factor, "original": 8192, "low": 1.0, "high": 4.0}
        return {f"{where}.{name}": value for name, value in said.items()}
    if linear and linear > 1:
        return {f"{where}.kind": "linear", f"{where}.factor": float(linear)}
    return {}


def magnitude(factor: float, scale: float) -> float:
    """YaRN's growth of the scores at a stretch (2309.00071, section 3.4), times DeepSeek's
    `mscale`."""
    return 0.1 * scale * log(factor) + 1.0


def _say_strange(arguments: Arguments) -> None:
    """Notes on what plait's model has no words for."""
    for name, what in STRANGE.items():
        if arguments.take(name, None, None, "layers that plait has not", False) is not None:
            message = f"the model is {what}; every layer is counted as attention and MLP"
            arguments.note("megatron-other-layers", message, arguments.values[name])
            break
    for name, what in UNSAID.items():
        value = arguments.take(name, None, None, "what plait has no word for", False)
        if value not in (None, False, "false", "none", 0, "0", "False"):
            arguments.note("megatron-unsaid", f"{arguments.spelled(name)}: {what}", value)
