"""Primus: experiments over layered presets, and the commands that start them.

Expected values are those of Primus at fd1eeabb; the file that says so stands beside each.
"""

import json

import pytest

from plait.cli.main import main
from plait.dialects import primus
from plait.dialects.flags import Word
from plait.dialects.launch import Told
from plait.dialects.primus.commands import settings_of
from plait.dialects.primus.config import Variables, merge, presets
from plait.dialects.source import source_of
from plait.spec.findings import UserError
from primus_files import HEAD, checked, experiment, named, read, source

# ------------------------------------------------------------------------------------------
# Layers


def test_defaults_of_presets():
    """modules/megatron/{trainer_base,pre_trainer}.yaml, models/megatron/language_model.yaml."""
    launch = read()
    fields = launch.fields
    assert fields["model.name"] == "llama3.1-8b"
    assert fields["layout.micro_batch"] == 2
    # pre_trainer.yaml stands over trainer_base.yaml, which says 128 and 4096.
    assert (fields["train.global_batch"], fields["train.seq_len"]) == (16, 1024)
    assert fields["layout.zero"] == 1
    assert fields["layout.sequence_parallel"] is False
    assert launch.settings.defaults["micro_batch_size"][0] == 2
    assert not launch.unknown()


def test_base_of_presets_is_what_the_guide_says():
    """Second seed, and parallelism-configuration.md: defaults of trainer_base."""
    base = presets("megatron", "modules", "base")
    assert (base["micro_batch_size"], base["global_batch_size"], base["seq_length"]) == (
        2, 128, 4096,
    )  # fmt: skip
    assert presets("megatron", "models", "base")["sequence_parallel"] is True
    assert base["use_distributed_optimizer"] is False
    assert base["pp_algorithm"] == "1f1b-interleaved"


def test_overrides_then_command(tmp_path, monkeypatch):
    file = tmp_path / "exp.yaml"
    file.write_text(experiment("tensor_model_parallel_size: 2\nglobal_batch_size: 32"))
    monkeypatch.chdir(tmp_path)
    words = "primus-cli direct -- train pretrain --config exp.yaml --tensor_model_parallel_size 4"
    launch = primus.read(source_of([f"{words} global_batch_size=64"]), Told())
    assert launch.fields["layout.tp"] == 4
    assert launch.fields["train.global_batch"] == 64
    assert launch.fields["ranks"] == 8  # one node of eight (runner/primus-cli-direct.sh)


def test_module_preset_stands_over_model_preset():
    """`merge_namespace` without override: a key of both has the module's value."""
    launch = primus.read(
        source(experiment("lr: 1.0e-4", config="sft_trainer.yaml", module="post_trainer")), Told()
    )
    assert launch.fields["layout.micro_batch"] == 1
    assert launch.fields["train.global_batch"] == 128


def test_presets_beside_the_file(tmp_path):
    root = tmp_path / "primus" / "configs"
    for folder, name, text in (
        ("models/megatron", "base.yaml", "hidden_size: 64\nnum_attention_heads: 4\nswiglu: true\n"),
        ("models/megatron", "mine.yaml", "extends: base.yaml\nnum_layers: ${DEPTH:6}\n"),
        ("modules/megatron", "one.yaml", "micro_batch_size: 3\nbf16: true\nglobal_batch_size: 6\n"),
        ("modules/megatron", "pre_trainer.yaml", "extends:\n - one.yaml\nseq_length: 512\n"),
    ):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / name).write_text(text)
    file = tmp_path / "examples" / "exp.yaml"
    file.parent.mkdir()
    file.write_text(experiment("vocab_size: 1000\nmake_vocab_size_divisible_by: 1", "mine.yaml"))
    fields = primus.read(source_of([str(file)]), Told()).fields
    assert (fields["model.layers"], fields["model.hidden"], fields["model.vocab"]) == (6, 64, 1000)
    assert (fields["layout.micro_batch"], fields["train.seq_len"]) == (3, 512)


def test_experiment_extends(tmp_path):
    (tmp_path / "base.yaml").write_text(experiment("tensor_model_parallel_size: 2\nseed: 7"))
    top = "extends:\n  - base.yaml\nmodules:\n  pre_trainer:\n    overrides:\n      seed: 8\n"
    (tmp_path / "top.yaml").write_text(top)
    fields = primus.read(source_of([str(tmp_path / "top.yaml")]), Told()).fields
    assert (fields["layout.tp"], fields["train.seed"]) == (2, 8)


def test_extends_without_end(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: a.yaml\n" + experiment())
    with pytest.raises(UserError, match="extend one another"):
        primus.read(source_of([str(tmp_path / "a.yaml")]), Told())


def test_merge_is_deep():
    """merge_utils.deep_merge."""
    assert merge({"a": 1, "b": {"x": 1, "y": 2}}, {"b": {"y": 3}, "c": 4}) == {
        "a": 1, "b": {"x": 1, "y": 3}, "c": 4,
    }  # fmt: skip


def test_exported_experiment_is_flat():
    text = HEAD + "modules:\n  pre_trainer:\n    framework: megatron\n    model: x\n"
    text += "".join(
        f"    {line}\n"
        for line in (
            "num_layers: 4", "hidden_size: 64", "num_attention_heads: 4", "vocab_size: 512",
            "micro_batch_size: 1", "global_batch_size: 8", "seq_length: 128", "bf16: true",
            "tensor_model_parallel_size: 2",
        )
    )  # fmt: skip
    fields = primus.read(source(text), Told()).fields
    assert (fields["model.layers"], fields["layout.tp"]) == (4, 2)


# ------------------------------------------------------------------------------------------
# Environment variables


def test_variables_as_primus_puts_them_in():
    """yaml_loader._resolve_env_in_string and _try_scalar."""
    variables = Variables({"TP": "4", "NAME": "x"})
    for text, value in (
        ("${TP:1}", 4), ("${PP:2}", 2), ("${F:1e-5}", 1e-5), ("${B:True}", True),
        ("${N:null}", None), ("null", None), ("${NAME:y}.yaml", "x.yaml"), ("7", "7"),
        ("${E:}", ""),
        ("${L:[0]*1+[1]*3}", "[0]*1+[1]*3"),
    ):  # fmt: skip
        assert variables.put_in(text) == (value, ()), text
    assert variables.put_in("${MISSING}") == ("${MISSING}", ("MISSING",))
    assert variables.defaults == {
        "PP": "2", "F": "1e-5", "B": "True", "N": "null", "E": "", "L": "[0]*1+[1]*3",
    }  # fmt: skip


def test_default_is_taken_and_shown():
    launch = read("expert_model_parallel_size: ${PRIMUS_EP:8}", model="mixtral_8x7B_v0.1.yaml")
    assert launch.fields["layout.ep"] == 8
    assert "PRIMUS_EP=8" in named(launch.findings, "primus-variables")[0].message


def test_variable_without_default_is_asked_for():
    launch = read("tensor_model_parallel_size: ${TP}\nwandb_project: ${PROJECT}")
    found = [f for f in launch.settings.findings if f.rule == "open-variable"]
    assert len(found) == 1
    assert "TP" in found[0].message
    assert "--tp" in found[0].message
    told = Told({"layout.tp": "4"}, None, None)
    launch = read("tensor_model_parallel_size: ${TP}", told)
    assert not launch.settings.findings


def test_model_in_a_variable_is_asked_for(tmp_path, capsys):
    (tmp_path / "exp.yaml").write_text(experiment(model="${MODEL}.yaml"))
    assert main(["explain", "--from", "primus", str(tmp_path / "exp.yaml"), "--json"]) == 2
    said = json.loads(capsys.readouterr().out)["errors"]
    assert any("model" in e["where"] for e in said)
    words = ["explain", "--from", "primus", str(tmp_path / "exp.yaml"), "--json"]
    assert main([*words, "--model", "llama3.1-8b", "--ranks", "8"]) in (0, 1)


def test_shell_form_of_a_default_is_a_trap():
    """`${X:-8}` is -8 here: the pattern of yaml_loader knows no `:-`."""
    launch = read("eval_iters: ${EVAL:-many}")
    assert named(launch.findings, "primus-shell-default")


def test_script_sets_variables(tmp_path):
    text = experiment(
        "tensor_model_parallel_size: ${PRIMUS_TP:1}\nglobal_batch_size: 64",
        "${MODEL:llama2_7B}.yaml",
    )
    (tmp_path / "exp.yaml").write_text(text)
    script = tmp_path / "run.sh"
    script.write_text(
        "#!/bin/bash\nexport PRIMUS_TP=2\nexport MODEL=llama2_13B\nexport NNODES=${NNODES:-4}\n"
        "export EXP=exp.yaml\nexport GBS=$((32 * NNODES))\n"
        "bash ./examples/run_pretrain.sh --global_batch_size $GBS --seq_length 2048 2>&1 "
        "| tee log\n"
    )
    launch = primus.read(source_of([str(script)]), Told())
    fields = launch.fields
    assert (fields["layout.tp"], fields["ranks"], fields["train.global_batch"]) == (2, 32, 128)
    assert (fields["model.name"], fields["train.seq_len"]) == ("llama2-13b", 2048)


# ------------------------------------------------------------------------------------------
# Commands


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("primus-cli direct -- train pretrain --config exp.yaml", 8),
        ("./primus-cli slurm srun -N 4 -p gpu -- train pretrain --config exp.yaml", 32),
        ("NNODES=2 GPUS_PER_NODE=4 EXP=exp.yaml bash examples/run_pretrain.sh", 8),
        ("bash ./runner/primus-cli container --image x -- --env NNODES=2 -- train pretrain "
         "--config=exp.yaml", 16),
        ("torchrun --nproc_per_node 4 --nnodes 2 primus/cli/main.py train pretrain "
         "--config exp.yaml", 8),
        ("torchrun --nproc_per_node=8 primus/train.py --config exp.yaml", 8),
        ("bash run_k8s_pretrain.sh --url http://a create --replica 2 --gpu 4 --exp exp.yaml", 8),
        ("primus train pretrain --config exp.yaml", 8),
    ],
)  # fmt: skip
def test_ways_to_start(tmp_path, monkeypatch, command, ranks):
    (tmp_path / "exp.yaml").write_text(experiment())
    monkeypatch.chdir(tmp_path)
    launch = primus.read(source_of([f"{command} --context_parallel_size 2"]), Told())
    assert launch.fields["ranks"] == ranks
    assert launch.fields["layout.cp"] == 2


def test_override_forms():
    """core/utils/arg_utils.parse_cli_overrides."""
    words = [Word(w) for w in "a=1 --b=2 --c 3 --d --e.f true bare --g None --h -5".split()]
    said = {s.name: s.value for s in settings_of(words)}
    assert said == {"a": 1, "b": 2, "c": 3, "d": True, "e.f": True, "g": None, "h": -5}


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("primus-cli direct -- train pretrain", "which experiment"),
        ("primus-cli direct -- train pretrain --config nowhere.yaml", "nowhere.yaml"),
        ('primus-cli direct -- train pretrain --config "$EXP"', "EXP"),
        ("echo primus-cli", "no command"),
        ("python other.py --config exp.yaml", "no command"),
    ],
)
def test_commands_that_say_too_little(command, says):
    with pytest.raises(UserError) as problem:
        primus.read(source_of([command]), Told())
    assert len(problem.value.findings) == 1
    assert says in str(problem.value)


# ------------------------------------------------------------------------------------------
# What is kept, and what is not read


def test_unknown_key_is_named_with_the_nearest():
    """schema_check.py: every adapter takes unknown keys silently."""
    launch = read("tensor_model_paralel_size: 8\nhidden_size: 4096")
    ((setting, nearest),) = launch.unknown()
    assert setting.name == "tensor_model_paralel_size"
    assert nearest == "tensor_model_parallel_size"


def test_flag_spellings_are_no_keys():
    """MegatronArgBuilder takes names of the namespace: `disable_bias_linear` is none."""
    launch = read("disable_bias_linear: false")
    assert [s.name for s, _ in launch.unknown()] == ["disable_bias_linear"]


@pytest.mark.parametrize("framework", ["maxtext", "megatron_bridge", "nemo_automodel"])
def test_other_backends_are_named(framework):
    with pytest.raises(UserError) as problem:
        read(framework=framework)
    assert len(problem.value.findings) == 1
    assert framework in str(problem.value)


def test_misspelt_framework():
    with pytest.raises(UserError, match="did you mean megatron"):
        read(framework="megatorn")


def test_required_keys():
    """PrimusParser.parse_meta_info."""
    launch = read(head="exp_name: x\n")
    found = named(launch.findings, "primus-required-keys")
    assert "work_group" in found[0].message
    assert "at start" in found[0].message


def test_keys_that_stand_in_the_wrong_place():
    """At the top nothing reads them; beside overrides a preset of the module goes before them."""
    launch = read(more="sede: 3\nplatfrom: {}\n")
    messages = [f.message for f in named(launch.findings, "primus-top-level")]
    assert len(messages) == 2
    assert any("did you mean platform" in m for m in messages)
    text = experiment("seed: 5").replace("    overrides", "    micro_batch_size: 9\n    overrides")
    launch = primus.read(source(text), Told())
    assert launch.fields["layout.micro_batch"] == 2
    assert named(launch.findings, "primus-beside-overrides")


def test_variables_that_must_be_set():
    """yaml_loader._resolve_env_in_string raises where there is neither value nor default."""
    launch = read("wandb_project: ${PROJECT}")
    assert "PROJECT" in named(launch.findings, "primus-required-variables")[0].message
    assert not launch.settings.findings


def test_norm_epsilon_is_inert():
    """schema_check.py: norm_epsilon is DeepSeek-V4's; layernorm_epsilon is Megatron's."""
    launch = read("norm_epsilon: 1.0e-6")
    assert launch.fields["model.norm_eps"] == 1e-5
    assert named(checked(launch), "primus-norm-epsilon")


def test_mock_data_has_its_own_vocabulary():
    """args/mock_data_patches.py: NullTokenizer with 131072 words, unless vocab_size is said."""
    assert read("mock_data: true").fields["model.vocab"] == 131072
    assert read("mock_data: true\nvocab_size: 32000").fields["model.vocab"] == 32000
    assert read("mock_data: false").fields["model.vocab"] == 128256


def test_hybrid_model_is_counted_roughly():
    launch = read(model="zebra_llama_1B.yaml")
    assert named(launch.findings, "primus-hybrid-model")[0].level == "warning"


def test_diffusion_model_is_asked_for():
    text = experiment("model_type: flux_schnell", "diffusion/flux_12b.yaml")
    launch = primus.read(source(text), Told())
    assert not [k for k in launch.fields if k.startswith("model")]


# ------------------------------------------------------------------------------------------
# TorchTitan


TITAN = """\
training:
  local_batch_size: 4
  seq_len: 4096
  steps: 50
parallelism:
  tensor_parallel_degree: 2
  data_parallel_replicate_degree: 2
activation_checkpoint:
  mode: full
"""


def test_torchtitan_backend():
    launch = read(TITAN, framework="torchtitan", told=Told(world=16))
    fields = launch.fields
    assert fields["model"] == "llama3.1-8b"
    assert (fields["layout.tp"], fields["layout.dp_replicate"]) == (2, 2)
    assert fields["layout.zero"] == 3
    assert (fields["layout.micro_batch"], fields["train.seq_len"]) == (4, 4096)
    assert fields["layout.recompute"] == "full"
    assert not launch.unknown()
    # modules/torchtitan/pre_trainer.yaml turns off what TorchTitan has on by default.
    plain = read("training:\n  steps: 3", framework="torchtitan")
    assert plain.fields["layout.recompute"] == "none"


def test_torchtitan_sizes_beside_a_flavor():
    """patches/model_override_patches.py."""
    launch = read("model:\n  n_layers: 4", framework="torchtitan")
    assert launch.fields["model"] == "llama3.1-8b"
    assert launch.fields["model.layers"] == 4
    assert read(model="llama3.1_405B.yaml", framework="torchtitan").fields["model.layers"] == 126
    assert not launch.unknown()


def test_torchtitan_unknown_key():
    launch = read("training:\n  local_batchsize: 4", framework="torchtitan")
    ((setting, nearest),) = launch.unknown()
    assert (setting.name, nearest) == ("training.local_batchsize", "training.local_batch_size")


def test_torchtitan_command(tmp_path, monkeypatch):
    (tmp_path / "exp.yaml").write_text(experiment(TITAN, framework="torchtitan"))
    monkeypatch.chdir(tmp_path)
    command = "primus-cli direct -- train pretrain --config exp.yaml"
    launch = primus.read(
        source_of(
            [f"{command} --training.local_batch_size 1 parallelism.tensor_parallel_degree=4"]
        ),
        Told(),
    )
    assert (launch.fields["layout.micro_batch"], launch.fields["layout.tp"]) == (1, 4)


def test_dualpipev_may_be_something_else():
    """backends/torchtitan/patches/pipelining_schedule_patches.py."""
    launch = read(
        "parallelism:\n  pipeline_parallel_degree: 4\n  pipeline_parallel_schedule: DualPipeV",
        framework="torchtitan",
    )
    (found,) = named(checked(launch), "primus-dualpipev")
    assert found.level == "warning"
    assert "1F1B" in found.message
