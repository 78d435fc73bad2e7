"""DeepSpeed: configurations, commands, Megatron-DeepSpeed scripts; read, checked, written."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launches import commands_of, differences, jobs, problems, read_back
from plait.cli.main import main
from plait.dialects import deepspeed
from plait.dialects.deepspeed import json as deepspeed_json
from plait.dialects.deepspeed.elastic import Elastic
from plait.dialects.launch import Told
from plait.dialects.source import Source
from plait.spec.findings import UserError

#: Field that may differ after a round trip -> rules of the notes that say why.
SAID_WHY = {
    "layout.ulysses": "ulysses", "layout.cp_method": "ulysses", "layout.cp": "ulysses",
    "layout.vpp": "chunks", "layout.schedule": "chunks schedule", "layout.stages": "chunks",
    "layout.sequence_parallel": "norms", "layout.recompute": "recompute", "layout.etp": "etp",
    "layout.ep": "autoep", "layout.zero": "zero",
    "layout.dp_replicate": "replicas mics zero ulysses",
    "layout.dp_shard": "replicas mics zero ulysses", "train.grad_dtype": "gradients",
    "train.global_batch": "batch", "train.accumulation": "batch ulysses",
}  # fmt: skip


def config(**keys):
    return {"train_micro_batch_size_per_gpu": 1} | keys


@pytest.fixture
def explain(capsys, tmp_path):
    """The REPORT of a configuration or script."""

    def run(given, *more, name="ds_config.json", model="llama3.1-8b", dialect="deepspeed"):
        text = given if isinstance(given, str) else json.dumps(given)
        path = tmp_path / name
        path.write_text(text)
        flags = ["--model", model] if model else []
        code = main(["explain", "--from", dialect, str(path), *flags, *map(str, more), "--json"])
        report = json.loads(capsys.readouterr().out)
        assert code == (2 if "errors" in report else int(bool(rules(report, "error"))))
        return report

    return run


def rules(report, *levels):
    return {f["rule"] for f in report["findings"] if not levels or f["level"] in levels}


def test_a_configuration(explain):
    tree = config(
        train_batch_size=64, train_micro_batch_size_per_gpu=2, bf16={"enabled": True},
        zero_optimization={"stage": 3}, gradient_clipping=0.5, sequence_parallel_size=2,
    )  # fmt: skip
    report = explain(tree, "--ranks", 16)
    layout = report["layout"]
    assert (layout["cp"], layout["ulysses"], layout["zero"], layout["dp_shard"]) == (2, 2, 3, 8)
    # DP is world / sequence_parallel_size (runtime/config.py), so 64 = 2 x 4 x 8
    assert report["batch"] | {"micro": 2, "global": 64, "accumulation": 4} == report["batch"]
    assert report["batch"]["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("tree", "world", "batch"),
    [
        # _set_batch_related_parameters: any missing one of the three is derived.
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, 4, (2, 32, 4)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, 4, (4, 32, 2)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, 4, (2, 24, 3)),
        ({"train_batch_size": 32}, 4, (8, 32, 1)),
        ({"train_micro_batch_size_per_gpu": 2}, 4, (2, 8, 1)),
    ],
)
def test_the_batch_is_derived_as_deepspeed_does(explain, tree, world, batch):
    report = explain(tree, "--ranks", world, "--seq-len", 1024)
    found = report["batch"]
    assert (found["micro"], found["global"], found["accumulation"]) == batch
    assert not rules(report, "error")


@pytest.mark.parametrize(
    ("tree", "world"),
    [
        ({"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4}, 4),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2,
          "gradient_accumulation_steps": 2}, 4),
        ({"train_batch_size": 0}, 4),
        ({"gradient_accumulation_steps": 2}, 4),
    ],
)  # fmt: skip
def test_a_batch_that_does_not_multiply_is_refused(explain, tree, world):
    report = explain(tree, "--ranks", world)
    if "errors" not in report:
        assert "deepspeed-batch" in rules(report, "error")
        legal = json.loads(report["source"]["legal"]["ds_config.json"])
        product = legal["train_micro_batch_size_per_gpu"] * legal["gradient_accumulation_steps"]
        assert legal["train_batch_size"] == product * world


def test_three_numbers_say_the_world(explain):
    tree = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2, "tensor_parallel": {"autotp_size": 2}}  # fmt: skip
    report = explain(tree)
    assert report["world"] == 16
    assert "deepspeed-world" in rules(report, "note")


def test_shard_groups_are_sizes_not_counts(explain):
    # runtime/zero/config.py: both are the ranks of a group, unlike dp_replicate elsewhere.
    for key in ("mics_shard_size", "zero_hpz_partition_size"):
        report = explain(config(zero_optimization={"stage": 3, key: 8}), "--ranks", 32)
        assert (report["layout"]["dp_shard"], report["layout"]["dp_replicate"]) == (8, 4)
    report = explain(config(zero_optimization={"stage": 3, "mics_shard_size": 6}), "--ranks", 32)
    assert "deepspeed-shard-groups" in rules(report, "error")
    report = explain(config(zero_optimization={"stage": 2, "mics_shard_size": 8}), "--ranks", 32)
    assert "deepspeed-shard-groups" in rules(report, "warning")
    assert report["layout"]["dp_replicate"] == 1


@pytest.mark.parametrize(
    ("tree", "rule", "level"),
    [
        (config(fp16={"enabled": True}, bf16={"enabled": True}), "deepspeed-two-dtypes", "error"),
        (config(zero_optimization={"stage": 1, "overlap_com": 1}),
         "deepspeed-unknown-key", "error"),
        (config(zero_optimisation={"stage": 1}), "deepspeed-ignored-key", "warning"),
        (config(sequence_parallel_size=6), "deepspeed-ulysses-heads", "error"),
        (config(sequence_parallel_size=16), "", ""),
        (config(expert_parallel={"enabled": True, "autoep_size": 4,
                                 "expert_tensor_parallel_size": 2}),
         "deepspeed-autoep-etp", "error"),
        (config(expert_parallel={"enabled": True, "load_balance_coeff": 1e-3}),
         "deepspeed-autoep-balance", "error"),
        (config(expert_parallel={"autoep_size": 4}), "deepspeed-autoep-off", "warning"),
        (config(zero_optimization={"stage": 1, "offload_param": {"device": "cpu"}}),
         "deepspeed-offload-param", "warning"),
        (config(zero_optimization={"stage": 0}, bf16={"enabled": True},
                data_types={"grad_accum_dtype": "fp32"}), "deepspeed-grad-dtype", "error"),
        (config(zero_optimization={"stage": 3}, gradient_allreduce_op="sum"),
         "deepspeed-allreduce-op", "error"),
        (config(elasticity={"enabled": True, "max_train_batch_size": 64,
                            "micro_batch_sizes": [2, 4]}), "deepspeed-elastic-batch", "error"),
    ],
)  # fmt: skip
def test_rules_of_the_configuration(explain, tree, rule, level):
    moe = "expert_parallel" in tree
    world = 48 if tree.get("sequence_parallel_size") == 6 else 16
    report = explain(tree, "--ranks", world, model="qwen3-30b-a3b" if moe else "llama3.1-8b")
    assert not rule or rule in rules(report, level)


@pytest.mark.parametrize(
    ("most", "micros", "batch", "fewest"),
    [
        # tests/unit/elasticity/test_elastic.py of DeepSpeed has 9792; the others are what its
        # _get_compatible_gpus_v01 answers (elasticity/elasticity.py, 0.19.6).
        (10000, (8, 12, 16, 17), 9792, 32),
        (10000, (8, 12, 16, 17), 8640, 1),
        (2000, (2, 4, 6), 1680, 1),
        (64, (2, 4), 48, 1),
        (100, (7,), 84, 1),
    ],
)
def test_the_elastic_batch(explain, most, micros, batch, fewest):
    found, worlds = Elastic(most, micros, fewest, 1500 if fewest > 1 else 10000).batch()
    assert (found, min(worlds) >= fewest) == (batch, True)
    if fewest > 1:
        return
    tree = {"elasticity": {"enabled": True, "max_train_batch_size": most, "version": 0.1,
                           "micro_batch_sizes": list(micros), "min_gpus": 1}}  # fmt: skip
    report = explain(tree, "--ranks", 4, "--seq-len", 1024)
    assert report["batch"]["global"] == batch
    assert report["batch"]["micro"] == max(m for m in micros if batch // 4 % m == 0)
    assert "deepspeed-elastic-world" in rules(explain(tree, "--ranks", 13), "error")


def test_defaults_of_the_accounting(explain):
    # get_data_types: gradients are of the dtype of the model, unless data_types says otherwise.
    report = explain(config(zero_optimization={"stage": 1}, fp16={"enabled": True}), "--ranks", 4)
    assert report["batch"]["grad_dtype"] == "float16"
    tree = config(zero_optimization={"stage": 1}, bf16={"enabled": True},
                  data_types={"grad_accum_dtype": "fp32"})  # fmt: skip
    assert explain(tree, "--ranks", 4)["batch"]["grad_dtype"] == "float32"


@pytest.mark.parametrize("key", ["amp", "sparse_attention", "curriculum_learning", "elasticity"])
def test_what_the_newest_release_has_lost(explain, key):
    # runtime/config.py of 0.19.8, _REMOVED_TOP_LEVEL_CONFIG_KEYS
    report = explain(config(**{key: {"enabled": False}}), "--ranks", 4)
    assert "deepspeed-gone" in rules(report, "warning")
    assert "deepspeed-gone" not in rules(explain(config(), "--ranks", 4))


def test_auto_is_left_to_the_trainer(explain):
    tree = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}  # fmt: skip
    report = explain(tree, "--ranks", 8)
    assert "deepspeed-auto" in rules(report, "note")
    script = (
        "deepspeed --num_gpus 8 run.py --deepspeed ds_config.json --bf16 true --model_name_or_path "
        "meta-llama/Llama-3.1-8B --per_device_train_batch_size 2 --gradient_accumulation_steps 4 "
        "--max_seq_length 2048 --gradient_checkpointing true\n"
    )
    report = explain(script, name="run.sh", model=None)
    assert (report["world"], report["layout"]["zero"], report["layout"]["recompute"]) == (
        8,
        2,
        "full",
    )
    batch = report["batch"]
    assert (batch["micro"], batch["global"], batch["seq_len"]) == (2, 64, 2048)
    assert batch["dtype"] == "bfloat16"
    assert report["model"]["name"].startswith("llama3")
    assert not report["source"]["unknown"]


def test_hjson_and_templates(explain):
    # runtime/config.py reads Hjson; json.load of Hugging Face's integration does not.
    report = explain('{"train_batch_size": 8, // all\n "fp16": {"enabled": true,},}', "--ranks", 8)
    assert "deepspeed-not-json" in rules(report, "warning")
    text = '{"train_batch_size": GBSIZE, "zero_optimization": {"stage": ZERO_STAGE}}'
    errors = explain(text, "--ranks", 8)["errors"]
    assert {e["where"] for e in errors} == {"train_batch_size", "zero_optimization.stage"}
    report = explain(text, "--ranks", 8, "--global-batch", 16, "--zero", 1)
    assert report["layout"]["zero"] == 1
    assert "deepspeed-duplicate-keys" in rules(
        explain('{"train_batch_size": 8, "train_batch_size": 8}', "--ranks", 8), "error"
    )


MEGATRON = """#!/bin/bash
tp=2; pp=4; zero={zero}
cat <<EOF > ds.json
{{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "zero_optimization":
  {{"stage": $zero}}, "bf16": {{"enabled": true}}}}
EOF
ARGS="--tensor-model-parallel-size $tp --pipeline-model-parallel-size $pp --num-layers 24 \\
  --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 \\
  --micro-batch-size 2 --global-batch-size 64 --train-iters 100 --lr 1e-4 --bf16 \\
  --vocab-size 50304 --checkpoint-activations {more}"
deepspeed --num_nodes 2 --num_gpus 8 pretrain_gpt.py $ARGS --deepspeed \\
  --deepspeed_config ds.json --zero-stage $zero
"""


def test_a_script_of_megatron_deepspeed(explain):
    report = explain(MEGATRON.format(zero=1, more=""), name="run.sh", model=None)
    layout = report["layout"]
    assert (layout["tp"], layout["pp"], layout["dp_shard"], layout["zero"]) == (2, 4, 2, 1)
    assert (layout["recompute"], report["world"]) == ("full", 16)
    assert report["model"]["layers"] == 24
    assert not report["source"]["unknown"]
    assert not rules(report, "error")


def test_the_pipeline_engine_refuses_zero_2(explain):
    # runtime/pipe/engine.py: ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism
    report = explain(MEGATRON.format(zero=2, more=""), name="run.sh", model=None)
    assert "deepspeed-pipeline-zero" in rules(report, "error")
    legal = report["source"]["legal"]
    assert json.loads(legal["ds_config.json"])["zero_optimization"]["stage"] == 1
    assert "--pipeline-model-parallel-size 4" in legal["launch.sh"]


@pytest.mark.parametrize(
    ("more", "rule", "level"),
    [
        ("--no-pipeline-parallel", "megatron-deepspeed-no-pipeline", "error"),
        ("--enable-zbh1-pipeline --sequence-parallel", "megatron-deepspeed-zbh1", "error"),
        ("--enable-zbh1-pipeline", "", ""),
        ("--tensor-model-parallel-size 32", "megatron-deepspeed-clamp", "warning"),
    ],
)
def test_rules_of_megatron_deepspeed(explain, more, rule, level):
    report = explain(MEGATRON.format(zero=1, more=more), name="run.sh", model=None)
    assert not rule or rule in rules(report, level)
    if more == "--enable-zbh1-pipeline":
        assert report["layout"]["schedule"] == "zb-h1"


def test_ulysses_and_experts_of_megatron_deepspeed(explain):
    more = "--ds-sequence-parallel-size 2"
    report = explain(MEGATRON.format(zero=1, more=more), name="run.sh", model=None)
    assert (report["layout"]["cp"], report["layout"]["ulysses"]) == (2, 2)
    more = "--num-experts 8 --moe-expert-parallel-size 2 --disable-moe-token-dropping"
    report = explain(MEGATRON.format(zero=1, more=more), name="run.sh", model=None)
    assert (report["layout"]["ep"], report["layout"]["etp"]) == (2, 1)
    # one layer in two, top 1 (arguments.py: --expert-interval 2, --topk 1)
    assert report["model"]["active_parameters"] < report["model"]["parameters"]


def test_a_configuration_that_is_not_there_is_said(explain):
    text = "deepspeed --num_gpus 8 t.py --deepspeed_config /data/none.json"
    report = explain(text, name="run.sh")
    assert "deepspeed-no-configuration" in rules(report, "warning")


def test_a_hostfile_beside_the_script(explain, tmp_path):
    (tmp_path / "hosts").write_text("one slots=8\ntwo slots=8\n")
    text = "deepspeed --hostfile hosts t.py --zero_stage 2 --per_device_train_batch_size 1"
    assert explain(text, name="run.sh")["world"] == 16


def test_a_command_without_deepspeed_is_a_wrong_question():
    with pytest.raises(UserError, match="DeepSpeed"):
        deepspeed.read(Source("python train.py", "command"), Told())


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(jobs())
def test_what_is_written_is_read_back(job):
    back, noted = read_back(deepspeed, job)
    for field in differences(job, back):
        if not field.startswith("model."):
            words = SAID_WHY[field].split()
            assert any(word in rule for rule in noted for word in words), (field, noted)


HOSTILE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**400), 10**400), st.text(max_size=5),
              st.floats(allow_nan=True, allow_infinity=True), st.sampled_from(["auto", "$X", "1"])),
    lambda inner: st.one_of(st.lists(inner, max_size=2),
                            st.dictionaries(st.sampled_from(["stage", "enabled", "a.b"]), inner,
                                            max_size=2)),
    max_leaves=4,
)  # fmt: skip
KEYS = st.sampled_from([
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "zero_optimization", "bf16", "fp16", "sequence_parallel_size", "tensor_parallel",
    "expert_parallel", "optimizer", "scheduler", "gradient_clipping", "elasticity", "data_types",
    "activation_checkpointing", "pipeline", "x",
])  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(KEYS, HOSTILE, max_size=5))
def test_hostile_values_end_in_lines(tree):
    source = Source(json.dumps(tree), "ds.json", Path("/nowhere/ds.json"))
    assert all("\n" not in f.message for f in problems(deepspeed, source))


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet='{}[]",: abtruefalsn1.-/*#\n$', max_size=40))
def test_any_text_is_read_or_refused(text):
    assert all(
        "\n" not in f.message
        for f in problems(deepspeed, Source(text, "d.json", Path("/no/d.json")))
    )


def test_a_batch_that_the_trainer_fills_in_is_no_error(explain):
    sizes = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    text = json.dumps({**sizes, "zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}})
    report = explain(text, "--ranks", "8")
    assert not rules(report, "error")
    assert "deepspeed-auto" in {f["rule"] for f in report["findings"]}
    assert report["layout"]["zero"] == 3
    assert report["layout"]["dp_shard"] == 8


def test_known_keys_are_listed_once():
    keys = deepspeed_json.known()
    assert len(keys) == len(set(keys))


def test_the_commands_of_the_page_run(capsys):
    for words in commands_of("deepspeed"):
        assert main(words) == 0
        assert capsys.readouterr().out


def test_a_mixture_that_only_the_caller_knows_of(explain, monkeypatch):
    monkeypatch.setenv("PLAIT_DEBUG", "1")
    report = explain(MEGATRON.format(zero=1, more=""), name="run.sh", model="qwen3-30b-a3b")
    assert report["model"]["name"] == "qwen3-30b-a3b"


def test_flags_of_the_forks_are_known(explain):
    text = (
        "deepspeed --num_gpus 8 pretrain_gpt.py --num-layers 4 --hidden-size 256 "
        "--num-attention-heads 4 --seq-length 512 --max-position-embeddings 512 "
        "--micro-batch-size 2 --global-batch-size 64 --rampup-batch-size 16 16 6_000_000 "
        "--embed-layernorm --position-embedding-type alibi --vocab-size 32000 "
        "--pad-vocab-size-to 32128 --kill-switch-path /tmp/stop --tokenizer-name-or-path t5 "
        "--train-weighted-split-paths-path a.txt --deepspeed --zero-stage 1\n"
    )
    report = explain(text, name="train.sh", model=None)
    assert not rules(report, "error")
    assert report["source"]["unknown"] == []
    assert report["model"]["embed_norm"]
    assert report["batch"]["global"] == 64


def test_what_is_echoed_before_it_starts_is_not_the_launch(explain):
    text = """#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gres=gpu:8
N_NODES=$SLURM_NNODES
export LAUNCHER="python -u -m torch.distributed.run --nproc_per_node 8 --nnodes $N_NODES"
export CMD=" `pwd`/pretrain_gpt.py --tensor-model-parallel-size 2 --num-layers 4 \\
    --hidden-size 256 --num-attention-heads 4 --seq-length 512 --max-position-embeddings 512 \\
    --micro-batch-size 2 --global-batch-size 64 --vocab-size 32000 --deepspeed --zero-stage 1 "
echo $CMD
clear; srun --jobid $SLURM_JOBID bash -c "$LAUNCHER --node_rank \\$SLURM_PROCID $CMD" | tee log
"""
    report = explain(text, name="train.slurm", model=None)
    assert report["world"] == 32
    assert report["layout"]["tp"] == 2
    assert report["layout"]["dp_shard"] == 16
