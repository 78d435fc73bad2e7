"""Megatron-Bridge: recipes, overrides, YAML and Python; its rules; the way back.

Expected values are those of its sources at 067f987d; comments name file and function.
"""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings

from launches import differences, jobs
from plait.cli.main import main
from plait.dialects import megatron_bridge as bridge
from plait.dialects.flags import Word
from plait.dialects.launch import Told
from plait.dialects.megatron_bridge import recipes
from plait.dialects.megatron_bridge.python import read_python
from plait.dialects.megatron_bridge.words import read_words, value_of
from plait.dialects.source import Source, read_file
from plait.spec.findings import UserError
from plait.spec.jobfile import draft

RUN = "torchrun --nproc-per-node 8 --nnodes 2 scripts/training/run_recipe.py"


def of(text: str, name: str = "command", world: int | None = None, **siblings: str):
    path = Path(name) if "." in name else None
    named = {key.replace("__", "."): value for key, value in siblings.items()}
    return bridge.read(Source(text, name, path, named), Told({}, world))


def explained(capsys, *argv):
    code = main(["explain", "--json", "--from", "megatron-bridge", *argv])
    return code, json.loads(capsys.readouterr().out)


def rules_of(answer) -> dict[str, str]:
    return {f["rule"]: f["level"] for f in answer["findings"]}


# --- recipes ---------------------------------------------------------------------------------


def test_recipe_and_overrides(capsys):
    code, answer = explained(
        capsys,
        f"{RUN} --recipe llama3_8b_pretrain_config -tp 4 model.sequence_parallel=true "
        "model.pipeline_model_parallel_size=2 train.global_batch_size=512",
    )
    # recipes/llama/h100/llama3.py: CP 2, sequence 8192, micro batch 1.
    layout = answer["layout"]
    assert (layout["tp"], layout["pp"], layout["cp"], layout["dp_shard"]) == (4, 2, 2, 1)
    assert (answer["batch"]["global"], answer["batch"]["seq_len"]) == (512, 8192)
    assert answer["model"]["name"] == "llama3-8b"
    assert layout["zero"] == 1
    assert not answer["source"]["unknown"]
    assert code in (0, 1)


@pytest.mark.parametrize(
    ("name", "model", "said"),
    [
        # recipes/llama/h100/llama3.py
        ("llama32_1b_pretrain_config", "llama3.2-1b", {"tp": 1, "cp": 1, "seq": 8192, "gbs": 512}),
        ("llama3_8b_pretrain_16gpu_h100_bf16_16k_config", "llama3-8b",
         {"tp": 4, "pp": 2, "cp": 2, "seq": 16384, "sp": True}),
        # recipes/deepseek/h100/deepseek_v3.py
        ("deepseek_v3_pretrain_config", "deepseek-v3",
         {"tp": 2, "pp": 16, "ep": 64, "etp": 1, "gbs": 4096, "seq": 4096}),
        # recipes/qwen/h100/qwen3_moe.py
        ("qwen3_30b_a3b_pretrain_config", "qwen3-30b-a3b", {"tp": 1, "ep": 8}),
    ],
)  # fmt: skip
def test_recipes_are_what_their_sources_say(name, model, said):
    recipe = recipes.recipe(name)
    words = {
        "tp": "model.tensor_model_parallel_size", "pp": "model.pipeline_model_parallel_size",
        "cp": "model.context_parallel_size", "ep": "model.expert_model_parallel_size",
        "etp": "model.expert_tensor_parallel_size", "sp": "model.sequence_parallel",
        "seq": "dataset.seq_length", "gbs": "train.global_batch_size",
    }  # fmt: skip
    assert recipe.model == {"model": model}
    if name != "qwen3_30b_a3b_pretrain_config":
        assert {word: recipe.settings.get(words[word]) for word in said} == said
    assert recipe.settings["checkpoint.ckpt_format"] == "torch_dist"


def test_every_recipe_builds_a_layout():
    """None of them names a field or a model that plait does not have."""
    table = recipes._table()
    known = recipes.known_fields()
    assert len(table["recipes"]) > 900
    for name, entry in table["recipes"].items():
        if isinstance(entry, str):
            assert entry in table["recipes"]
            continue
        made = recipes.recipe(name)
        assert made.settings.keys() <= known, name
        assert made.model or made.lacks or not made.hub, name
    for hub, about in table["models"].items():
        if "fields" in about:
            assert draft("plan", None, about["fields"] | {"ranks": 1}).findings == [], hub


def test_unknown_recipe_names_the_nearest(capsys):
    words = f"{RUN} --recipe llama3_8b_pretrian_config model.tensor_model_parallel_size=2"
    code, answer = explained(capsys, words)
    assert code == 2
    assert "llama3_8b_pretrain_config" in [e["nearest"] for e in answer["errors"]]
    code, answer = explained(capsys, words, "--model", "llama3-8b")
    assert answer["layout"]["tp"] == 2
    assert rules_of(answer)["megatron-bridge-recipe"] == "warning"


def test_model_and_mode_select_a_recipe():
    launch = of(f"{RUN} --model gpt_oss_20b --mode lora checkpoint.pretrained_checkpoint=/x")
    assert launch.fields["model"] == "gpt-oss-20b"
    assert launch.facts["peft"]


def test_a_hybrid_model_is_asked_for(capsys):
    code, answer = explained(capsys, f"{RUN} --recipe nemotronh_8b_pretrain_config")
    assert code == 2
    assert "Mamba" in answer["errors"][0]["message"]
    assert "--model" in answer["errors"][0]["message"]
    code, answer = explained(
        capsys, f"{RUN} --recipe nemotronh_8b_pretrain_config", "--model", "llama3-8b"
    )
    assert code in (0, 1)
    assert answer["layout"]["tp"] == 2  # recipes/nemotronh/h100/nemotronh.py


def test_performance_script():
    launch = of(
        "python scripts/performance/setup_experiment.py -m llama -mr llama3_8b -ng 8 -g h100 "
        "-c bf16 --account a --partition p -tp 2 -mb 1 -gb 64"
    )
    # perf_recipes/llama/h100: llama3_8b_pretrain_8gpu_h100_bf16_config has CP 2.
    assert launch.fields["layout.tp"] == 2
    assert launch.fields["layout.cp"] == 2
    assert launch.fields["ranks"] == 8
    assert launch.fields["train.global_batch"] == 64
    assert not launch.unknown()


def test_a_benchmark_keeps_its_samples_per_rank():
    """run_recipe._apply_benchmark_weak_scaling: 128 on 8 GPUs becomes 256 on 16."""
    name = "llama3_8b_pretrain_8gpu_h100_bf16_config"
    launch = of(f"{RUN} --recipe {name}")
    assert launch.fields["train.global_batch"] == 256
    assert any(f.rule == "megatron-bridge-weak-scaling" for f in launch.findings)
    explicit = of(f"{RUN} --recipe {name} -gb 128")
    assert explicit.fields["train.global_batch"] == 128
    alone = of(f"python scripts/training/run_recipe.py --recipe {name}")
    assert alone.fields["ranks"] == 8


# --- words -----------------------------------------------------------------------------------


def test_hydra_words():
    words = read_words(
        [
            Word(w)
            for w in (
                "--recipe",
                "x_config",
                "-tp",
                "2",
                "+model.new=[a,[b,c]]",
                "~checkpoint.save",
                "optimizer.lr=1e-4",
                "checkpoint.load=null",
                "dataset.split='\"9,8,2\"'",
            )
        ]
    )
    said = {s.name: s.value for s in words.overrides}
    assert said == {
        "model.tensor_model_parallel_size": "2", "model.new": ["a", ["b", "c"]],
        "optimizer.lr": "1e-4", "checkpoint.load": None, "dataset.split": "9,8,2",
    }  # fmt: skip
    assert words.added == {"model.new"}
    assert words.removed == {"checkpoint.save"}
    assert words.flags["--recipe"].value == "x_config"


@pytest.mark.parametrize(
    ("text", "value"),
    [("null", None), ("None", None), ("[]", []), ("[1, 2]", ["1", "2"]), ("'a b'", "a b"),
     ("[[embedding,decoder],[decoder,loss]]", [["embedding", "decoder"], ["decoder", "loss"]])],
)  # fmt: skip
def test_values(text, value):
    assert value_of(text) == value


def test_a_variable_is_asked_for_where_it_decides():
    """checkpoint.async_save=$ASYNC is nobody's matter; the tensor parallel degree is."""
    launch = of(f"{RUN} --recipe llama3_8b_pretrain_config checkpoint.async_save=$ASYNC")
    assert not launch.settings.findings
    launch = of(f"{RUN} --recipe llama3_8b_pretrain_config model.tensor_model_parallel_size=$TP")
    assert [f.rule for f in launch.settings.findings] == ["open-variable"]


@pytest.mark.parametrize(
    ("words", "model", "world"),
    [
        # Releases 0.1 and 0.2.
        ("setup_experiment.py --model_name llama3 --model_size 8b --gpu h100 -ng 8 -c bf16",
         "llama3-8b", 8),
        ("setup_experiment.py -m deepseek -mr deepseek_v3 -g h100 -ng 1024 -c fp8 --fp8_recipe sc",
         "deepseek-v3", 1024),
        ("launch_with_nemo_run.py --local --script run_recipe.py --recipe qwen3_8b_sft_config "
         "--devices 4 --nodes 2 train.train_iters=10", "qwen3-8b", 8),
        ("setup_experiment.py --nodes 2 --gpus-per-node 8 --account a --partition p "
         "--recipe qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config --srun-arg=--mpi=pmix",
         "qwen3-30b-a3b", 16),
    ],
)  # fmt: skip
def test_launchers(words, model, world):
    launch = of(f"python scripts/{words}")
    assert launch.fields["model"] == model
    assert launch.fields["ranks"] == world
    assert not launch.unknown()
    assert not launch.settings.findings


def test_unknown_override_gets_the_nearest():
    launch = of(f"{RUN} --recipe llama3_8b_pretrain_config model.tensor_model_paralel_size=4")
    unknown = [(s.name, near) for s, near in launch.unknown()]
    assert unknown == [("model.tensor_model_paralel_size", "model.tensor_model_parallel_size")]


def test_a_script_of_slurm_with_several_configurations():
    """The shape of examples/models/*/slurm_pretrain.sh: guards, arrays, `read`, bash -c."""
    launch = of(
        """#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
NAME=gpt_oss_20b
RECIPE="${RECIPE:-${NAME}_pretrain_config}"
LENGTH=4096
CONFIGS=("2,4,2,1,True" "1,8,4,1,False")
IMAGE=""
if [ -z "$IMAGE" ]; then
    echo "set IMAGE"
    exit 1
fi
SRUN="srun --mpi=pmix --container-image=$IMAGE"
export CUDA_DEVICE_MAX_CONNECTIONS=1
for CONFIG in "${CONFIGS[@]}"; do
    IFS=',' read -r TP PP EP CP SP <<< "$CONFIG"
    OVERRIDES=" \\
        dataset.seq_length=$LENGTH \\
        train.global_batch_size=128 \\
        model.context_parallel_size=$CP \\
        model.pipeline_model_parallel_size=$PP \\
        model.tensor_model_parallel_size=$TP \\
        model.sequence_parallel=$SP \\
        model.expert_model_parallel_size=$EP"
    CMD="uv run --no-sync python /opt/scripts/training/run_recipe.py --recipe $RECIPE $OVERRIDES"
    $SRUN bash -c "$CMD"
done
""",
        "launch.sh",
    )
    fields = launch.fields
    assert {axis: fields[f"layout.{axis}"] for axis in ("tp", "pp", "ep", "cp")} == {
        "tp": 2, "pp": 4, "ep": 2, "cp": 1,
    }  # fmt: skip
    assert fields["ranks"] == 32
    assert fields["layout.sequence_parallel"] is True
    assert launch.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert not launch.settings.findings


# --- YAML and Python -------------------------------------------------------------------------

YAML = """\
model:
  tensor_model_parallel_size: 2
  sequence_parallel: true
train:
  global_batch_size: 64
  micro_batch_size: 2
dataset:
  seq_length: 2048
optimizer:
  lr: 1e-4
logger:
  log_interval: 1
"""


def test_overrides_in_a_file():
    launch = of(YAML, "overrides.yaml")
    assert launch.fields["layout.tp"] == 2
    assert launch.fields["train.seq_len"] == 2048
    assert "model" not in launch.fields
    assert not launch.unknown()


def test_a_file_beside_a_command_is_weaker_than_its_words():
    launch = of(
        f"{RUN} --recipe llama32_1b_pretrain_config --config-file overrides.yaml "
        "train.micro_batch_size=1",
        overrides__yaml=YAML,
    )
    assert launch.fields["layout.tp"] == 2
    assert launch.fields["layout.micro_batch"] == 1
    assert launch.fields["train.global_batch"] == 64


def test_a_saved_container():
    """ConfigContainer.to_yaml writes classes and dtypes as _target_."""
    launch = of(
        """\
_target_: megatron.bridge.training.config.ConfigContainer
model:
  _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
  num_layers: 8
  hidden_size: 512
  num_attention_heads: 8
  num_query_groups: 4
  ffn_hidden_size: 1408
  gated_linear_unit: true
  activation_func: silu
  normalization: RMSNorm
  add_bias_linear: false
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  vocab_size: 32000
  tensor_model_parallel_size: 2
  params_dtype: {_target_: torch.bfloat16, _call_: false}
train: {global_batch_size: 8, micro_batch_size: 1}
dataset: {seq_length: 512}
mixed_precision: bf16_mixed
""",
        "saved.yaml",
    )
    fields = launch.fields
    assert fields["model.layers"] == 8
    assert fields["model.kv_heads"] == 4
    assert fields["model.mlp"] == "swiglu"
    assert fields["model.tied"] is False
    assert fields["layout.tp"] == 2
    assert not launch.unknown()


PROGRAM = """
import argparse
from megatron.bridge.recipes.llama import llama32_1b_pretrain_config as base
from megatron.bridge.training.pretrain import pretrain

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp-size", type=int, default=2)
    args = parser.parse_args()
    cfg = base()
    cfg.model.tensor_model_parallel_size = args.tp_size
    cfg.model.sequence_parallel = args.tp_size > 1
    seq_length = 1024 * 4
    cfg.model.seq_length = seq_length
    cfg.dataset.seq_length = seq_length
    cfg.train.global_batch_size = 32
    pretrain(config=cfg)

if __name__ == "__main__":
    main()
"""


def test_a_program_that_changes_a_recipe():
    launch = of(PROGRAM, "train.py")
    assert launch.fields["model"] == "llama3.2-1b"
    assert launch.fields["layout.tp"] == 2
    assert launch.fields["layout.sequence_parallel"] is True
    assert launch.fields["train.seq_len"] == 4096
    assert launch.fields["train.global_batch"] == 32


def test_a_script_beside_the_launch_is_read():
    launch = of(
        "torchrun --nproc-per-node 4 train.py model.tensor_model_parallel_size=4",
        train__py=PROGRAM,
    )
    assert launch.fields["model"] == "llama3.2-1b"
    assert launch.fields["layout.tp"] == 4
    assert launch.fields["ranks"] == 4


def test_a_test_with_a_table_of_recipes(tmp_path):
    """The shape of tests/functional_tests: pytest under torchrun, named from the root."""
    tests = tmp_path / "tests" / "recipes"
    tests.mkdir(parents=True)
    (tests / "test_small.py").write_text(
        """
from megatron.bridge.recipes.llama import llama32_1b_pretrain_config as small

RECIPES = [
    (small, "small", {"tensor_model_parallel_size": 2}, {"num_layers": 2}, {}),
    (small, "other", {}, {}, {}),
]
"""
    )
    script = tmp_path / "launch" / "active" / "run.sh"
    script.parent.mkdir(parents=True)
    script.write_text(
        "uv run python -m torch.distributed.run --nproc_per_node=2 --nnodes=1 -m coverage run "
        "--data-file=x -m pytest -o log_cli=true -v -s -rA tests/recipes/test_small.py\n"
    )
    launch = bridge.read(read_file(script), Told())
    assert launch.fields["model"] == "llama3.2-1b"
    assert launch.fields["model.layers"] == 2
    assert launch.fields["layout.tp"] == 2
    assert launch.fields["ranks"] == 2
    assert not launch.unknown()


def test_a_container_of_providers():
    program = read_python(
        Source(
            """
from dataclasses import dataclass

@dataclass
class Small(GPTModelProvider):
    normalization: str = "RMSNorm"
    num_layers: int = 16
    hidden_size: int = 2048
    num_attention_heads: int = 32

def config():
    layers = [["embedding"] + ["decoder"] * 8] + [["decoder"] * 8 + ["loss"]]
    return ConfigContainer(
        model=Small(pipeline_model_parallel_size=2, pipeline_model_parallel_layout=layers),
        train=TrainingConfig(global_batch_size=8, micro_batch_size=1),
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=True),
    )
""",
            "config.py",
        )
    )
    said = {s.name: s.value for s in program.settings}
    assert said["model.num_layers"] == 16
    assert said["model.pipeline_model_parallel_layout"][1] == ["decoder"] * 8 + ["loss"]
    assert said["ddp.use_distributed_optimizer"] is True


def test_a_model_by_its_name_on_the_hub():
    launch = of(
        """
cfg = _pretrain_common()
cfg.model = AutoBridge.from_hf_pretrained("Qwen/Qwen3-8B").to_megatron_provider(load_weights=False)
cfg.model.tensor_model_parallel_size = 4
""",
        "recipe.py",
    )
    assert launch.fields["model"] == "qwen3-8b"
    assert launch.fields["layout.tp"] == 4
    # recipes/common.py, _pretrain_common.
    assert (launch.fields["train.global_batch"], launch.fields["layout.micro_batch"]) == (32, 2)


def test_a_model_by_the_class_that_provides_it():
    launch = of(
        """
cfg = ConfigContainer(
    model=Llama32ModelProvider1B(tensor_model_parallel_size=2, num_layers=4),
    train=TrainingConfig(global_batch_size=8, micro_batch_size=1),
)
""",
        "train.py",
    )
    assert launch.fields["model"] == "llama3.2-1b"
    assert launch.fields["model.layers"] == 4
    assert launch.fields["layout.tp"] == 2


# --- rules -----------------------------------------------------------------------------------


GRID = (
    f"CUDA_DEVICE_MAX_CONNECTIONS=1 {RUN} model.tensor_model_parallel_size=4 "
    "model.expert_model_parallel_size=8 model.pipeline_model_parallel_size=2 "
    "model.sequence_parallel=true"
)


def test_experts_are_whole_by_default():
    """models/transformer_config.py: an unset ETP is 1 where EP is above 1, not TP as in Megatron;
    older releases leave it to Megatron, which the note says."""
    launch = of(GRID)
    assert launch.fields["layout.etp"] == 1
    note = next(f for f in launch.findings if f.rule == "megatron-bridge-etp")
    assert "older releases" in note.message
    assert "32 ranks" in note.message


def test_expert_grid(capsys):
    """ETP 4 x EP 8 x PP 2 is 64 on 16 GPUs. The nearest legal command says another ETP."""
    text = f"{GRID} model.expert_tensor_parallel_size=4"
    code, answer = explained(
        capsys, f"{text} train.global_batch_size=16 train.micro_batch_size=1",
        "--model", "mixtral-8x7b",
    )  # fmt: skip
    assert code == 1
    assert rules_of(answer)["megatron-expert-grid"] == "error"
    grid = next(f for f in answer["findings"] if f["rule"] == "megatron-expert-grid")
    assert "= 64 does not divide the world of 16" in grid["message"]
    legal = answer["source"]["legal"]["launch.sh"]
    launch = of(legal, "launch.sh")
    assert launch.fields["layout.etp"] == 1
    made = draft("plan", None, launch.fields)
    assert not made.findings
    assert not [f for f in bridge.check(launch, made.job) if f.level == "error"]


def test_lengths_of_model_and_data():
    """run_recipe makes the model's length that of the data; without it they must agree
    (training/config.py, validate)."""
    synced = of(f"{RUN} --recipe llama3_8b_pretrain_config model.seq_length=4096")
    assert synced.fields["train.seq_len"] == 8192
    assert [f.level for f in synced.findings if f.rule == "megatron-bridge-seq-length"] == [
        "warning"
    ]
    alone = of("cfg = llama3_8b_pretrain_config()\ncfg.model.seq_length = 4096\n", "train.py")
    assert [f.level for f in alone.findings if f.rule == "megatron-bridge-seq-length"] == ["error"]


def test_precision_decides_over_ddp():
    """MixedPrecisionConfig.setup writes its grad_reduce_in_fp32 into ddp."""
    launch = of(f"{RUN} --recipe llama3_8b_pretrain_config ddp.grad_reduce_in_fp32=false")
    assert launch.fields["train.grad_dtype"] == "float32"
    assert any(f.rule == "megatron-bridge-grad-dtype" for f in launch.findings)
    assert launch.fields["train.dtype"] == "bfloat16"
    half = of(f"{RUN} --recipe llama3_8b_pretrain_config mixed_precision=fp16_mixed")
    assert half.fields["train.dtype"] == "float16"
    assert half.fields["train.grad_dtype"] == "float16"
    wrong = of(f"{RUN} --recipe llama3_8b_pretrain_config mixed_precision=bf16_mixd")
    finding = next(f for f in wrong.findings if f.rule == "megatron-bridge-precision")
    assert finding.suggest == {"mixed_precision": "bf16_mixed"}


def test_distributed_optimizer_in_two_places():
    """_validate_and_sync_distributed_optimizer_settings: either switches both on."""
    launch = of(f"{RUN} --recipe llama3_8b_pretrain_config ddp.use_distributed_optimizer=false")
    assert launch.fields["layout.zero"] == 1
    assert any(f.rule == "megatron-bridge-distributed-optimizer" for f in launch.findings)
    both = of(
        f"{RUN} --recipe llama3_8b_pretrain_config ddp.use_distributed_optimizer=false "
        "optimizer.use_distributed_optimizer=false"
    )
    assert both.fields["layout.zero"] == 0


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("ddp.use_megatron_fsdp=true", "megatron-bridge-fsdp-checkpoint"),
        ("checkpoint.ckpt_format=fsdp_dtensor", "megatron-bridge-fsdp-dtensor"),
        ("dist.use_torch_fsdp2=true ddp.use_megatron_fsdp=true", "megatron-bridge-two-fsdp"),
        ("ddp.use_megatron_fsdp=true ddp.megatron_fsdp_version=2", "megatron-bridge-fsdp-v2"),
        ("comm_overlap.overlap_moe_expert_parallel_comm=true", "megatron-bridge-ep-overlap"),
        ("comm_overlap.delay_wgrad_compute=true", "megatron-bridge-late-wgrad"),
        ("dataset.enable_offline_packing=true train.micro_batch_size=2",
         "megatron-bridge-packed-micro-batch"),
        ("dataset.enable_in_batch_packing=true", "megatron-bridge-in-batch-packing"),
    ],
)  # fmt: skip
def test_refusals(words, rule):
    launch = of(f"{RUN} --recipe llama3_8b_pretrain_config {words}")
    job = draft("plan", None, launch.fields).job
    found = {f.rule: f.level for f in [*launch.findings, *bridge.check(launch, job)]}
    assert found.get(rule) == "error", found


def test_overlap_that_is_switched_off():
    launch = of(f"{RUN} --recipe llama3_8b_pretrain_config comm_overlap.tp_comm_overlap=true")
    assert any(f.rule == "megatron-bridge-tp-overlap" for f in launch.findings)


def test_connections_are_a_wish():
    """Only Megatron-LM's argument layer asserts one connection; training/config.py has the rule
    of Megatron-FSDP alone."""
    words = "--recipe llama3_8b_pretrain_config model.tensor_model_parallel_size=2"
    for value, level in (("", "warning"), ("8", "warning"), ("1", None)):
        launch = of(f"{f'CUDA_DEVICE_MAX_CONNECTIONS={value} ' if value else ''}{RUN} {words}")
        job = draft("plan", None, launch.fields).job
        found = {f.rule: f.level for f in bridge.check(launch, job)}
        assert found.get("megatron-connections") == level
    fsdp = "ddp.use_megatron_fsdp=true checkpoint.ckpt_format=fsdp_dtensor"
    launch = of(f"CUDA_DEVICE_MAX_CONNECTIONS=1 {RUN} {words} {fsdp}")
    job = draft("plan", None, launch.fields).job
    found = {f.rule: f.level for f in bridge.check(launch, job)}
    assert found["megatron-connections"] == "error"


def test_adapters_need_a_checkpoint():
    launch = of(f"{RUN} --recipe llama3_8b_peft_config")
    job = draft("plan", None, launch.fields).job
    found = {f.rule: f.level for f in bridge.check(launch, job)}
    assert found["megatron-bridge-peft-checkpoint"] == "error"
    assert found["megatron-bridge-peft"] == "warning"


def test_uneven_stages_are_told_stage_by_stage():
    """A memory estimate that takes all stages for equal is wrong where they are not."""
    launch = of(f"{RUN} --recipe deepseek_v3_pretrain_config")
    # recipes/deepseek/h100/deepseek_v3.py: 4 layers on each of 15 stages, 1 on the last.
    assert launch.fields["layout.stages"] == (4,) * 15 + (1,)
    other = of(f"{RUN} --recipe deepseek_v3_pretrain_config -pp 8")
    stages = other.fields["layout.stages"]
    assert (len(stages), sum(stages), max(stages)) == (8, 61, 8)


# --- the way back ----------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(jobs())
def test_round_trip(job):
    written = bridge.write(job)
    name, text = next(iter(written.files.items()))
    launch = of(text, name)
    made = draft("plan", None, launch.fields)
    assert not made.findings
    assert not launch.unknown()
    wrong = [f for f in [*launch.findings, *bridge.check(launch, made.job)] if f.level == "error"]
    assert not wrong
    lost = differences(job, made.job)
    # The embedding is padded to a multiple of TP; what else is lost has a note.
    lost.pop("model.vocab", None)
    rules = {note.rule for note in written.notes}
    if "megatron-write-sp" in rules:
        lost.pop("layout.sequence_parallel", None)
    if "megatron-write-chunks" in rules:
        for field in ("layout.vpp", "layout.schedule", "layout.stages"):
            lost.pop(field, None)
    assert not lost


def test_gradients_that_cannot_be_said():
    job = draft(
        "plan", None, {"model": "llama3-8b", "ranks": 8, "train.grad_dtype": "bfloat16"}
    ).job
    assert "megatron-bridge-write-gradients" in {n.rule for n in bridge.write(job).notes}


# --- hostile ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("def (:", "x.py"),
        ("x = " + "[" * 500 + "]" * 500, "x.py"),
        ("import os\nos.system('touch never')\n", "x.py"),
        ("def f():\n    return f()\nf()\n", "x.py"),
        ("model: [\n", "x.yaml"),
        ("a: 1\n", "x.yaml"),
        ("- 1\n", "x.yaml"),
        ("echo $(rm -rf /)", "x.sh"),
        ("torchrun run_recipe.py", "command"),
        ("", "command"),
    ],
)
def test_hostile_input_is_a_line(text, name):
    with pytest.raises(UserError) as problem:
        of(text, name)
    assert all("\n" not in f.line() for f in problem.value.findings)


@pytest.mark.parametrize(
    "words",
    [
        "model.tensor_model_parallel_size=" + "9" * 400,
        "model.tensor_model_parallel_size=nan",
        "model.tensor_model_parallel_size=[1,2]",
        "model.tensor_model_parallel_size=0",
        "model.pipeline_model_parallel_layout=" + "t|" * 3000,
        "dataset.seq_length=-1 train.global_batch_size=0",
        "optimizer.lr=many",
        "model.moe_layer_freq=[[[[",
        "=x model.=3 .=4 +++=5",
    ],
)
def test_hostile_values_are_lines(words, capsys):
    code, answer = explained(capsys, f"{RUN} --recipe llama3_8b_pretrain_config {words}")
    assert code in (0, 1, 2)
    assert answer


def test_what_is_suggested_is_held_against_the_target_too(capsys):
    """The nearest length that the layout allows is 2; Megatron wants a multiple of TP 4."""
    command = f"{RUN} --recipe qwen3_30b_a3b_pretrain_config dataset.seq_length=3"
    code, answer = explained(capsys, command, "--dp-shard", "8")
    (text,) = answer["source"]["legal"].values()
    assert code == 1
    assert "dataset.seq_length=4 " in text
    code, answer = explained(capsys, text)
    assert code == 0, rules_of(answer)
