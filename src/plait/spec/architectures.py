"""What the architectures of Hugging Face configs mean beyond their configs, as data.

One `Architecture` for each `model_type`, and under which keys its config says the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Model field -> config keys, the first one present counts. True of most architectures.
KEYS = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size", "n_inner"),
    "vocab": ("vocab_size",),
    "seq": ("max_position_embeddings", "n_positions"),
    "norm_eps": ("rms_norm_eps", "layer_norm_epsilon"),
    "tied": ("tie_word_embeddings",),
    "mlp_bias": ("mlp_bias",),
    "attention_softcap": ("attn_logit_softcapping",),
    "logit_softcap": ("final_logit_softcapping",),
}

#: hidden_act -> Model.mlp, with a gate and without one.
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
PLAIN = {
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
}

#: Config key -> the values of it that `Model` expresses; absent is always one of them.
EXPRESSED = {
    "partial_rotary_factor": (1, None),
    "moe_layer_freq": (1, None),
    "add_cross_attention": (False, None),
    "scale_attn_weights": (True, None),
    "scale_attn_by_inverse_layer_idx": (False, None),
    "use_bidirectional_attention": (False, None),
    "rope_interleave": (True, None),
    "clip_qkv": (None,),
    "swiglu_alpha": (1.702, None),
    "swiglu_limit": (7.0, None),
}

#: Types of the config keys that are read for more than one field.
TYPES = {
    "sliding_window": int,
    "use_sliding_window": bool,
    "max_window_layers": int,
    "sliding_window_pattern": int,
    "_sliding_window_pattern": int,
    "layer_types": tuple[str, ...],
    "mlp_only_layers": tuple[int, ...],
    "query_pre_attn_scalar": float,
    "rope_scaling": dict[str, Any],
    "rope_parameters": dict[str, Any],
    "rope_local_base_freq": float,
}

_SCALED = {"mlp": "geglu", "norm_offset": True, "embed_scale": True, "tied": True}
_MISTRAL_MOE = {
    "experts": "num_local_experts",
    "topk": "num_experts_per_tok",
    "ffn": "intermediate_size",
}
_QWEN_MOE = {
    "experts": ("num_experts", "num_local_experts"),
    "topk": "num_experts_per_tok",
    "ffn": "moe_intermediate_size",
    "every": "decoder_sparse_step",
    "normalize": "norm_topk_prob",
}
_OLMOE = _QWEN_MOE | {"ffn": "intermediate_size"}
_DEEPSEEK_MOE = {
    "experts": "n_routed_experts",
    "topk": "num_experts_per_tok",
    "ffn": "moe_intermediate_size",
    "shared": "n_shared_experts",
    "first_dense": "first_k_dense_replace",
    "normalize": "norm_topk_prob",
    "scaling": "routed_scaling_factor",
    "groups": "n_group",
    "topk_groups": "topk_group",
}
_DEEPSEEK_MLA = {
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "v_dim": "v_head_dim",
}


@dataclass(frozen=True)
class Architecture:
    """What a `model_type` means.

    Attributes:
        fixed: Model fields that no key of the config decides (a key of `KEYS` still wins).
        attention_bias: Model fields that the key `attention_bias` sets.
        defaults: config keys that may be left out, with what its config class then takes.
        moe, mla: MoE and MLA fields -> config keys. moe_fixed: MoE fields of every such model.
        expressed: config keys that may be read with these values only (the first is the usual one).
        pattern: without `layer_types`, one layer in `pattern` has full attention (0: none has).
    """

    fixed: Mapping[str, Any] = field(default_factory=dict)
    attention_bias: tuple[str, ...] = ("qkv_bias", "o_bias")
    defaults: Mapping[str, Any] = field(default_factory=dict)
    moe: Mapping[str, str | tuple[str, ...]] | None = None
    moe_fixed: Mapping[str, Any] = field(default_factory=dict)
    mla: Mapping[str, str] | None = None
    expressed: Mapping[str, tuple] = field(default_factory=dict)
    pattern: int = 0


_RARELY = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0}
_QWEN = _RARELY | {"use_sliding_window": False}
_GEMMA = _RARELY | {"hidden_act": "gelu_pytorch_tanh", "head_dim": 256}

ARCHITECTURES = {
    "llama": Architecture(defaults=_RARELY),
    "mistral": Architecture(defaults=_RARELY | {"sliding_window": 4096}),
    "mixtral": Architecture(
        defaults=_RARELY | {"rms_norm_eps": 1e-5, "rope_theta": 1e6}, moe=_MISTRAL_MOE
    ),
    "qwen2": Architecture(fixed={"qkv_bias": True}, attention_bias=(), defaults=_QWEN),
    "qwen3": Architecture(fixed={"qk_norm": "head"}, defaults=_QWEN | {"head_dim": 128}),
    "qwen3_moe": Architecture(
        fixed={"qk_norm": "head"},
        defaults=_QWEN | {"norm_topk_prob": False},
        moe=_QWEN_MOE,
    ),
    "olmoe": Architecture(
        fixed={"qk_norm": "full"},
        defaults=_RARELY | {"rms_norm_eps": 1e-5, "norm_topk_prob": False},
        moe=_OLMOE,
    ),
    "olmo2": Architecture(
        fixed={"norm_at": "output", "qk_norm": "full"}, defaults=_RARELY | {"rms_norm_eps": 1e-5}
    ),
    "phi3": Architecture(defaults=_RARELY | {"rms_norm_eps": 1e-5}),
    "gemma": Architecture(fixed=_SCALED, defaults=_GEMMA),
    "gemma2": Architecture(
        fixed=_SCALED | {"norm_at": "both"},
        defaults=_GEMMA
        | {
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        pattern=2,
    ),
    "gemma3_text": Architecture(
        fixed=_SCALED | {"norm_at": "both", "qk_norm": "head"},
        defaults=_GEMMA
        | {
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
        },
        pattern=6,
    ),
    "gpt2": Architecture(
        fixed={
            "norm": "layer",
            "positions": "learned",
            "tied": True,
            "qkv_bias": True,
            "o_bias": True,
            "mlp_bias": True,
        },
        defaults={"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"},
    ),
    "deepseek_v2": Architecture(
        attention_bias=(),
        defaults=_RARELY | {"norm_topk_prob": False, "topk_method": "greedy"},
        moe=_DEEPSEEK_MOE,
        mla=_DEEPSEEK_MLA,
        expressed={
            "norm_topk_prob": (False, None),
            "scoring_func": ("softmax", None),
            "topk_method": ("greedy", "group_limited_greedy", None),
        },
    ),
    "deepseek_v3": Architecture(
        attention_bias=(),
        defaults=_RARELY | {"norm_topk_prob": True},
        moe=_DEEPSEEK_MOE,
        moe_fixed={"score": "sigmoid", "correction": True, "group_score": "top2"},
        mla=_DEEPSEEK_MLA,
        expressed={"scoring_func": ("sigmoid", None), "topk_method": ("noaux_tc", None)},
    ),
    "gpt_oss": Architecture(
        fixed={"mlp": "swiglu-clamped", "qkv_bias": True, "o_bias": True, "sinks": True},
        defaults=_RARELY | {"rms_norm_eps": 1e-5, "rope_theta": 150000.0, "sliding_window": 128},
        moe=_MISTRAL_MOE,
        moe_fixed={"bias": True, "router_bias": True, "topk_first": True},
        pattern=2,
    ),
}
