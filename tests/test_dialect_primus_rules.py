"""Primus: its schedules, its rules, and what its guide says.

Expected values are those of Primus at fd1eeabb; the file that says so stands beside each.
"""

import json

import pytest

from plait.cli.main import main
from plait.dialects import primus
from plait.dialects.primus import schedules as primus_schedules
from plait.spec.jobfile import draft
from primus_files import checked, errors, experiment, job_of, named, read

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
    assert not named(found, "megatron-schedule"), "Megatron-LM lacks it, Primus does not"


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
    found = checked(launch)
    assert not errors(found) - {"primus-recompute-split"}
    assert not named(found, "megatron-schedule")


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
    job = job_of(model="llama3.1-8b", layout__pp=4, layout__schedule="dualpipe", ranks=8,
               train__global_batch=32)  # fmt: skip
    written = primus.write(job)
    assert any("dualpipe" in n.message for n in written.notes)
