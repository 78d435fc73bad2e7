"""Configs of the transformers library: its own models are the oracle for parameter counts."""

import json
import math

import pytest
import torch
import transformers

from plait.spec import presets
from plait.spec.findings import UserError
from plait.spec.huggingface import ARCHITECTURES, from_config
from plait.spec.model import RopeScaling
from plait.spec.parameters import parameter_count

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
}
LATENT = SMALL | {
    "num_key_value_heads": 6,
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 2,
    "n_group": 2,
    "topk_group": 1,
}
MODELS = {
    "llama": ("Llama", SMALL | {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", SMALL | {"head_dim": 10}),
    "mixtral": ("Mixtral", SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", SMALL | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", SMALL | {"head_dim": 12}),
    "qwen3_moe": (
        "Qwen3Moe",
        SMALL
        | {
            "head_dim": 12,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "decoder_sparse_step": 2,
        },
    ),
    "olmo2": ("Olmo2", SMALL),
    "olmoe": ("Olmoe", SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}),
    "phi3": ("Phi3", SMALL | {"pad_token_id": 0}),
    "gemma": ("Gemma", SMALL | {"head_dim": 16}),
    "gemma2": ("Gemma2", SMALL | {"head_dim": 16, "query_pre_attn_scalar": 8}),
    "gemma3_text": ("Gemma3", SMALL | {"head_dim": 16, "num_hidden_layers": 13}),
    "gpt2": (
        "GPT2",
        {"vocab_size": 97, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64},
    ),
    "deepseek_v2": ("DeepseekV2", LATENT),
    "deepseek_v3": ("DeepseekV3", LATENT),
    "gpt_oss": (
        "GptOss",
        SMALL | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}


def library(kind):
    """(config as it would stand in config.json, exact number of parameters)."""
    name, sizes = MODELS[kind]
    config = getattr(transformers, f"{name}{'Text' if kind == 'gemma3_text' else ''}Config")
    config = config(**sizes)
    suffix = "LMHeadModel" if kind == "gpt2" else "ForCausalLM"
    with torch.device("meta"):
        model = getattr(transformers, name + suffix)(config)
    count = sum(p.numel() for p in model.parameters())
    # DeepSeek's router biases are learned, though not by gradients, and stand in checkpoints.
    count += sum(b.numel() for n, b in model.named_buffers() if "correction_bias" in n)
    return json.loads(json.dumps(config.to_dict())), count


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_parameter_counts_equal_the_library(kind):
    config, count = library(kind)
    assert config["model_type"] == kind
    model = from_config(config, kind)
    assert parameter_count(model) == count
    assert model.norm_eps == config.get("rms_norm_eps", config.get("layer_norm_epsilon"))


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "gpt_oss", "mistral", "qwen2"])
def test_windows_equal_the_library(kind):
    config, _ = library(kind)
    model = from_config(config, kind)
    types = config.get("layer_types") or ["sliding_attention"] * model.layers
    told = [
        "full_attention" if model.is_full_attention(layer) else "sliding_attention"
        for layer in range(model.layers)
    ]
    assert told == types


def test_gemma():
    gemma2 = from_config(library("gemma2")[0], "x")
    assert gemma2.attention_scale == pytest.approx(8**-0.5, rel=1e-15)
    assert (gemma2.attention_softcap, gemma2.logit_softcap) == (50.0, 30.0)
    gemma3 = from_config(library("gemma3_text")[0], "x")
    assert (gemma3.rope_theta, gemma3.rope_local_theta) == (1e6, 10000.0)
    assert (gemma3.full_every, gemma3.norm_at, gemma3.qk_norm) == (6, "both", "head")
    assert gemma3.attention_softcap is None


def test_the_published_gemma3_config_leaves_most_out():
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    model = from_config({"model_type": "gemma3", "text_config": text}, "gemma3-4b")
    preset = presets.model("gemma3-4b")
    assert model.vocab == 262208
    assert model.rope_scaling == preset.rope_scaling
    assert (model.window, model.full_every, model.head_dim) == (1024, 6, 256)
    # 64 padded rows of the table apart, it is the preset.
    assert parameter_count(model) - parameter_count(preset) == 64 * 2560


LLAMA31 = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
DEEPSEEK = transformers.DeepseekV3Config().to_dict()
SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0, "rope_scaling": SCALING},
        {"rope_parameters": SCALING | {"rope_theta": 500000.0}},
        {
            "rope_theta": 500000.0,
            "rope_scaling": {"type" if k == "rope_type" else k: v for k, v in SCALING.items()},
        },
    ],
)
def test_both_spellings_of_rope_scaling(rope):
    assert from_config(LLAMA31 | rope, "llama3.1-8b") == presets.model("llama3.1-8b")


def test_deepseek_v3_is_the_preset():
    config = transformers.DeepseekV3Config().to_dict()
    config["rope_parameters"] = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    }
    model = from_config(config | {"max_position_embeddings": 131072}, "deepseek-v3")
    preset = presets.model("deepseek-v3")
    assert model == preset
    yarn = 0.1 * math.log(40) + 1
    assert preset.attention_scale == pytest.approx(192**-0.5 * yarn**2, rel=1e-15)


def test_gpt_oss_is_the_preset():
    config = transformers.GptOssConfig().to_dict()
    assert from_config(config, "gpt-oss-120b") == presets.model("gpt-oss-120b")
    assert presets.model("gpt-oss-20b").rope_scaling == RopeScaling(
        "yarn", 32.0, 4096, 1.0, 32.0, truncate=False
    )


def test_gpt2_is_the_preset():
    assert from_config(transformers.GPT2Config().to_dict(), "gpt2") == presets.model("gpt2")


@pytest.mark.parametrize("style", ["rope_scaling", "rope_parameters"])
def test_config_file(tmp_path, style):
    folder = tmp_path / "Llama-3.1-8B"
    folder.mkdir()
    rope = {"rope_theta": 500000.0, "rope_scaling": SCALING}
    if style == "rope_parameters":
        rope = {"rope_parameters": SCALING | {"rope_theta": 500000.0}}
    (folder / "config.json").write_text(json.dumps(LLAMA31 | rope))
    for path in (folder, folder / "config.json"):
        model = presets.model(str(path))
        assert model.name == "Llama-3.1-8B"
        assert parameter_count(model) == 8_030_261_248


def findings(changes, base=LLAMA31):
    with pytest.raises(UserError) as caught:
        from_config({k: v for k, v in (base | changes).items() if v != "gone"}, "x")
    assert all("\n" not in f.line() for f in caught.value.findings)
    return {f.where.removeprefix("config."): f for f in caught.value.findings}


def test_unknown_architecture():
    assert findings({"model_type": "lama"})["model_type"].nearest == "llama"
    assert findings({"model_type": "qwen2_vl"})["model_type"].nearest == "qwen2"
    assert findings({"model_type": 7})["model_type"].nearest is None
    assert findings({"model_type": ["llama"]})["model_type"].nearest is None


def test_everything_wrong_at_once():
    wrong = {
        "hidden_size": "gone",
        "vocab_size": "many",
        "num_hidden_layers": -1,
        "hidden_act": "silo",
        "partial_rotary_factor": 0.5,
    }
    found = findings(wrong)
    assert found.keys() == {
        "hidden_size",
        "vocab",
        "layers",
        "hidden_act",
        "partial_rotary_factor",
    }
    assert found["hidden_act"].nearest == "silu"


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"hidden_size": 4097}, "num_attention_heads"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": 5}, "rope_scaling"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"sliding_window": "wide"}, "sliding_window"),
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, "layer_types"),
        ({"sliding_window": 8, "layer_types": ["chunked_attention"] * 32}, "layer_types"),
        ({"sliding_window": 8, "layer_types": 5}, "layer_types"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8,
          "max_window_layers": 3}, "layer_types"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3},
         "num_experts_per_tok"),
        ({"model_type": "mixtral", "num_local_experts": 2}, "num_experts_per_tok"),
        ({"model_type": "deepseek_v3"}, "kv_lora_rank"),
        (DEEPSEEK | {"n_group": 3}, "n_group"),
        (DEEPSEEK | {"topk_group": 9}, "topk_group"),
        (DEEPSEEK | {"topk_group": 1, "num_experts_per_tok": 40}, "num_experts_per_tok"),
        (DEEPSEEK | {"routed_scaling_factor": -1.0}, "scaling"),
        ({"model_type": "gpt_oss", "swiglu_limit": 5.0}, "swiglu_limit"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv"),
        ({"model_type": "deepseek_v2", "norm_topk_prob": True}, "norm_topk_prob"),
        ({"model_type": "deepseek_v2", "scoring_func": "sigmoid"}, "scoring_func"),
        ({"model_type": "deepseek_v2", "topk_method": "noaux_tc"}, "topk_method"),
        (DEEPSEEK | {"topk_method": "greedy"}, "topk_method"),
    ],
)  # fmt: skip
def test_refused(changes, where):
    assert where in findings(changes)


@pytest.mark.parametrize("value", [None, -1, 0, 1.5, "x", [], {}, True, 10**40, float("nan")])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_nonsense_is_a_finding_and_no_traceback(kind, value):
    config, _ = library(kind)
    for key in config.keys() - {"model_type"}:
        try:
            from_config(config | {key: value}, "x")
        except UserError as wrong:
            assert wrong.findings  # noqa: PT017


@pytest.mark.parametrize("value", [None, -1, 0, 1.5, "x", [], {}, True, 10**40, float("nan")])
@pytest.mark.parametrize("kind", ["llama3", "yarn", "linear"])
def test_nonsense_in_rope_is_a_finding_and_no_traceback(kind, value):
    whole = SCALING | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    whole |= {"rope_type": kind, "attention_factor": 1.0, "partial_rotary_factor": 1.0}
    whole |= {"full_attention": {}, "sliding_attention": {}}
    deepseek = transformers.DeepseekV3Config().to_dict()
    for base in (LLAMA31, deepseek):
        for key in whole:
            for rope in ({"rope_scaling": whole | {key: value}}, {"rope_parameters": {key: value}}):
                try:
                    from_config(base | rope, "x")
                except UserError as wrong:
                    assert wrong.findings  # noqa: PT017
