"""Accelerate: configurations and launch commands; read, checked, written."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launches import commands_of, differences, jobs, problems, read_back
from plait.cli.main import main
from plait.dialects import accelerate
from plait.dialects.source import Source
from plait.spec.jobfile import draft

#: Field that may differ after a round trip -> words of the rules of the notes that say why.
SAID_WHY = {
    "layout.ulysses": "ulysses context", "layout.cp_method": "ulysses context",
    "layout.cp": "ulysses", "layout.vpp": "schedule chunks", "layout.schedule": "schedule",
    "layout.stages": "schedule", "layout.sequence_parallel": "norms",
    "layout.recompute": "recompute", "layout.etp": "etp", "layout.ep": "autoep",
    "layout.zero": "zero ddp", "layout.dp_replicate": "replicas mics zero ulysses ddp",
    "layout.dp_shard": "replicas mics zero ulysses ddp",
    "train.grad_dtype": "gradients", "train.global_batch": "batch",
    "train.accumulation": "batch ulysses",
}  # fmt: skip


@pytest.fixture
def explain(capsys, tmp_path):
    """The REPORT of a configuration or a script, with files beside it."""

    def run(text, *more, name="accelerate.yaml", model="llama3.1-8b", **beside):
        path = tmp_path / name
        path.write_text(text)
        for other, content in beside.items():
            (tmp_path / other.replace("__", ".")).write_text(content)
        flags = ["--model", model] if model else []
        flags += [str(word) for word in more]
        code = main(["explain", "--from", "accelerate", str(path), *flags, "--json"])
        report = json.loads(capsys.readouterr().out)
        assert code == (2 if "errors" in report else int(bool(rules(report, "error"))))
        return report

    return run


def rules(report, *levels):
    return {f["rule"] for f in report["findings"] if not levels or f["level"] in levels}


FSDP2 = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 16
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: {reshard}
  fsdp_activation_checkpointing: true
  fsdp_offload_params: false
parallelism_config:
  parallelism_config_dp_replicate_size: {replicate}
  parallelism_config_dp_shard_size: {shard}
  parallelism_config_tp_size: {tp}
  parallelism_config_cp_size: {cp}
"""


def test_fsdp2_with_a_mesh(explain):
    report = explain(FSDP2.format(reshard="true", replicate=2, shard=2, tp=2, cp=2))
    layout = report["layout"]
    found = {k: layout[k] for k in ("tp", "cp", "ulysses", "dp_replicate", "dp_shard", "zero")}
    assert found == {"tp": 2, "cp": 2, "ulysses": 1, "dp_replicate": 2, "dp_shard": 2, "zero": 3}
    assert (layout["cp_method"], layout["recompute"], report["world"]) == ("all-gather", "full", 16)
    assert report["batch"]["dtype"] == "bfloat16"
    report = explain(FSDP2.format(reshard="false", replicate=1, shard=16, tp=1, cp=1))
    assert report["layout"]["zero"] == 2


@pytest.mark.parametrize(
    ("strategy", "zero", "replicate"),
    [("FULL_SHARD", 3, 1), ("SHARD_GRAD_OP", 2, 1), ("NO_SHARD", 0, 16), ("HYBRID_SHARD", 3, 2),
     ("HYBRID_SHARD_ZERO2", 2, 2), ("1", 3, 1), ("5", 2, 2)],
)  # fmt: skip
def test_strategies_of_fsdp1(explain, strategy, zero, replicate):
    # utils/constants.py, FSDP_SHARDING_STRATEGY: numbered from 1; hybrids shard within a node.
    text = (
        "distributed_type: FSDP\nnum_machines: 2\nnum_processes: 16\nfsdp_config:\n"
        f"  fsdp_sharding_strategy: {strategy}\n"
    )
    layout = explain(text)["layout"]
    assert (layout["zero"], layout["dp_replicate"]) == (zero, replicate)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        # ParallelismConfig.__post_init__ and _validate_accelerator
        ({"shard": 2}, "accelerate-product"),
        ({"replicate": 8, "shard": 1, "tp": 2}, "accelerate-replicas"),
        ({"tp": 0, "shard": 16}, "accelerate-size"),
        # FullyShardedDataParallelPlugin.__post_init__
        ({"reshard": "FULL_SHARD"}, "accelerate-reshard"),
    ],
)
def test_rules_of_the_mesh(explain, change, rule):
    sizes = {"reshard": "true", "replicate": 1, "shard": 16, "tp": 1, "cp": 1} | change
    report = explain(FSDP2.format(**sizes))
    if "errors" in report:
        assert rule == "accelerate-size"
        return
    assert rule in rules(report, "error")
    legal = report["source"]["legal"]
    assert legal is None or "accelerate.yaml" in legal


@pytest.mark.parametrize(
    ("text", "rule", "level"),
    [
        ("distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 1}\n"
         "parallelism_config: {parallelism_config_tp_size: 8}", "accelerate-fsdp1", "error"),
        ("distributed_type: FSDP\nnum_processes: 8\n"
         "fsdp_config: {fsdp_version: 2, fsdp_forward_prefetch: true}",
         "accelerate-prefetch", "error"),
        ("distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_sharding_strategy: X}",
         "accelerate-strategy", "error"),
        ("distributed_type: MULTI_GPU\nnum_processes: 8\nnum_procs: 8",
         "accelerate-unknown-key", "error"),
        ("distributed_type: MULTI_GPU\nnum_processes: -1", "accelerate-processes", "error"),
        ("distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\n"
         "parallelism_config: {parallelism_config_sp_size: 8}", "accelerate-sp-backend", "error"),
        ("distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_version: 2}\n"
         "parallelism_config: {parallelism_config_sp_size: 2, parallelism_config_cp_size: 2}",
         "accelerate-cp-sp", "error"),
    ],
)  # fmt: skip
def test_rules(explain, text, rule, level):
    assert rule in rules(explain(text, "--seq-len", 4096), level)


def test_distributed_data_parallel(explain):
    report = explain("distributed_type: MULTI_GPU\nnum_processes: 8\nmixed_precision: 'no'\n")
    assert (report["layout"]["zero"], report["layout"]["dp_replicate"]) == (0, 8)
    assert report["batch"]["dtype"] == "float32"
    # YAML reads an unquoted NO as false
    report = explain("distributed_type: NO\nmixed_precision: no\n")
    assert report["world"] == 1


def test_deepspeed_inline_and_in_a_file(explain):
    inline = (
        "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: bf16\n"
        "deepspeed_config: {zero_stage: 3, gradient_accumulation_steps: 4, gradient_clipping: 1.0}"
    )
    report = explain(inline)
    assert (report["layout"]["zero"], report["batch"]["accumulation"]) == (3, 4)
    # DeepSpeedPlugin: zero_stage is 2 by default
    assert explain("distributed_type: DEEPSPEED\nnum_processes: 8\n")["layout"]["zero"] == 2
    config = {"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": True},
              "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}  # fmt: skip
    text = (
        "distributed_type: DEEPSPEED\nnum_processes: 8\n{}"
        "deepspeed_config: {{deepspeed_config_file: ds.json}}\n"
    )
    report = explain(text.format(""), ds__json=json.dumps(config))
    assert (report["layout"]["zero"], report["batch"]["accumulation"]) == (1, 2)
    assert "accelerate-deepspeed-twice" not in rules(report)
    report = explain(text.format("mixed_precision: bf16\n"), ds__json=json.dumps(config))
    assert "accelerate-deepspeed-twice" in rules(report, "warning")


def test_sp_is_ulysses(explain):
    text = (
        "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config: {zero_stage: 3}\n"
        "parallelism_config: {parallelism_config_sp_size: 4, parallelism_config_sp_backend: "
        "deepspeed, parallelism_config_sp_seq_length: 8192}\n"
    )
    report = explain(text)
    layout = report["layout"]
    assert (layout["cp"], layout["ulysses"], layout["sequence_parallel"]) == (4, 4, False)
    assert (report["batch"]["seq_len"], layout["dp_shard"]) == (8192, 2)
    report = explain(text.replace("sp_size: 4", "sp_size: 3").replace(": 8\n", ": 12\n"))
    assert "deepspeed-ulysses-heads" in rules(report, "error")


def test_megatron(explain):
    text = (
        "distributed_type: MEGATRON_LM\nnum_processes: 16\nmixed_precision: bf16\n"
        "megatron_lm_config: {megatron_lm_tp_degree: 2, megatron_lm_pp_degree: 4, "
        "megatron_lm_num_micro_batches: 8, megatron_lm_sequence_parallelism: true, "
        "megatron_lm_use_distributed_optimizer: true}\n"
    )
    report = explain(text)
    layout = report["layout"]
    assert (layout["tp"], layout["pp"], layout["sequence_parallel"], layout["zero"]) == (
        2,
        4,
        True,
        1,
    )
    assert report["batch"]["accumulation"] == 8


def test_flags_are_stronger_than_the_file(explain):
    script = (
        "N=4\naccelerate launch --config_file conf.yaml --num_processes $((N * 8)) \\\n"
        "  --num_machines $N --parallelism_config_dp_shard_size 32 train.py \\\n"
        "  --model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size 2 "
        "--max_seq_length 4096\n"
    )
    conf = FSDP2.format(reshard="true", replicate=1, shard=16, tp=1, cp=1)
    report = explain(script, name="run.sh", model=None, conf__yaml=conf)
    assert (report["world"], report["layout"]["dp_shard"]) == (32, 32)
    assert (report["layout"]["micro_batch"], report["batch"]["seq_len"]) == (2, 4096)
    assert not report["source"]["unknown"]
    assert not rules(report, "error")


def test_a_job_of_slurm(explain):
    script = (
        "#SBATCH --nodes=2\n#SBATCH --gpus-per-node=8\n"
        'export START="accelerate launch --config_file a.yaml --num_machines $SLURM_NNODES '
        '--num_processes $((SLURM_NNODES * 8)) --machine_rank \\$SLURM_PROCID"\n'
        'export RUN="sft.py --per_device_train_batch_size 2 --gradient_accumulation_steps 8"\n'
        'srun bash -c "$START $RUN"\n'
    )
    conf = "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config: {zero_stage: 3}\n"
    report = explain(script, "--seq-len", 4096, name="run.sh", a__yaml=conf)
    batch = report["batch"]
    assert (report["world"], report["layout"]["zero"]) == (16, 3)
    assert (batch["micro"], batch["accumulation"], batch["global"]) == (2, 8, 256)


def test_a_configuration_that_is_not_there_is_said(explain):
    script = "accelerate launch --config_file nowhere.yaml --num_processes 8 train.py"
    report = explain(script, name="run.sh")
    assert "accelerate-no-configuration" in rules(report, "warning")


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(jobs())
def test_what_is_written_is_read_back(job):
    back, noted = read_back(accelerate, job)
    for field in differences(job, back):
        if not field.startswith("model."):
            words = SAID_WHY[field].split()
            assert any(word in rule for rule in noted for word in words), (field, noted)


@pytest.mark.parametrize(
    "layout",
    [
        {"zero": 3}, {"zero": 2}, {"zero": 3, "dp_replicate": 2}, {"zero": 3, "tp": 2, "cp": 2},
        {"zero": 0}, {"zero": 1}, {"zero": 3, "cp": 2, "ulysses": 2}, {"zero": 1, "pp": 2},
        {"zero": 3, "cp": 2, "cp_method": "all-gather"}, {"zero": 2, "tp": 2, "recompute": "full"},
    ],
)  # fmt: skip
def test_what_it_can_say_comes_back_the_same(layout):
    said = {f"layout.{name}": value for name, value in layout.items()}
    if layout.get("tp", 1) > 1:
        said["layout.sequence_parallel"] = False
    said |= {"model": "llama3.1-8b", "ranks": 16, "train.seq_len": 4096, "train.global_batch": 64}
    job = draft("plan", None, said).job
    assert differences(job, read_back(accelerate, job)[0]) == {}


HOSTILE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**400), 10**400), st.text(max_size=5),
              st.floats(), st.sampled_from(["auto", "$X", "1", "no", "FSDP", "DEEPSPEED"])),
    lambda inner: st.one_of(st.lists(inner, max_size=2),
                            st.dictionaries(st.sampled_from(["fsdp_version", "zero_stage", "a.b"]),
                                            inner, max_size=2)),
    max_leaves=4,
)  # fmt: skip
KEYS = st.sampled_from([
    "distributed_type", "num_processes", "num_machines", "mixed_precision", "fsdp_config",
    "parallelism_config", "deepspeed_config", "megatron_lm_config", "x", "fp16",
])  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(KEYS, HOSTILE, max_size=5),
    st.sampled_from(["FSDP", "DEEPSPEED", "MEGATRON_LM", "MULTI_GPU", None]),
)
def test_hostile_values_end_in_lines(tree, kind):
    tree = tree | ({"distributed_type": kind} if kind else {})
    source = Source(json.dumps(tree), "a.yaml", Path("/nowhere/a.yaml"))
    assert all("\n" not in f.message for f in problems(accelerate, source))


def test_the_commands_of_the_page_run(capsys):
    for words in commands_of("accelerate"):
        assert main(words) == 0
        assert capsys.readouterr().out


@pytest.mark.parametrize("value", [".nan", "-.inf", "[.inf]", "{a: .nan}", "2001-01-01"])
def test_answers_are_json_whatever_stands_in_the_file(capsys, tmp_path, value):
    path = tmp_path / "accelerate.yaml"
    path.write_text(f"distributed_type: FSDP\nnum_processes: 8\nmain_process_ip: {value}\n")
    flags = ["--from", "accelerate", str(path), "--model", "llama3.1-8b", "--json"]
    for command in (["explain"], ["convert", "--to", "torchtitan"]):
        assert main([*command, *flags]) in (0, 1)
        json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def test_machines_in_a_variable_do_not_stand_in_the_way(explain):
    text = "accelerate launch --num_machines $SLURM_NNODES --num_processes $N train.py\n"
    report = explain(text, "--ranks", 16, name="train.slurm")
    assert "errors" not in report
    assert report["world"] == 16
