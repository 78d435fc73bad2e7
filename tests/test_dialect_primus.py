"""Primus: experiments over layered presets, commands, its own schedules and rules, writing.

Expected values are those of Primus at fd1eeabb; the file that says so stands beside each.
"""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.cli.main import main
from plait.dialects import primus, primus_schedules
from plait.dialects.flags import Word
from plait.dialects.launch import Told
from plait.dialects.primus_commands import settings_of
from plait.dialects.primus_config import Variables, merge, presets, read_experiment
from plait.dialects.primus_write import preset_of, titan_preset
from plait.dialects.source import Source, source_of
from plait.rules import check as rules
from plait.spec.chunks import chunk_layers
from plait.spec.findings import UserError
from plait.spec.jobfile import draft

HEAD = """\
work_group: ${PRIMUS_TEAM:amd}
user_name: ${PRIMUS_USER:root}
exp_name: ${PRIMUS_EXP_NAME:a-run}
workspace: ./output
"""


def experiment(
    overrides: str = "",
    model: str = "llama3.1_8B.yaml",
    framework: str = "megatron",
    module: str = "pre_trainer",
    config: str = "pre_trainer.yaml",
    head: str = HEAD,
    more: str = "",
) -> str:
    lines = "".join(f"      {line}\n" for line in overrides.strip().splitlines())
    return (
        f"{head}{more}modules:\n  {module}:\n    framework: {framework}\n    config: {config}\n"
        f"    model: {model}\n    overrides:\n{lines}"
    )


def source(text: str) -> Source:
    return Source(text, "exp.yaml", Path("/nowhere/exp.yaml"))


def read(overrides: str = "", told: Told | None = None, **how):
    return primus.read(source(experiment(overrides, **how)), told or Told())


def checked(launch, world: int = 8):
    """The findings of the file and of the target's own rules."""
    made = draft("plan", None, {"ranks": world} | launch.fields)
    assert made.job is not None, made.findings
    return [*launch.findings, *launch.settings.findings, *primus.check(launch, made.job)]


def named(found, rule: str):
    return [f for f in found if f.rule == rule]


def errors(found) -> set[str]:
    return {f.rule for f in found if f.level == "error"}


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
# Schedules


@pytest.mark.parametrize(
    ("algorithm", "vpp", "schedule"),
    [
        ("1f1b", 1, "1f1b"), ("1f1b-interleaved", 2, "interleaved-1f1b"),
        ("zero-bubble", 1, "zb-h1"), ("zero-bubble-heuristic", 1, "zb-auto"),
        ("zbv-formatted", 2, "zbv"), ("v-half", 2, "v-half"), ("v-min", 2, "v-min"),
    ],
)  # fmt: skip
def test_primus_pipeline(algorithm, vpp, schedule):
    """scheduler/schedule_table_factory.py; chunks by primuspipe/__init__.py."""
    needs = "\n".join(f"{k}: {str(v).lower()}" for k, v in primus_schedules.NEEDED.items())
    launch = read(
        f"patch_primus_pipeline: true\npp_algorithm: {algorithm}\npipeline_model_parallel_size: 4\n"
        f"num_virtual_stages_per_pipeline_rank: {vpp}\nglobal_batch_size: 64\n{needs}"
    )
    assert launch.fields["layout.schedule"] == schedule
    found = checked(launch)
    assert not errors(found)
    assert not named(found, "primus-pipeline-needs")


@pytest.mark.parametrize(
    ("algorithm", "vpp", "nearest"),
    [("zbv-formatted", 1, 2), ("v-half", 4, 2), ("zero-bubble", 2, 1), ("1f1b-interleaved", 1, 1)],
)
def test_chunks_of_an_algorithm(algorithm, vpp, nearest):
    launch = read(
        f"patch_primus_pipeline: true\npp_algorithm: {algorithm}\npipeline_model_parallel_size: 4\n"
        f"num_virtual_stages_per_pipeline_rank: {vpp}\nglobal_batch_size: 64"
    )
    found = named(checked(launch), "primus-chunks")
    assert "in the first step" in found[0].message
    assert found[0].suggest["layout.vpp"] == nearest


def test_algorithm_that_is_none():
    launch = read(
        "patch_primus_pipeline: true\npp_algorithm: dualpipe\npipeline_model_parallel_size: 4\n"
        "global_batch_size: 64"
    )
    assert "primus-pp-algorithm" in errors(checked(launch))


@pytest.mark.parametrize(
    ("said", "schedule"),
    [
        ("", "zb-auto"),
        ("zero_bubble_max_pending_backward: 4", "zb-h1"),
        ("zero_bubble_max_pending_backward: 8", "zb-h2"),
        ("enable_zero_bubble: false", "1f1b"),
        ("zero_bubble_v_schedule: true\nnum_virtual_stages_per_pipeline_rank: 2\n"
         "zero_bubble_v_schedule_mem_setup: half", "v-half"),
        ("zero_bubble_v_schedule: true\nnum_virtual_stages_per_pipeline_rank: 2\n"
         "zero_bubble_v_schedule_mem_setup: min", "v-min"),
        ("zero_bubble_v_schedule: true\nnum_virtual_stages_per_pipeline_rank: 2\n"
         "zero_bubble_v_schedule_mem_setup: zb", "zbv"),
    ],
)  # fmt: skip
def test_older_runtime(said, schedule):
    """zerobubble/README.md, runtime.py."""
    launch = read(
        f"patch_zero_bubble: true\npipeline_model_parallel_size: 4\nglobal_batch_size: 64\n{said}"
    )
    assert launch.fields["layout.schedule"] == schedule
    assert not errors(checked(launch)) - {"primus-recompute-split"}


def test_chunks_without_a_v_in_the_older_runtime():
    """runtime.py: "got virtual pipeline parallel but v_schedule is disabled"."""
    launch = read(
        "patch_zero_bubble: true\npipeline_model_parallel_size: 4\nglobal_batch_size: 64\n"
        "num_virtual_stages_per_pipeline_rank: 2"
    )
    assert "primus-chunks" in errors(checked(launch))


def test_needs_that_nobody_checks():
    launch = read(
        "patch_zero_bubble: true\npipeline_model_parallel_size: 4\nglobal_batch_size: 64\n"
        "overlap_grad_reduce: true\ngradient_accumulation_fusion: false"
    )
    (found,) = named(checked(launch), "primus-pipeline-needs")
    assert found.level == "warning"
    for name, value in primus_schedules.NEEDED.items():
        # Parameters are gathered apart by default, as it needs it.
        assert (f"{name}: {str(value).lower()}" in found.message) == (
            name != "overlap_param_gather"
        )


def test_both_runtimes():
    """pipeline_parallel/wgrad_adapter.py."""
    launch = read(
        "patch_zero_bubble: true\npatch_primus_pipeline: true\npp_algorithm: 1f1b\n"
        "pipeline_model_parallel_size: 4\nglobal_batch_size: 64"
    )
    assert "primus-two-pipelines" in errors(checked(launch))


def test_recompute_and_split_weight_gradients():
    """projection/config_validation.py; reference 3.4."""
    launch = read(
        "patch_primus_pipeline: true\npp_algorithm: zero-bubble\npipeline_model_parallel_size: 4\n"
        "global_batch_size: 64\nrecompute_granularity: full\nrecompute_method: uniform\n"
        "recompute_num_layers: 1"
    )
    (found,) = named(checked(launch), "primus-recompute-split")
    assert found.suggest == {"layout.recompute": "none"}


def test_zbv_wants_2p_minus_1_micro_batches():
    """zbv_formatted.py pads its table to 2p - 1 and drops nothing afterwards."""
    said = (
        "patch_primus_pipeline: true\npp_algorithm: zbv-formatted\n"
        "pipeline_model_parallel_size: 4\nnum_virtual_stages_per_pipeline_rank: 2\n"
        "micro_batch_size: 1\nglobal_batch_size: "
    )
    assert named(checked(read(f"{said}12")), "primus-zbv-micro-batches")  # dp 2: 6 micro batches
    assert not named(checked(read(f"{said}14")), "primus-zbv-micro-batches")


def test_virtual_size_alone_is_computed_anew():
    """Megatron-LM's validate_args sets virtual_pipeline_model_parallel_size to None."""
    launch = read(
        "pipeline_model_parallel_size: 4\nvirtual_pipeline_model_parallel_size: 2\n"
        "global_batch_size: 64"
    )
    assert launch.fields["layout.vpp"] == 1
    assert named(checked(launch), "primus-virtual-pipeline")


# ------------------------------------------------------------------------------------------
# Its other rules


def test_sequence_parallel_is_off_at_tp_1():
    """args/sequence_parallel_tp1_patches.py; on by default elsewhere."""
    launch = read("sequence_parallel: true")
    assert launch.fields["layout.sequence_parallel"] is False
    assert named(checked(launch), "primus-sequence-parallel")
    assert read("tensor_model_parallel_size: 2").fields["layout.sequence_parallel"] is True


def test_replicate_degree():
    """args/hsdp_args_patches.py."""
    said = "data_parallel_replicate_degree: 2\nuse_distributed_optimizer: false\n"
    assert "primus-replicate-fsdp2" in errors(checked(read(said)))
    fsdp2 = f"{said}use_torch_fsdp2: true\n"
    assert "primus-replicate-checkpoint" in errors(checked(read(f"{fsdp2}ckpt_format: torch_dist")))
    launch = read(f"{fsdp2}ckpt_format: torch_dcp")
    assert launch.fields["layout.dp_replicate"] == 2
    assert launch.fields["layout.zero"] == 3
    mine = {r for r in errors(checked(launch)) if r.startswith("primus")}
    assert not mine


@pytest.mark.parametrize(
    ("said", "rule"),
    [
        ("use_turbo_deepep: true\nmoe_shared_expert_overlap: true\nmoe_router_dtype: fp32",
         "primus-deepep-shared"),
        ("use_turbo_deepep: true\nmoe_router_dtype: null", "primus-deepep-router"),
        ("turbo_sync_free_moe_stage: 2\nenable_primus_turbo: true", "primus-sync-free-grouped"),
        ("turbo_sync_free_moe_stage: 1\nenable_primus_turbo: false", "primus-sync-free-turbo"),
        ("turbo_sync_free_moe_stage: 7", "primus-sync-free-stage"),
        ("use_turbo_grouped_gemm: true\nmoe_use_legacy_grouped_gemm: true", "primus-grouped-gemm"),
        ("use_turbo_parallel_linear: true", "primus-turbo-gone"),
        ("use_fsdp2_fp32_param_optimizer: true\nuse_fsdp2_bf16_master_weight_optimizer: true",
         "primus-fsdp2-optimizers"),
    ],
)  # fmt: skip
def test_rules_at_start(said, rule):
    """args/rocm_arg_validation.py."""
    assert rule in errors(checked(read(said, model="mixtral_8x7B_v0.1.yaml")))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("recompute_layer_ids: '0,40'\nrecompute_granularity: full", "layer 40"),
        ("recompute_layer_ids: []\nrecompute_granularity: full", "empty"),
        ("recompute_layer_ids: '0,1'", "recompute_granularity: full"),
        ("recompute_layer_ids: [0, 1]\nrecompute_granularity: full\nrecompute_method: block",
         "recompute_method: null"),
    ],
)  # fmt: skip
def test_recompute_layer_ids(said, words):
    """recompute_layer_patches.py."""
    found = named(checked(read(said)), "primus-recompute-layers")
    assert any(words in f.message for f in found if f.level == "error")


def test_recompute_layer_ids_that_are_fine():
    launch = read("recompute_layer_ids: '0,1,2'\nrecompute_granularity: full")
    assert launch.fields["layout.recompute"] == "none"  # three of 32 layers
    ids = ",".join(map(str, range(30)))
    launch = read(f"recompute_layer_ids: '{ids}'\nrecompute_granularity: full")
    assert launch.fields["layout.recompute"] == "full"
    assert not errors(checked(launch))


def test_recompute_of_no_layers():
    launch = read("recompute_granularity: full\nrecompute_method: block\nrecompute_num_layers: 0")
    assert launch.fields["layout.recompute"] == "none"


def test_connections_are_set_by_primus():
    """patches/env_patches.py: 8 with FSDP, else what is set, else 1."""
    assert read().environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    fsdp = read("use_torch_fsdp2: true\nuse_distributed_optimizer: false")
    assert fsdp.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


def test_env_block_of_a_file():
    """train_runtime._apply_config_env."""
    launch = read(more='env:\n  CUDA_DEVICE_MAX_CONNECTIONS: "4"\n')
    assert launch.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "4"


# ------------------------------------------------------------------------------------------
# The guide: its three example configurations, and what it says


@pytest.mark.parametrize(
    ("said", "model", "world", "dp"),
    [
        ("", "llama2_7B.yaml", 8, 8),  # ~7B on 8: TP 1, PP 1, 8-way DP
        ("tensor_model_parallel_size: 8\npipeline_model_parallel_size: 2\nglobal_batch_size: 64",
         "llama3.1_70B.yaml", 64, 4),  # ~70B on 64: TP 8, PP 2, 4-way DP
        ("tensor_model_parallel_size: 8\npipeline_model_parallel_size: 4\n"
         "expert_model_parallel_size: 8\nexpert_tensor_parallel_size: 1\nglobal_batch_size: 256\n"
         "pipeline_model_parallel_layout: Et*15|t*15|t*15|t*16L\nmtp_num_layers: null",
         "deepseek_v3.yaml", 256, 8),  # the guide's formula says 1
    ],
)  # fmt: skip
def test_example_configurations(said, model, world, dp):
    launch = read(said, model=model)
    made = draft("plan", None, {**launch.fields, "ranks": world})
    assert not made.findings
    assert made.job.layout.dp == dp
    assert not errors(primus.check(launch, made.job)) - {"megatron-connections"}


def test_dp_formula_of_the_guide():
    """world / (TP PP EP) in the guide and the tuning agent; 8 and not 1 in the trainer."""
    said = (
        "tensor_model_parallel_size: 8\npipeline_model_parallel_size: 4\nmicro_batch_size: 1\n"
        "expert_model_parallel_size: 8\nexpert_tensor_parallel_size: 1\nglobal_batch_size: 256\n"
        "pipeline_model_parallel_layout: Et*15|t*15|t*15|t*16L\nmtp_num_layers: null"
    )
    launch = read(said, model="deepseek_v3.yaml")
    (found,) = named(checked(launch, 256), "primus-dp-formula")
    assert "= 1, so 256 micro batches" in found.message
    assert "= 8, so 32 micro batches" in found.message


def test_dp_formula_is_the_same_for_dense_models():
    launch = read("tensor_model_parallel_size: 2")
    assert not named(checked(launch), "primus-dp-formula")


def test_sequence_parallel_gathers_before_and_scatters_after(tmp_path, capsys):
    """The guide has it the other way round; Korthikanti 2205.05198 section 4.2.2."""
    file = tmp_path / "exp.yaml"
    file.write_text(experiment("tensor_model_parallel_size: 2\nmicro_batch_size: 1"))
    assert main(["explain", "--from", "primus", str(file), "--gpus", "h100:8", "--json"]) in (0, 1)
    report = json.loads(capsys.readouterr().out)
    kinds = {
        (t["collective"], t["phase"]) for t in report["traffic"] if t["axis"] == "tp"
    }  # both in forward: gathered before a column, scattered after a row
    assert {("all-gather", "forward"), ("reduce-scatter", "forward")} <= kinds
    assert ("all-reduce", "forward") not in kinds


def test_etp_on_torchtitan_is_stale():
    launch = read(
        "parallelism:\n  tensor_parallel_degree: 2\n  expert_parallel_degree: 2\n"
        "  expert_tensor_parallel_degree: 2",
        model="deepseek_v3_16b.yaml",
        framework="torchtitan",
    )
    assert launch.fields["layout.etp"] == 2
    assert named(checked(launch), "primus-titan-etp")


def test_dualpipe_is_not_there():
    job = _job(model="llama3.1-8b", layout__pp=4, layout__schedule="dualpipe", ranks=8,
               train__global_batch=32)  # fmt: skip
    written = primus.write(job)
    assert any("dualpipe" in n.message for n in written.notes)


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


# ------------------------------------------------------------------------------------------
# Writing


def _job(**said):
    made = draft("plan", None, {k.replace("__", "."): v for k, v in said.items()})
    assert not made.findings, made.findings
    return made.job


def _back(job, told: Told | None = None):
    written = primus.write(job)
    ((name, text),) = written.files.items()
    launch = primus.read(Source(text, name, Path("/nowhere") / name), told or Told())
    made = draft("plan", None, {**launch.fields, "ranks": job.layout.world})
    assert not made.findings, made.findings
    assert not launch.unknown()
    wrong = [f for f in [*launch.findings, *launch.settings.findings,
                         *primus.check(launch, made.job)] if f.level == "error"]  # fmt: skip
    assert not wrong, wrong
    return made.job, written


MODELS = {
    "dense": {"layers": 16, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn": 512, "vocab": 1024,
              "tied": False},
    "moe": {"layers": 16, "hidden": 256, "heads": 8, "kv_heads": 8, "ffn": 512, "vocab": 1024,
            "tied": False, "moe.experts": 8, "moe.topk": 2, "moe.ffn": 128, "moe.shared": 1,
            "moe.first_dense": 2, "moe.score": "sigmoid"},
    "mla": {"layers": 16, "hidden": 256, "heads": 8, "ffn": 512, "vocab": 1024, "head_dim": 48,
            "tied": False, "mla.kv_rank": 64, "mla.q_rank": 96, "mla.nope_dim": 32,
            "mla.rope_dim": 16, "mla.v_dim": 32},
}  # fmt: skip


@st.composite
def layouts(draw):
    """Layouts that the Megatron backend can say."""
    kind = draw(st.sampled_from(sorted(MODELS)))
    tp, cp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2])), 1
    said = {f"model.{k}": v for k, v in MODELS[kind].items()}
    pp = draw(st.sampled_from([1, 2, 4]))
    dp = draw(st.sampled_from([1, 2, 4]))
    said |= {"layout.tp": tp, "layout.cp": cp, "layout.pp": pp, "ranks": tp * cp * pp * dp}
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    said["layout.zero"] = zero
    if zero == 0 and dp > 1:
        said["layout.dp_shard"] = 1
    elif dp > 2 and kind != "moe":
        said["layout.dp_replicate"] = draw(st.sampled_from([1, 2]))
    if kind == "moe":
        ep = draw(st.sampled_from([e for e in (1, 2, 4, 8) if (tp * cp * dp) % e == 0]))
        said |= {"layout.ep": ep, "layout.etp": 1, "layout.sequence_parallel": tp > 1}
    if cp > 1:
        method = draw(st.sampled_from([("ring", 1), ("all-gather", 1), ("ring", cp)]))
        said |= {"layout.cp_method": method[0], "layout.ulysses": method[1]}
    recompute = draw(st.sampled_from(["none", "full"]))
    if pp > 1:
        name, vpp = draw(st.sampled_from([
            ("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1), ("zb-auto", 1), ("zbv", 2),
            ("v-half", 2), ("v-min", 2),
        ]))  # fmt: skip
        if name == "interleaved-1f1b" and pp == 2:
            name, vpp = "1f1b", 1
        if name in primus_schedules.SPLIT:
            recompute = "none"
        said |= {"layout.schedule": name, "layout.vpp": vpp}
    said["layout.recompute"] = recompute
    micro = draw(st.sampled_from([1, 2]))
    said |= {"layout.micro_batch": micro, "train.seq_len": 512, "model.seq": 512}
    said["train.global_batch"] = micro * dp * draw(st.sampled_from([8, 16]))
    return said


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(layouts())
def test_round_trip(said):
    made = draft("plan", None, said)
    assert not made.findings, made.findings
    job = made.job
    if any(f.level == "error" for f in rules(job, "plan")):
        return
    back, _ = _back(job)
    same = {"stages": None}
    assert replace(back.layout, **same) == replace(job.layout, **same)
    assert chunk_layers(back.model, back.layout) == chunk_layers(job.model, job.layout)
    assert replace(back.model, name="", seq=0) == replace(job.model, name="", seq=0)
    assert back.batch == job.batch
    train = ("steps", "seq_len", "learning_rate", "warmup", "weight_decay", "beta1", "beta2",
             "clip", "seed", "dtype", "grad_dtype")  # fmt: skip
    assert {n: getattr(back.train, n) for n in train} == {n: getattr(job.train, n) for n in train}


@pytest.mark.parametrize("model", ["llama3.1-8b", "mixtral-8x7b", "deepseek-v3", "qwen3-8b"])
def test_published_models_come_back(model):
    job = _job(model=model, ranks=16, layout__tp=2, train__global_batch=32, train__seq_len=4096)
    back, written = _back(job)
    assert back.layout == job.layout
    ours, theirs = (replace(m, name="", seq=0) for m in (job.model, back.model))
    assert (ours.layers, ours.hidden, ours.heads, ours.kv_heads, ours.ffn, ours.vocab) == (
        theirs.layers, theirs.hidden, theirs.heads, theirs.kv_heads, theirs.ffn, theirs.vocab,
    )  # fmt: skip
    assert f"model: {preset_of(model)}.yaml" in next(iter(written.files.values()))


def test_a_preset_says_what_the_file_need_not():
    job = _job(model="llama3.1-8b", ranks=8, layout__tp=2)
    text = next(iter(primus.write(job).files.values()))
    assert "model: llama3.1_8B.yaml" in text
    assert "num_layers" not in text
    assert "tensor_model_parallel_size: 2" in text


def test_what_stands_in_the_way_of_a_preset_is_written():
    """pre_trainer.yaml turns the distributed optimizer on: zero 0 must say that it is off."""
    job = _job(model="llama3.1-8b", ranks=8, layout__zero=0)
    assert "use_distributed_optimizer: false" in next(iter(primus.write(job).files.values()))


def test_torchtitan_where_only_it_has_the_schedule():
    job = _job(model="llama3.1-8b", ranks=8, layout__pp=4, layout__schedule="gpipe",
               layout__zero=2, train__global_batch=32)  # fmt: skip
    back, written = _back(job, Told(world=8))
    assert "framework: torchtitan" in next(iter(written.files.values()))
    assert any(n.rule == "primus-torchtitan" for n in written.notes)
    assert back.layout.schedule == "gpipe"
    assert back.batch == job.batch


@pytest.mark.parametrize(
    ("schedule", "vpp", "runs"),
    [("zb-h2", 1, "zb-auto"), ("dualpipe", 1, "zbv"), ("gpipe", 1, "1f1b"),
     ("looped-bfs", 2, "interleaved-1f1b"), ("dualpipev", 2, "zbv")],
)  # fmt: skip
def test_schedules_that_it_lacks(schedule, vpp, runs):
    """With a model that TorchTitan has no flavor of, so that Megatron's backend is written."""
    said = {f"model.{k}": v for k, v in MODELS["dense"].items()}
    made = draft("plan", None, {**said, "ranks": 8, "layout.pp": 4, "layout.vpp": vpp,
                                "layout.schedule": schedule, "train.global_batch": 32})  # fmt: skip
    assert not made.findings, made.findings
    back, written = _back(made.job)
    assert back.layout.schedule == runs
    assert any(schedule in n.message and runs in n.message for n in written.notes)


def test_recompute_is_left_out_where_it_frees_nothing():
    job = _job(model="llama3.1-8b", ranks=8, layout__pp=4, layout__schedule="zb-h1",
               layout__recompute="full", train__global_batch=32)  # fmt: skip
    back, written = _back(job)
    assert back.layout.recompute == "none"
    assert any(n.rule == "primus-recompute-split" for n in written.notes)


def test_titan_presets():
    assert titan_preset({"name": "llama3", "flavor": "8B"}) in ("llama3_8B", "llama3.1_8B")
    assert titan_preset({"name": "llama3", "flavor": "none"}) is None


def test_nearest_legal_is_legal(tmp_path, capsys):
    """A file that Primus refuses, and the nearest that it takes, which reads back clean."""
    file = tmp_path / "exp.yaml"
    file.write_text(experiment(
        "patch_primus_pipeline: true\npp_algorithm: v-half\npipeline_model_parallel_size: 4\n"
        "global_batch_size: 64\nmicro_batch_size: 1"
    ))  # fmt: skip
    assert main(["explain", "--from", "primus", str(file), "--ranks", "8", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert any(f["rule"] == "primus-chunks" for f in report["findings"])
    name, text = next(iter(report["source"]["legal"].items()))
    (tmp_path / name).write_text(text)
    main(["explain", "--from", "primus", str(tmp_path / name), "--ranks", "8", "--json"])
    again = json.loads(capsys.readouterr().out)
    assert not [f for f in again["findings"] if f["level"] == "error"]
    assert again["layout"]["schedule"] == "v-half"
    assert again["layout"]["vpp"] == 2


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
