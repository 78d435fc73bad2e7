"""Mixtures of experts and latent attention against `transformers` with the same weights."""

import pytest
import torch
import torch.nn.functional as F

from plait.models.hf import from_hf, to_hf
from plait.models.moe import mixtures
from plait.models.transformer import Transformer
from plait.spec import presets
from plait.spec.findings import UserError
from plait.spec.huggingface import from_config
from plait.spec.model import MLA, Model, MoE, RopeScaling
from plait.spec.parameters import parameters
from test_models import (
    BATCH,
    OURS,
    SEQ,
    THEIRS,
    Raised,
    assert_near,
    batch,
    run_ours,
    run_theirs,
)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-6,  # of the norms of latents it is fixed
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
MLA_OURS = {"kv_heads": 4, "head_dim": 20, "norm_eps": 1e-6, "mla": MLA(24, 12, 8, 10)}

#: name -> (their class, their configuration, our model)
CASES = {
    "mixtral": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        {"moe": MoE(4, 2, 96), "rope_theta": 1e6},
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "num_hidden_layers": 3,
            "decoder_sparse_step": 2,
        },
        {
            "layers": 3,
            "head_dim": 32,
            "qk_norm": "head",
            "norm_eps": 1e-5,
            "moe": MoE(8, 3, 24, every=2),
        },
    ),
    "olmoe": (
        "Olmoe",
        {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24},
        {"ffn": 24, "qk_norm": "full", "moe": MoE(8, 3, 24, normalize=False)},
    ),
    "deepseek-v2-lite": (
        "DeepseekV2",
        LATENT | {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
        MLA_OURS
        | {
            "rope_scaling": RopeScaling("yarn", 4.0, 64, 1.0, 8.0, 1.0),
            "attention_scale": 20**-0.5 * (0.1 * 0.707 * 1.3862943611198906 + 1) ** 2,
            "moe": MoE(8, 3, 20, shared=2, first_dense=1, normalize=False),
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        LATENT
        | {
            "q_lora_rank": 16,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
        },
        MLA_OURS
        | {
            "mla": MLA(24, 12, 8, 10, q_rank=16),
            "moe": MoE(
                8, 3, 20, 2, first_dense=1, normalize=False, scaling=16.0, groups=4, topk_groups=2
            ),
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        LATENT
        | {
            "q_lora_rank": 16,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
        MLA_OURS
        | {
            "mla": MLA(24, 12, 8, 10, q_rank=16),
            "rope_scaling": RopeScaling("yarn", 4.0, 64, 1.0, 8.0, 1.0),
            "attention_scale": 20**-0.5 * (0.1 * 1.3862943611198906 + 1) ** 2,
            "moe": MoE(
                8,
                3,
                20,
                2,
                first_dense=1,
                score="sigmoid",
                correction=True,
                scaling=2.5,
                groups=4,
                topk_groups=2,
                group_score="top2",
            ),
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "rope_parameters": YARN | {"truncate": False},
            "attn_implementation": "eager",  # the fused ones have no sinks
        },
        {
            "mlp": "swiglu-clamped",
            "window": 7,
            "full_every": 2,
            "qkv_bias": True,
            "o_bias": True,
            "sinks": True,
            "rope_scaling": RopeScaling("yarn", 4.0, 64, 1.0, 8.0, truncate=False),
            "moe": MoE(4, 2, 96, bias=True, router_bias=True, topk_first=True),
        },
    ),
}


@pytest.fixture(scope="module")
def hf():
    import transformers

    return transformers


def model_of(name: str) -> Model:
    return Model(name=name, **(OURS | CASES[name][2]))


def peer(hf, name: str) -> torch.nn.Module:
    """Their model with random weights in torch's default dtype."""
    kind, config, _ = CASES[name]
    theirs = getattr(hf, f"{kind}ForCausalLM")(getattr(hf, f"{kind}Config")(**(THEIRS | config)))
    theirs.set_experts_implementation("eager")  # torch's grouped products have no float64
    generator = torch.Generator().manual_seed(1)
    corrections = [b for n, b in theirs.named_buffers() if "correction" in n]
    with torch.no_grad():
        for tensor in (*theirs.parameters(), *corrections):
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            norm = tensor.dim() == 1 and tensor.shape[0] not in (4, 8)
            tensor.copy_((1.0 if norm else 0.0) + 0.15 * noise)
            if name == "gpt-oss" and tensor.dim() == 3:
                tensor.mul_(8.0)  # some inputs of the activation must be clamped
    return theirs


def compare(ours, theirs, state, model, relative, absolute):
    assert_near(ours[0], theirs[0], relative)
    assert_near(ours[1], theirs[1], relative)
    learned = {n for n in state if "correction" not in n}
    grads = {n: g for n, g in theirs[2].items() if g is not None}
    assert grads.keys() == learned
    grads |= {n: torch.zeros_like(state[n]) for n in state.keys() - learned}
    expected = from_hf(grads, model)
    assert ours[2].keys() == expected.keys()
    largest = max(grad.abs().max().item() for grad in expected.values())
    for name, grad in ours[2].items():
        if not name.endswith("correction"):
            assert_near(grad, expected[name], relative, absolute * largest, name)


def weights(theirs) -> dict[str, torch.Tensor]:
    return {n: x for n, x in theirs.state_dict().items() if not n.endswith("inv_freq")}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers_in_float64(hf, name):
    tokens, targets = batch()
    torch.set_default_dtype(torch.float64)
    try:
        with Raised():
            theirs = peer(hf, name)
            expected = run_theirs(theirs, tokens, targets)
    finally:
        torch.set_default_dtype(torch.float32)
    model, state = model_of(name), weights(theirs)
    ours = run_ours(model, from_hf(state, model), tokens, targets, torch.float64)
    compare(ours, expected, state, model, 1e-9, 1e-12)


@pytest.mark.parametrize("name", CASES)
def test_configs_say_the_same(hf, name):
    kind, config, _ = CASES[name]
    said = getattr(hf, f"{kind}Config")(**(THEIRS | config)).to_dict()
    assert from_config(said, name) == model_of(name)


@pytest.mark.parametrize("name", CASES)
def test_files_go_there_and_back(hf, name, tmp_path):
    """What the library saves is read, and what is written is what it saved."""
    from safetensors.torch import load_file

    theirs, model = peer(hf, name), model_of(name)
    theirs.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    ours = from_hf(saved, model)
    memory = from_hf(weights(theirs), model)
    assert ours.keys() == memory.keys() == {p.name for p in parameters(model)}
    assert all(torch.equal(ours[n], memory[n]) for n in ours)
    back = to_hf(ours, model)
    assert back.keys() == saved.keys()
    assert all(torch.equal(back[n], saved[n]) for n in saved)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_are_those_of_the_table(name, device):
    model = model_of(name)
    with torch.device(device):
        built = Transformer(model)
    found = {n: tuple(p.shape) for n, p in built.named_parameters()}
    assert found == {p.name: p.shape for p in parameters(model)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_runs_on_fake_tensors(name, dtype):
    """With a given table of who gets how many: only that depends on data."""
    from torch._subclasses import FakeTensorMode

    torch.set_default_dtype(dtype)
    try:
        with FakeTensorMode():
            built = Transformer(model_of(name))
            tokens = torch.zeros(BATCH, SEQ, dtype=torch.int64)
            for moe in mixtures(built):
                share, rest = divmod(BATCH * SEQ * moe.moe.topk, moe.moe.experts)
                given = [share + (e < rest) for e in range(moe.moe.experts)]
                moe.experts.count = lambda index, given=given: given
            built(tokens, tokens).backward()
            assert all(p.grad.shape == p.shape for p in built.parameters())
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", CASES)
def test_half_precision_is_as_near_as_its_rounding(name):
    model, (tokens, targets) = model_of(name), batch()
    torch.manual_seed(0)
    whole = Transformer(model)
    with torch.no_grad():
        for p in whole.parameters():
            p.copy_(p.bfloat16())
    half = Transformer(model).bfloat16()
    half.load_state_dict(whole.state_dict())
    loss = half(tokens, targets)
    loss.backward()
    assert {p.grad.dtype for p in half.parameters()} == {torch.bfloat16}
    assert loss.dtype == torch.float32
    assert abs(loss.item() - whole(tokens, targets).item()) <= 2**-7 * loss.item()


def test_latent_attention_takes_the_fused_kernel(monkeypatch):
    """Whose values are as wide as its keys, unlike those of latent attention."""
    seen, fused = [], F.scaled_dot_product_attention

    def spy(*args, **kwargs):
        y = fused(*args, **kwargs)
        seen.append(y.grad_fn.name())
        return y

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    Transformer(model_of("deepseek-v3"))(*batch())
    assert set(seen) == {"ScaledDotProductFlashAttentionForCpuBackward0"}


def test_a_layer_for_multi_token_prediction_is_left_out(hf):
    model = model_of("deepseek-v3")
    state = weights(peer(hf, "deepseek-v3"))
    more = state | {f"model.layers.{model.layers}.eh_proj.weight": torch.zeros(2, 2)}
    assert from_hf(more, model).keys() == {p.name for p in parameters(model)}
    with pytest.raises(UserError):
        from_hf(state | {f"model.layers.{model.layers + 1}.x": torch.zeros(2)}, model)
    mixtral = model_of("mixtral")
    state = weights(peer(hf, "mixtral")) | {"model.layers.2.eh_proj.weight": torch.zeros(2, 2)}
    with pytest.raises(UserError):
        from_hf(state, mixtral)


def test_the_preset_of_mixtral_routes_as_its_config_says(hf):
    said = from_config(hf.MixtralConfig().to_dict(), "mixtral-8x7b")
    assert said.moe == presets.model("mixtral-8x7b").moe
