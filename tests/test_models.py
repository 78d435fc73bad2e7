"""The transformer against the `transformers` library with the same weights.

That library computes norms and rotary tables in float32 whatever the dtype of the model. For
comparison in float64 its casts to float32 are raised to float64 (`Raised`), nothing else.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from plait.models.hf import from_hf, to_hf
from plait.models.transformer import Transformer
from plait.spec.findings import UserError
from plait.spec.model import Model, RopeScaling
from plait.spec.parameters import parameters

BATCH, SEQ, VOCAB = 2, 40, 67

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 5000.0}

#: Sizes in their words and in ours.
THEIRS = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,  # a padding row would get no gradient
}
OURS = {
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 96,
    "vocab": VOCAB,
    "seq": 128,
    "head_dim": 16,
}
GEMMA = {"mlp": "geglu", "norm_offset": True, "embed_scale": True}

#: name -> (their class, their configuration, our model)
CASES = {
    "llama2": ("Llama", {"num_key_value_heads": 4}, {"kv_heads": 4}),
    "llama3": (
        "Llama",
        {"rope_parameters": LLAMA3},
        {"rope_scaling": RopeScaling("llama3", 8.0, 32, 1.0, 4.0)},
    ),
    "llama3-tied": (
        "Llama",
        {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
        {"rope_scaling": RopeScaling("llama3", 8.0, 32, 1.0, 4.0), "tied": True},
    ),
    "llama-biases": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True},
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    ),
    "multi-query": ("Llama", {"num_key_value_heads": 1}, {"kv_heads": 1}),
    "linear": ("Llama", {"rope_parameters": LINEAR}, {"rope_scaling": RopeScaling("linear", 4.0)}),
    "yarn": (
        "Llama",
        {"rope_parameters": YARN},
        {"rope_scaling": RopeScaling("yarn", 4.0, 64, 1.0, 8.0)},
    ),
    "yarn-factor": (
        "Llama",
        {"rope_parameters": YARN | {"attention_factor": 0.8}},
        {"rope_scaling": RopeScaling("yarn", 4.0, 64, 1.0, 8.0, 0.8)},
    ),
    "mistral": ("Mistral", {"sliding_window": 7, "head_dim": 24}, {"window": 7, "head_dim": 24}),
    "mistral-long-window": ("Mistral", {"sliding_window": 64}, {"window": 64}),
    "qwen2.5": (
        "Qwen2",
        {"rope_parameters": PLAIN, "tie_word_embeddings": True},
        {"rope_theta": 5000.0, "qkv_bias": True, "tied": True},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}, {"qk_norm": "head", "head_dim": 32}),
    "olmo2": ("Olmo2", {}, {"qk_norm": "full", "norm_at": "output"}),
    "gemma": ("Gemma", {"head_dim": 32}, GEMMA | {"head_dim": 32, "tied": True}),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 25,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {"sliding_attention": PLAIN, "full_attention": LINEAR},
        },
        GEMMA
        | {
            "layers": 3,
            "window": 7,
            "full_every": 3,
            "norm_at": "both",
            "qk_norm": "head",
            "attention_scale": 0.2,
            "logit_softcap": 3.0,
            "rope_scaling": RopeScaling("linear", 4.0),
            "rope_local_theta": 5000.0,
            "tied": True,
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": 7,
            "query_pre_attn_scalar": 25,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "attn_implementation": "eager",  # the fused ones leave the cap out
        },
        GEMMA
        | {
            "window": 7,
            "full_every": 2,
            "norm_at": "both",
            "attention_scale": 0.2,
            "attention_softcap": 2.0,
            "logit_softcap": 3.0,
            "tied": True,
        },
    ),
    "gpt2": (
        "GPT2",
        {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        {
            "kv_heads": 4,
            "ffn": 256,
            "mlp": "gelu-tanh",
            "norm": "layer",
            "positions": "learned",
            "qkv_bias": True,
            "o_bias": True,
            "mlp_bias": True,
            "tied": True,
        },
    ),
    "gpt2-untied": (
        "GPT2",
        {
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "activation_function": "gelu",
            "tie_word_embeddings": False,
        },
        {
            "kv_heads": 4,
            "ffn": 256,
            "mlp": "gelu",
            "norm": "layer",
            "positions": "learned",
            "qkv_bias": True,
            "o_bias": True,
            "mlp_bias": True,
        },
    ),
}


class Raised(TorchFunctionMode):
    """Casts to float32 become casts to float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def raised(x):
            return torch.float64 if x is torch.float32 else x

        kwargs = {k: raised(v) for k, v in (kwargs or {}).items()}
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        return function(*map(raised, args), **kwargs)


@pytest.fixture(scope="module")
def hf():
    import transformers

    return transformers


def model_of(name: str) -> Model:
    return Model(name=name, **(OURS | CASES[name][2]))


def peer(hf, name: str) -> torch.nn.Module:
    """Their model with random weights in torch's default dtype."""
    kind, config, _ = CASES[name]
    if kind == "GPT2":
        sizes = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
        made = hf.GPT2Config(**sizes, **config)
        theirs = hf.GPT2LMHeadModel(made)
    else:
        made = getattr(hf, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")
        theirs = getattr(hf, f"{kind}ForCausalLM")(made(**(THEIRS | config)))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            # Norms keep the size that they start with, 0 or 1; matrices are made anew.
            start = parameter if parameter.dim() == 1 else 0.0
            parameter.copy_(start + 0.15 * noise)
    return theirs


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
    targets = torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
    targets[0, 3:9] = -1
    return tokens, targets


def run_theirs(theirs, tokens, targets):
    logits = theirs(input_ids=tokens, use_cache=False).logits.reshape(-1, VOCAB)
    loss = F.cross_entropy(logits, targets.reshape(-1), ignore_index=-1, reduction="sum")
    loss.backward()
    return logits.detach(), loss.detach(), {n: p.grad for n, p in theirs.named_parameters()}


def run_ours(model, state, tokens, targets, dtype):
    ours = Transformer(model).to(dtype)
    ours.load_state_dict(state, strict=not model.tied)
    loss = ours(tokens, targets)
    loss.backward()
    with torch.no_grad():
        logits = ours(tokens)
    return logits, loss.detach(), {n: p.grad for n, p in ours.named_parameters()}


def compare(ours, theirs, model, relative, absolute):
    assert_near(ours[0], theirs[0], relative)
    assert_near(ours[1], theirs[1], relative)
    expected = from_hf(theirs[2], model)
    assert ours[2].keys() == expected.keys()
    # Some gradients are zero but for rounding (the bias of k shifts all scores of a query alike).
    largest = max(grad.abs().max().item() for grad in expected.values())
    for name, grad in ours[2].items():
        assert_near(grad, expected[name], relative, absolute * largest, name)


def assert_near(ours, theirs, relative, absolute=0.0, name=""):
    difference = (ours.double() - theirs.double()).abs().max().item()
    assert difference <= relative * theirs.abs().max().item() + absolute, (name, difference)


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
    model = model_of(name)
    state = from_hf(theirs.state_dict(), model)
    compare(run_ours(model, state, tokens, targets, torch.float64), expected, model, 1e-9, 1e-12)


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers_in_float32(hf, name):
    tokens, targets = batch()
    theirs = peer(hf, name)
    expected = run_theirs(theirs, tokens, targets)
    model = model_of(name)
    state = from_hf(theirs.state_dict(), model)
    compare(run_ours(model, state, tokens, targets, torch.float32), expected, model, 2e-5, 1e-7)


@pytest.mark.parametrize("name", CASES)
def test_weights_go_there_and_back(hf, name):
    theirs, model = peer(hf, name).state_dict(), model_of(name)
    back = to_hf(from_hf(theirs, model), model)
    missing = theirs.keys() - back.keys()
    assert missing <= ({"lm_head.weight"} if model.tied else set())
    for key, value in back.items():
        assert torch.equal(value, theirs[key]), key


def test_weights_that_do_not_fit_are_all_named(hf):
    model = model_of("llama3")
    state = peer(hf, "llama3").state_dict()
    state["model.extra"] = state.pop("model.norm.weight")
    state["lm_head.weight"] = torch.zeros(3, 64)
    with pytest.raises(UserError) as caught:
        from_hf(state, model)
    assert {f.where for f in caught.value.findings} == {
        "model.norm.weight",
        "model.extra",
        "lm_head.weight",
    }


def test_bare_checkpoints_are_read(hf):
    model = model_of("gpt2")
    full = peer(hf, "gpt2").state_dict()
    bare = {n.removeprefix("transformer."): x for n, x in full.items() if n != "lm_head.weight"}
    ours = from_hf(bare, model)
    assert ours.keys() == {p.name for p in parameters(model)}


# ------------------------------------------------------------------------------------------
# Without the library


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_are_those_of_the_table(name, device):
    model = model_of(name)
    with torch.device(device):
        built = Transformer(model)
    found = {n: tuple(p.shape) for n, p in built.named_parameters()}
    assert found == {p.name: p.shape for p in parameters(model)}


def test_stages_hold_the_parameters_of_the_whole():
    model = model_of("llama3").with_layers(4)
    first = Transformer(model, layers=[0, 1], head=False)
    last = Transformer(model, layers=[2, 3], embed=False)
    names = [n for part in (first, last) for n, _ in part.named_parameters()]
    assert names == [p.name for p in parameters(model)]


def test_stages_compute_what_the_whole_computes():
    model = model_of("gemma3").with_layers(4)
    torch.manual_seed(0)
    whole = Transformer(model)
    tokens, targets = batch()
    first = Transformer(model, layers=[0, 1], head=False)
    last = Transformer(model, layers=[2, 3], embed=False)
    first.load_state_dict(whole.state_dict(), strict=False)
    last.load_state_dict(whole.state_dict(), strict=False)
    x = first.embed(tokens.reshape(-1), first.context(BATCH, SEQ))
    for part in (first, last):
        ctx = part.context(BATCH, SEQ)
        for layer in part.layers.values():
            x = layer(x, ctx)
    assert torch.equal(last.head(x, ctx, targets.reshape(-1)), whole(tokens, targets))


def test_tied_weights_are_one_parameter():
    built = Transformer(model_of("llama3-tied"))
    assert built.head.output.weight is built.embed.tokens.weight


def test_attention_takes_the_fused_kernel(monkeypatch):
    seen = []
    fused = F.scaled_dot_product_attention

    def spy(*args, **kwargs):
        y = fused(*args, **kwargs)
        seen.append(y.grad_fn.name())
        return y

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    for name in ("llama3", "mistral", "gemma3"):
        Transformer(model_of(name))(*batch())
    assert set(seen) == {"ScaledDotProductFlashAttentionForCpuBackward0"}


def test_half_precision_is_as_near_as_its_rounding():
    model = model_of("qwen3")
    torch.manual_seed(0)
    whole = Transformer(model)
    with torch.no_grad():
        for p in whole.parameters():
            p.copy_(p.bfloat16())
        tokens, targets = batch()
        half = Transformer(model).bfloat16()
        half.load_state_dict(whole.state_dict())
        expected = whole(tokens, targets)
        loss = half(tokens, targets)
    assert loss.dtype == torch.float32
    assert abs(loss - expected) <= 2**-7 * expected


def test_runs_on_fake_tensors():
    from torch._subclasses import FakeTensorMode

    for name in ("gemma3", "gpt2", "qwen3"):
        with FakeTensorMode():
            built = Transformer(model_of(name))
            tokens = torch.zeros(BATCH, SEQ, dtype=torch.int64)
            built(tokens, tokens).backward()
            assert all(p.grad.shape == p.shape for p in built.parameters())


def test_half_precision_gradients_have_the_dtype_of_the_weights():
    built = Transformer(model_of("gemma3")).bfloat16()
    built(*batch()).backward()
    assert {p.grad.dtype for p in built.parameters()} == {torch.bfloat16}


def test_recomputing_gives_the_same_gradients():
    from torch.utils.checkpoint import checkpoint

    (tokens, targets), grads = batch(), []
    for again in (False, True):
        built = dropping(0.3)
        ctx = built.context(BATCH, SEQ)
        x = built.embed(tokens.reshape(-1), ctx)
        for layer in built.layers.values():
            x = checkpoint(layer, x, ctx, use_reentrant=False) if again else layer(x, ctx)
        built.head(x, ctx, targets.reshape(-1)).backward()
        grads.append([p.grad for p in built.parameters()])
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"positions": "alibi"}, ["ALiBi"]),
    ],
)
def test_what_cannot_be_trained_yet_is_named(given, words):
    with pytest.raises(UserError) as caught:
        Transformer(Model(name="odd", **(OURS | given)))
    lines = [f.line() for f in caught.value.findings]
    assert len(lines) == len(words)
    for word in words:
        assert any(word in line for line in lines)


# ------------------------------------------------------------------------------------------
# Dropout


def dropping(p: float) -> Transformer:
    torch.manual_seed(0)
    model = Model(name="dropping", **(OURS | {"dropout": p}))
    return Transformer(model).double()


def test_dropout_depends_on_the_sample_and_not_on_the_batch():
    built, (tokens, targets) = dropping(0.3), batch()
    both = built(tokens, targets, torch.tensor([5, 9]))
    one = built(tokens[:1], targets[:1], torch.tensor([5]))
    other = built(tokens[1:], targets[1:], torch.tensor([9]))
    torch.testing.assert_close(one + other, both, rtol=1e-12, atol=0)
    assert not torch.isclose(built(tokens, targets, torch.tensor([6, 9])), both)


def test_dropout_is_off_in_evaluation_and_at_zero():
    tokens, targets = batch()
    assert torch.equal(dropping(0.3).eval()(tokens, targets), dropping(0.0)(tokens, targets))


def test_dropout_keeps_the_mean_and_drops_the_share():
    dropout = dropping(0.25).layers["1"].mlp_dropout
    assert dropout.site == "layers.1.mlp_dropout"
    x = torch.ones(2000, 64, dtype=torch.float64)
    y = dropout(x, torch.arange(2000))
    # 128000 draws: five standard deviations of the share are 0.006.
    assert abs((y == 0).double().mean() - 0.25) < 0.006
    assert set(y.unique().tolist()) == {0.0, 4 / 3}
    dropout.seed = 1
    assert not torch.equal(dropout(x, torch.arange(2000)), y)
