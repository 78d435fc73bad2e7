"""Primus: hostile input, and the commands of its page."""

import json
import shlex
from pathlib import Path

import pytest

from plait.cli.main import main
from plait.dialects import primus
from plait.dialects.launch import Told
from plait.dialects.primus.config import read_experiment
from plait.dialects.source import source_of
from plait.spec.findings import UserError
from primus_files import checked, errors, experiment, source

# ------------------------------------------------------------------------------------------
# Hostile input


@pytest.mark.parametrize(
    "text",
    [
        "", "just words", "- a\n- b\n", "modules: 3\n", "modules: {}\n",
        "modules:\n  pre_trainer: 3\n",
        "modules:\n  pre_trainer:\n    framework: megatron\n    overrides: 3\n", "a: [1\n",
        "modules:\n  - pre_trainer\n", "a: &x [*x]\n", "[" * 2000, "modules: null\n",
        "modules:\n  pre_trainer:\n    framework: [megatron]\n",
        "modules:\n  pre_trainer:\n    framework: null\n",
        "extends: /etc/passwd\nmodules: {}\n", "extends: 5\nmodules: {}\n",
    ],
)  # fmt: skip
def test_hostile_files_end_in_one_line(text, tmp_path, capsys):
    file = tmp_path / "exp.yaml"
    file.write_text(text)
    assert main(["explain", "--from", "primus", str(file), "--json"]) == 2
    said = json.loads(capsys.readouterr().out)["errors"]
    assert said
    assert all("\n" not in e["message"] for e in said)


@pytest.mark.parametrize(
    "value",
    ["1" + "0" * 400, ".nan", ".inf", "[1, 2]", "{a: 1}", "null", "-3", "0", "1.5", "'x'",
     "$(rm -rf /)", "${A:${B:2}}", "2020-01-01", "true", "''"],
)  # fmt: skip
@pytest.mark.parametrize(
    "key",
    ["tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size",
     "num_layers", "recompute_layer_ids", "pp_algorithm", "patch_primus_pipeline", "lora",
     "data_parallel_replicate_degree", "expert_model_parallel_size", "turbo_sync_free_moe_stage",
     "num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_layout", "vocab_size",
     "num_seq_splits", "moe_layer_freq", "ckpt_format", "mock_data"],
)  # fmt: skip
def test_hostile_values(key, value, capsys, tmp_path):
    file = tmp_path / "exp.yaml"
    file.write_text(experiment(f"{key}: {value}\npatch_primus_pipeline: true\n{key}: {value}",
                               model="deepseek_v3.yaml"))  # fmt: skip
    assert main(["explain", "--from", "primus", str(file), "--ranks", "8", "--json"]) in (0, 1, 2)
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["../../../etc/passwd", "/etc/passwd", "x" * 5000, "a\0b"])
def test_presets_stay_in_their_tree(name, tmp_path):
    (tmp_path / "primus" / "configs").mkdir(parents=True)
    file = tmp_path / "exp.yaml"
    text = experiment(model=json.dumps(f"{name}.yaml"))
    file.write_text(text)
    try:
        launch = primus.read(source_of([str(file)]), Told())
    except UserError:
        return
    assert "model.layers" not in launch.fields


def test_reading_an_experiment_needs_no_environment(monkeypatch):
    """Variables of whoever asks decide nothing: a file means the same everywhere."""
    monkeypatch.setenv("PRIMUS_TP", "8")
    found = read_experiment(source(experiment("tensor_model_parallel_size: ${PRIMUS_TP:2}")), {})
    assert {s.name: s.value for s in found.said}["tensor_model_parallel_size"] == 2


# ------------------------------------------------------------------------------------------
# Its page


PAGE = Path(__file__).parents[1] / "docs" / "dialects" / "primus.md"


def test_commands_of_the_page(tmp_path, monkeypatch, capsys):
    text = PAGE.read_text()
    (tmp_path / "mixtral.yaml").write_text(text.split("```yaml\n")[1].split("```")[0])
    monkeypatch.chdir(tmp_path)
    commands = text.split("```sh\n")[1].split("```")[0].strip().splitlines()
    assert len(commands) == 4
    for command in commands:
        assert main(shlex.split(command)[1:]) in (0, 1), command
        said = capsys.readouterr()
        assert said.out
        assert "Traceback" not in said.err


def test_example_of_the_page_is_clean():
    text = PAGE.read_text().split("```yaml\n")[1].split("```")[0]
    launch = primus.read(source(text), Told())
    assert launch.fields["layout.schedule"] == "zbv"
    assert not errors(checked(launch, 32))
    assert not launch.unknown()
