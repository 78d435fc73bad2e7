"""Names of the Hugging Face hub, and the models that they are of."""

import pytest

from plait.dialects.huggingface_names import named, nearest_name, repository_of
from plait.spec import presets
from plait.spec.jobfile import draft


@pytest.mark.parametrize("preset", presets.model_names())
def test_a_repository_is_of_its_preset(preset):
    repository = repository_of(preset)
    if repository is not None:
        known = named(repository)
        assert known.fields == {"model": preset}
        assert known.exact


@pytest.mark.parametrize(
    ("name", "preset", "weights"),
    [
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-v3", "fp8-block"),
        ("nvidia/DeepSeek-R1-FP4", "deepseek-v3", "nvfp4-experts"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "llama3.1-70b", None),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "llama3.3-70b", "fp8"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "qwen3-235b-a22b", "fp8-block"),
        ("TheBloke/Mixtral-8x7B-Instruct-v0.1-AWQ", "mixtral-8x7b", "awq"),
        ("hugging-quants/Meta-Llama-3.1-405B-Instruct-GPTQ-INT4", "llama3.1-405b", "gptq"),
        ("openai/gpt-oss-120b", "gpt-oss-120b", "mxfp4-experts"),
        ("unsloth/gpt-oss-20b-BF16", "gpt-oss-20b", None),
        ("/models/Llama-3.1-8B-Instruct/", "llama3.1-8b", None),
        (
            "/models/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/0123",
            "qwen3-8b",
            None,
        ),
    ],
)
def test_tunings_and_dtypes_do_not_change_the_shape(name, preset, weights):
    known = named(name)
    assert (known.fields["model"], known.weights, known.exact) == (preset, weights, True)


def test_what_differs_from_a_preset_is_said():
    assert named("mistralai/Mistral-7B-Instruct-v0.3").fields["model.vocab"] == 32768
    assert named("Qwen/Qwen2.5-72B-Instruct-AWQ").fields["model.ffn"] == 29696
    opt = draft("plan", None, named("facebook/opt-125m").fields | {"ranks": 1}).job.model
    assert (opt.layers, opt.hidden, opt.vocab) == (12, 768, 50272)


@pytest.mark.parametrize(
    "name",
    ["", "/", "$MODEL", "deepseek-ai/DeepSeek-V3.2-Exp", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
     "nvidia/Llama-3_3-Nemotron-Super-49B-v1", "x" * 5000, "someone/else"],
)  # fmt: skip
def test_nothing_is_guessed(name):
    assert named(name) is None
    nearest_name(name)


def test_a_tuned_model_is_known_by_the_end_of_its_name():
    known = named("NousResearch/Hermes-3-Llama-3.1-8B")
    assert (known.fields, known.exact) == ({"model": "llama3.1-8b"}, False)
