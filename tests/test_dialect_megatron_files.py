"""Files that Megatron-LM is launched with: scripts, YAML, broken ones; and the page about it."""

import re
import shlex
from pathlib import Path

import pytest

from plait.cli.main import main
from plait.dialects import megatron
from plait.dialects.launch import Told
from plait.dialects.source import Source
from plait.spec.chunks import chunk_layers
from plait.spec.findings import UserError
from plait.spec.jobfile import draft


def read(text, name="launch.sh", **told):
    return megatron.read(Source(text, name, Path(name)), Told(**told))


def job_of(launch, **more):
    return draft("plan", None, launch.fields | more).job


SCRIPT = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${NNODES:-2}
WORLD_SIZE=$(($GPUS_PER_NODE * $NNODES))
TOKENIZER=$1

DISTRIBUTED=(--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --master_port ${PORT:-6000})
MODEL=(
    --num-layers 32
    --hidden-size 4096     # as published
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention --num-query-groups 8
    --max-position-embeddings 32768
    --seq-length 4096
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --normalization RMSNorm --position-embedding-type rope
)
MOE=(--num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm)
if [ -n "${WANDB_API_KEY}" ]; then
    MOE+=(--wandb-project Mixtral)
fi
PARALLEL="--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4 \\
    --expert-tensor-parallel-size 1 --pipeline-model-parallel-size 2 --use-distributed-optimizer"

torchrun ${DISTRIBUTED[@]} pretrain_gpt.py ${MODEL[@]} "${MOE[@]}" $PARALLEL \\
    --tokenizer-type Llama2Tokenizer --tokenizer-model ${TOKENIZER} \\
    --micro-batch-size 1 --global-batch-size 256 --bf16 --lr 1e-4 --train-iters 500
"""


def test_a_script_of_arrays():
    launch = read(SCRIPT)
    assert launch.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert not launch.unknown()
    job = job_of(launch)
    layout, model = job.layout, job.model
    assert (layout.world, layout.tp, layout.pp, layout.dp, layout.ep) == (16, 2, 2, 4, 4)
    assert (layout.etp, layout.edp, layout.zero) == (1, 2, 1)
    assert (model.kv_heads, model.moe.experts, model.vocab) == (8, 8, 32000)
    assert job.batch.accumulation == 64
    assert not [f for f in megatron.check(launch, job) if f.level == "error"]


def test_a_model_left_in_a_variable_is_asked_for():
    text = "torchrun --nproc-per-node 8 pretrain_gpt.py $MODEL_ARGS --tensor-model-parallel-size 2"
    launch = read(text)
    assert not any(name.startswith("model") for name in launch.fields)
    text = text.replace("$MODEL_ARGS", "--num-layers $LAYERS --hidden-size 8")
    found = read(text).settings.findings
    assert any("--model" in f.message for f in found)
    assert not read(text, given={"model": "llama3-8b"}).settings.findings


def test_an_open_learning_rate_is_of_no_matter():
    text = SCRIPT.replace("--lr 1e-4", "--lr $LR --save $SAVE")
    assert not read(text).settings.findings


def test_a_script_of_slurm():
    text = """#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
ARGS="--num-layers 4 --hidden-size 64 --num-attention-heads 4 --tensor-model-parallel-size 4"
srun -l bash -c "python -u pretrain_gpt.py ${ARGS} --seq-length 128 --micro-batch-size 1"
"""
    launch = read(text)
    assert launch.fields["ranks"] == 32
    assert launch.fields["layout.tp"] == 4


def test_a_script_that_only_sets_variables():
    text = """
TP=${TP:-4}
SIZES="--num-layers 48 --hidden-size 2048 --num-attention-heads 32"
MODEL_OPTIONS="$SIZES --tensor-model-parallel-size $TP --load $CHECKPOINT"
TRAIN="--seq-length 4096 --micro-batch-size 1 --vocab-size 1000"
"""
    fields = read(text).fields
    assert (fields["layout.tp"], fields["model.layers"]) == (4, 48)
    assert fields["train.seq_len"] == 4096


def test_an_unknown_flag_has_a_nearest():
    text = SCRIPT.replace("--sequence-parallel", "--sequence-paralel")
    (setting, nearest), *_ = read(text).unknown()
    assert (setting.name, nearest) == ("--sequence-paralel", "--sequence-parallel")


FUNCTIONAL = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
  NCCL_ALGO: Ring
MODEL_ARGS:
  --num-layers: 12
  --hidden-size: 512
  --num-attention-heads: 8
  --seq-length: 1024
  --max-position-embeddings: 1024
  --micro-batch-size: 4
  --global-batch-size: 32
  --vocab-file: ${DATA_PATH}/vocab.json
  --pipeline-model-parallel-size: 2
  --pipeline-model-parallel-layout: Et*3|(t|)*2t*7L
  --context-parallel-size: 4
  --cp-comm-type: a2a+p2p
  --hierarchical-context-parallel-sizes: 2 2
  --num-experts: 8
  --moe-layer-freq: ([0]*4+[1]*8)
  --recompute-granularity: selective
  --recompute-modules: "[layernorm moe_act]"
  --moe-grouped-gemm: true
  --disable-bias-linear: true
  --use-distributed-optimizer: true
  --bf16: true
TEST_TYPE: regular
"""


def test_a_functional_test():
    launch = read(FUNCTIONAL, "model_config.yaml")
    assert not launch.unknown()
    assert launch.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    job = job_of(launch, ranks=8)
    layout = job.layout
    assert (layout.pp, layout.vpp, layout.cp, layout.ulysses) == (2, 2, 4, 2)
    assert [len(c) for c in chunk_layers(job.model, layout)] == [3, 1, 1, 7]
    assert layout.recompute == "selective:norm"
    assert (job.model.moe.first_dense, job.model.mlp_bias) == (4, False)
    assert not [f for f in megatron.check(launch, job) if f.level == "error"]


def test_yaml_in_sections():
    text = """
language_model:
  num_layers: 24
  hidden_size: 1024
  num_attention_heads: 16
  num_query_groups: 4
  ffn_hidden_size: null
  activation_func: swiglu
  add_bias_linear: False
  num_moe_experts: null
model_parallel:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 3
  sequence_parallel: True
  bf16: True
micro_batch_size: 2
global_batch_size: 128
seq_length: 4096
max_position_embeddings: 4096
untie_embeddings_and_output_weights: True
use_distributed_optimizer: True
vocab_size: 32000
"""
    launch = read(text, "example.yaml")
    assert not launch.unknown()
    job = job_of(launch, ranks=12)
    assert (job.layout.tp, job.layout.pp, job.layout.zero) == (2, 3, 1)
    assert (job.model.mlp, job.model.kv_heads, job.model.ffn) == ("swiglu", 4, 2688)
    assert not job.model.mlp_bias
    assert not job.model.tied
    assert job.train.dtype == "bfloat16"


def test_yaml_has_degrees_cut_that_argparse_refuses():
    text = "language_model: {num_layers: 8, hidden_size: 64, num_attention_heads: 8}\n"
    text += "model_parallel: {tensor_model_parallel_size: 8, pipeline_model_parallel_size: 2}\n"
    launch = read(text, "a.yaml", world=4)
    found = megatron.check(launch, job_of(launch))
    cut = next(f for f in found if f.rule == "megatron-yaml-cut")
    assert cut.suggest == {"layout.tp": 4, "layout.pp": 1}


def test_a_command_with_a_yaml_file(tmp_path):
    (tmp_path / "model.yaml").write_text("num_layers: 4\nhidden_size: 64\nnum_attention_heads: 4\n")
    script = tmp_path / "run.sh"
    script.write_text("torchrun --nproc-per-node 4 pretrain_gpt.py --yaml-cfg model.yaml\n")
    launch = megatron.read(Source(script.read_text(), "run.sh", script), Told())
    assert (launch.fields["model.layers"], launch.fields["ranks"]) == (4, 4)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.sh", "echo $(rm -rf /)"),
        ("a.sh", "vllm serve llama"),
        ("a.sh", ""),
        ("a.yaml", "[1, 2]"),
        ("a.yaml", "MODEL_ARGS: null"),
        ("a.yaml", "a: !!python/object/apply:os.system ['id']"),
    ],
)
def test_what_is_no_launch_is_one_line(name, text):
    with pytest.raises(UserError) as problem:
        read(text, name)
    assert len(problem.value.findings) == 1


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 1e400",
        "--tensor-model-parallel-size -4 --context-parallel-size 0",
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout '((t)*99999)*99999|L'",
        "--num-experts 8 --moe-layer-freq '[1]*99999999999'",
        "--num-experts 8 --moe-layer-freq '((((((((('",
        "--window-size ( --rotary-base nan --rampup-batch-size a b c",
        "--num-virtual-stages-per-pipeline-rank 99999999999 --pipeline-model-parallel-size 2",
        "--make-vocab-size-divisible-by 0 --kv-channels 0 --num-attention-heads 0",
        "--multi-latent-attention --rotary-scaling-factor 1e308 --mscale 1e308 --mscale-all-dim -5",
        "--step-batch-size-schedule ::: --hybrid-layer-pattern /",
    ],
)
def test_hostile_values_end_in_lines(flags, capsys):
    base = "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 512 "
    command = f"{base} --num-attention-heads 8 --seq-length 128 --micro-batch-size 1 {flags}"
    assert main(["explain", "--from", "megatron", command]) in (0, 1, 2)
    assert "Error" not in capsys.readouterr().err


PAGE = Path(__file__).parent.parent / "docs" / "dialects" / "megatron.md"
BLOCKS = re.findall(r"^```sh\n(.*?)```", PAGE.read_text(), re.S | re.M)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_page(command, capsys):
    assert main(shlex.split(command)[1:]) in (0, 1)
    assert capsys.readouterr().out
