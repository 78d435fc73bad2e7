"""Hugging Face folders against what `transformers` and `safetensors` read and write."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

import test_models
import test_models_moe
from plait.models.folder import INDEX, read_file, read_folder, write_file, write_folder
from plait.models.hf import from_hf
from plait.models.random import initial
from plait.spec.findings import UserError
from plait.spec.parameters import parameters

CASES = {n: test_models for n in test_models.CASES} | {
    n: test_models_moe for n in test_models_moe.CASES
}
TENSORS = {
    "b.weight": torch.arange(6, dtype=torch.float32).view(2, 3),
    "a": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),
    "scalar": torch.tensor(3.0, dtype=torch.float64),
    "empty": torch.zeros(0, 4),
}


@pytest.fixture(scope="module")
def hf():
    import transformers

    return transformers


def started(model):
    zero = {p.name: (0,) * len(p.shape) for p in parameters(model)}
    return {p.name: initial(p, 5, zero[p.name], p.shape, torch.float32) for p in parameters(model)}


@pytest.mark.parametrize("name", CASES)
def test_what_the_library_saves_is_read(hf, name, tmp_path):
    home = CASES[name]
    theirs, model = home.peer(hf, name), home.model_of(name)
    theirs.save_pretrained(tmp_path / name)
    read, state = read_folder(tmp_path / name)
    assert read == model
    expected = from_hf({n: x for n, x in theirs.state_dict().items() if "inv_freq" not in n}, model)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[n], expected[n]) for n in state)


@pytest.mark.parametrize("name", CASES)
def test_the_library_reads_what_is_written(hf, name, tmp_path):
    home = CASES[name]
    model = home.model_of(name)
    state = started(model)
    write_folder(tmp_path / name, model, state, largest=40_000)
    again, back = read_folder(tmp_path / name)
    assert again == model
    assert back.keys() == state.keys()
    assert all(torch.equal(back[n], state[n]) for n in state)
    assert (tmp_path / name / INDEX).exists()
    theirs, report = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path / name, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    loaded = from_hf({n: x for n, x in theirs.state_dict().items() if "inv_freq" not in n}, model)
    assert all(torch.equal(loaded[n], state[n]) for n in state)


def test_files_are_those_of_safetensors(tmp_path):
    write_file(tmp_path / "ours", TENSORS)
    save_file(TENSORS, tmp_path / "theirs")
    for read, file in ((load_file, "ours"), (read_file, "theirs"), (read_file, "ours")):
        found = read(tmp_path / file)
        assert found.keys() == TENSORS.keys()
        for name, x in TENSORS.items():
            assert found[name].dtype == x.dtype
            assert torch.equal(found[name], x)


def test_reading_leaves_the_file_alone(tmp_path):
    write_file(tmp_path / "x", TENSORS)
    before = (tmp_path / "x").read_bytes()
    read_file(tmp_path / "x")["b.weight"].add_(1)
    assert (tmp_path / "x").read_bytes() == before


def header(entry, body=b"\0" * 16):
    text = json.dumps(entry).encode()
    return struct.pack("<Q", len(text)) + text + body


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{x",
        header({"x": 5}),
        header({"x": {"dtype": "F32", "shape": [4]}}),
        header({"x": {"dtype": "F33", "shape": [4], "data_offsets": [0, 16]}}),
        header({"x": {"dtype": "F32", "shape": [4], "data_offsets": [4, 20]}}),
        header({"x": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}),
        header({"x": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}),
        header({"x": {"dtype": "F32", "shape": [True, 4], "data_offsets": [0, 16]}}),
        header({"x": {"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]}}),
        header({"x": {"dtype": "F32", "shape": 4, "data_offsets": [0, 16]}}),
        header({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 16]}}),
    ],
)
def test_nonsense_is_a_finding_and_no_traceback(content, tmp_path):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UserError):
        read_file(tmp_path / "x")


def test_what_is_not_at_a_multiple_of_its_size_is_read(tmp_path):
    entry = {"x": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]}}
    body = b"\0" + struct.pack("<ff", 1.0, 2.0)
    (tmp_path / "x").write_bytes(header(entry, body))
    assert read_file(tmp_path / "x")["x"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("files", [{}, {"w": "../secret"}, {"w": 5}, {"w": "gone.safetensors"}])
def test_an_index_names_files_of_its_folder(files, tmp_path):
    model = test_models.model_of("llama2")
    write_folder(tmp_path, model, started(model))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    with pytest.raises(UserError):
        read_folder(tmp_path)


def test_models_that_no_config_can_say_are_refused(tmp_path):
    model = test_models.model_of("llama2")
    odd = type(model)(**{**vars(model), "embed_scale": True, "norm_eps": 1e-3})
    with pytest.raises(UserError) as caught:
        write_folder(tmp_path / "x", odd, started(odd))
    assert [f.where for f in caught.value.findings] == ["model.embed_scale"]
    assert not (tmp_path / "x").exists()
