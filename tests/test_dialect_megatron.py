"""Megatron-LM: launches read, checked and written."""

from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.dialects import megatron
from plait.dialects.launch import Told
from plait.dialects.source import Source
from plait.spec.chunks import chunk_layers
from plait.spec.job import Job
from plait.spec.jobfile import draft

SMALL = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --max-position-embeddings 2048 "
    "--seq-length 2048 --micro-batch-size 1 --vocab-size 32000 --bf16"
)


def read(text, given=None, **told):
    return megatron.read(Source(text, "command"), Told(given or {}, **told))


def asked(flags, world=8, environment="CUDA_DEVICE_MAX_CONNECTIONS=1", given=None):
    """The launch of a small model with some flags, its job, and what Megatron says to it."""
    text = f"{environment} torchrun --nproc-per-node {world} pretrain_gpt.py {SMALL} {flags}"
    launch = read(text, given)
    made = draft("plan", None, launch.fields | (given or {}))
    return launch, made.job, [*launch.findings, *megatron.check(launch, made.job)]


def said(findings, level="error"):
    return {f.rule.removeprefix("megatron-") for f in findings if f.level == level}


def errors(flags, **more):
    return said(asked(flags, **more)[2])


# ------------------------------------------------------------------------------------------
# There and back


@st.composite
def jobs(draw):
    """Legal jobs that Megatron can express."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    tp, pp, cp, dp = pick(1, 2, 4), pick(1, 2, 4), pick(1, 2, 4), pick(1, 2, 4)
    kind = pick("dense", "moe", "mla")
    heads, hidden = 8, pick(256, 512)
    fields = {
        "ranks": tp * pp * cp * dp,
        "model.layers": 8,
        "model.hidden": hidden,
        "model.heads": heads,
        "model.kv_heads": heads if kind == "mla" else pick(4, 8),
        "model.vocab": 1024 * tp,
        "model.ffn": 1024,
        "model.seq": 4096,
        "model.norm": pick("rms", "layer"),
        "model.tied": draw(st.booleans()),
        "model.rope_theta": pick(10000.0, 500000.0),
        "layout.tp": tp,
        "layout.pp": pp,
        "layout.cp": cp,
        "layout.micro_batch": pick(1, 2),
        "layout.recompute": pick("none", "full", "selective:mlp", "selective:norm,mlp"),
        "train.seq_len": 2048,
        "train.dtype": pick("bfloat16", "float16", "float32"),
        "train.seed": pick(0, 7),
    }
    bias = kind == "dense" and draw(st.booleans())
    fields |= {f"model.{name}_bias": bias for name in ("qkv", "o", "mlp")}
    fields["model.mlp"] = pick("swiglu", "gelu", *(["gelu-tanh"] if bias else []))
    fields["model.positions"] = pick("rope", "rope", "learned", "none")
    if cp > 1 and kind != "mla":
        fields["layout.ulysses"] = pick(*(d for d in (1, 2, 4) if cp % d == 0 and d * tp <= heads))
        whole = fields["layout.ulysses"] == 1
        fields["layout.cp_method"] = pick("ring", "all-gather") if whole else "ring"
    zero = pick(0, 1, 1, 2, 3)
    replicas = 2 if zero and dp % 2 == 0 and draw(st.booleans()) else 1
    if zero and replicas > 1:
        fields["layout.dp_replicate"] = replicas
    fields["layout.zero"] = zero
    if pp > 1:
        shape = pick("even", "chunks", "uneven")
        m = pp * pick(1, 2, 3)
        if shape == "chunks":
            fields |= {"layout.vpp": 2, "layout.schedule": "interleaved-1f1b"}
            if pick(True, False) and m > pp:
                fields["layout.schedule"] += f":{m}"
        elif shape == "uneven":
            counts = [8 // pp] * pp
            counts[0] -= 1
            counts[-1] += 1
            fields["layout.stages"] = tuple(counts)
    else:
        m = pick(1, 2, 3)
    fields["train.accumulation"] = m
    if kind != "dense":
        stage = tp * cp * dp // replicas
        etp = pick(*(d for d in (1, 2, 4) if stage % d == 0))
        ep = pick(*(d for d in (1, 2, 4, 8) if stage % (d * etp) == 0))
        fields |= {"layout.etp": etp, "layout.ep": ep, "model.moe.experts": 8,
                   "model.moe.topk": pick(2, 4), "model.moe.ffn": 256,
                   "model.moe.first_dense": pick(0, 1), "model.moe.shared": pick(0, 1, 2),
                   "model.moe.score": pick("softmax", "sigmoid"),
                   "model.moe.aux_loss": pick(0.0, 0.01),
                   "model.moe.aux_form": "sequence"}  # fmt: skip
        if fields["model.moe.score"] == "softmax":
            fields["model.moe.normalize"] = draw(st.booleans())
        else:
            fields["model.moe.correction"] = draw(st.booleans())
        if fields["model.moe.aux_loss"]:
            fields["model.moe.aux_form"] = pick("sequence", "batch", "global")
    if kind == "mla":
        fields |= {"model.mla.kv_rank": 64, "model.mla.q_rank": pick(None, 96),
                   "model.mla.nope_dim": 32, "model.mla.rope_dim": 16, "model.mla.v_dim": 32,
                   "model.head_dim": 48}  # fmt: skip
        fields["model.positions"] = "rope"
        if fields["model.mla.q_rank"] is None:
            del fields["model.mla.q_rank"]
    made = draft("plan", None, fields)
    assert not made.findings, [f.line() for f in made.findings]
    return made.job


def alike(job: Job) -> dict:
    """What must survive: everything but the name, and stages that are balanced anyway."""
    layout = replace(job.layout, stages=None)
    model = asdict(job.model) | {"name": ""}
    for part in ("moe", "mla"):
        model |= {f"{part}.{name}": value for name, value in (model.pop(part) or {}).items()}
    if model["positions"] != "rope":
        model["rope_theta"] = None
    model["norm_eps"] = round(model["norm_eps"], 12)
    train = asdict(job.train)
    kept = ("steps", "seq_len", "global_batch", "accumulation", "seed", "dtype", "grad_dtype",
            "learning_rate", "min_learning_rate", "warmup", "weight_decay", "beta1", "beta2",
            "eps", "clip", "schedule")  # fmt: skip
    return {
        **{f"layout.{name}": value for name, value in asdict(layout).items()},
        "chunks": [len(c) for c in chunk_layers(job.model, job.layout)],
        **{f"model.{name}": value for name, value in model.items()},
        **{f"train.{name}": train[name] for name in kept},
    }


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_a_job_written_and_read_is_the_same_job(job):
    written = megatron.write(job)
    launch = megatron.read(Source(written.files["train.sh"], "train.sh"), Told())
    assert not launch.unknown()
    assert not [f for f in launch.settings.findings if f.level == "error"]
    back = draft("plan", None, launch.fields)
    assert not back.findings, [f.line() for f in back.findings]
    before, after = alike(job), alike(back.job)
    assert {k: (v, after[k]) for k, v in before.items() if after[k] != v} == {}
    refusals = [f.line() for f in megatron.check(launch, back.job) if f.level == "error"]
    assert not refusals


# ------------------------------------------------------------------------------------------
# Known commands

SEED = """torchrun --nproc-per-node 8 --nnodes 16 pretrain_gpt.py \\
    --tensor-model-parallel-size 8 --sequence-parallel \\
    --pipeline-model-parallel-size 4 \\
    --context-parallel-size 2 \\
    --expert-model-parallel-size 8 \\
    --use-distributed-optimizer"""


def launched(text, **given):
    from plait.cli.question import launched as ask

    return ask("megatron", [text], given, [])


def reread(files):
    """The job of a written launch, and what is wrong with it."""
    launch = megatron.read(Source(files["train.sh"], "train.sh"), Told())
    made = draft("plan", None, launch.fields)
    refusals = [f.line() for f in megatron.check(launch, made.job) if f.level == "error"]
    return made.job, [f.line() for f in made.findings] + refusals


def test_a_grid_of_experts_as_large_as_the_dense_one_is_refused():
    """ETP is TP by default (arguments.py), so 8 x 8 x 4 = 256 ranks of experts do not tile 128
    (parallel_state.py); nor are there any experts, or the one connection of TP before Blackwell."""
    question = launched(SEED, model="mixtral-8x7b")
    own = {f.rule: f for f in question.own}
    grid = own["megatron-expert-grid"]
    assert "256" in grid.message
    assert "128" in grid.message
    assert grid.suggest == {"layout.etp": 1}
    assert own["megatron-no-experts"].suggest == {"--num-experts": 8}
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in own["megatron-connections"].message
    job, wrong = reread(question.source["legal"])
    assert not wrong
    layout = job.layout
    assert (layout.tp, layout.pp, layout.cp, layout.ep, layout.etp) == (8, 4, 2, 8, 1)
    assert (layout.dp, layout.edp, layout.world) == (2, 4, 128)
    script = question.source["legal"]["train.sh"]
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in script
    assert "--num-experts 8" in script
    assert "--expert-tensor-parallel-size 1" in script
    assert "--nproc-per-node 8 --nnodes 16" in script


@pytest.mark.parametrize(
    ("flags", "world", "model", "dp", "edp"),
    [
        ("", 8, "llama2-7b", 8, None),
        ("--tensor-model-parallel-size 8 --pipeline-model-parallel-size 2", 64, "llama2-70b", 4,
         None),
        # 61 layers do not go over 4 stages; DP is not world / (TP x PP x EP) = 1 but 8.
        ("--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 "
         "--expert-model-parallel-size 8 --num-experts 256", 256, "deepseek-v3", 8, 1),
    ],
)  # fmt: skip
def test_examples_of_three_sizes(flags, world, model, dp, edp):
    text = f"torchrun --nproc-per-node 8 --nnodes {world // 8} pretrain_gpt.py {flags}"
    question = launched(text, model=model)
    layout = question.job.layout
    assert (layout.world, layout.dp) == (world, dp)
    if edp is None:
        assert not question.illegal
    else:
        assert (layout.etp, layout.edp) == (layout.tp, edp)
        assert {f.rule for f in question.own if f.level == "error"} == {"megatron-stage-layers"}
        job, wrong = reread(question.source["legal"])
        assert not wrong
        assert sum(job.layout.stages) == 61


@pytest.mark.parametrize(
    ("flags", "world", "dp", "edp"),
    [
        # Megatron's own generator of ranks, core/parallel_state.py.
        ("--pipeline-model-parallel-size 4 --expert-model-parallel-size 8", 64, 16, 2),
        ("--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 "
         "--expert-model-parallel-size 8 --sequence-parallel", 256, 16, 2),
        ("--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 "
         "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --sequence-parallel",
         256, 16, 8),
        ("--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --sequence-parallel "
         "--expert-model-parallel-size 8", 256, 8, 1),
        ("--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --sequence-parallel "
         "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1", 256, 8, 8),
    ],
)  # fmt: skip
def test_both_grids(flags, world, dp, edp):
    flags += " --num-experts 8 --disable-bias-linear"
    _, job, found = asked(flags, world)
    assert (job.layout.dp, job.layout.edp) == (dp, edp)
    assert not said(found)


# ------------------------------------------------------------------------------------------
# What it refuses, and when

MOE = "--num-experts 8 --disable-bias-linear --moe-grouped-gemm "
TP2 = "--tensor-model-parallel-size 2 "
PP2 = "--pipeline-model-parallel-size 2 "
PP4 = "--pipeline-model-parallel-size 4 "


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ("", None),
        # Grids: parallel_state.py, arguments.py.
        ("--tensor-model-parallel-size 3", "world"),
        (MOE + "--expert-model-parallel-size 3", "experts-divide"),
        ("--expert-model-parallel-size 2", "no-experts"),
        ("--num-distributed-optimizer-instances 3 --use-distributed-optimizer", "instances"),
        ("--num-experts 8 --sequence-parallel " + TP2, "expert-bias-etp"),
        # moe_layer.py: in the first training step.
        (MOE + TP2 + "--expert-model-parallel-size 2", "moe-sequence-parallel"),
        (MOE + TP2 + "--expert-model-parallel-size 2 --sequence-parallel", None),
        # Batch: num_microbatches_calculator.py.
        ("--global-batch-size 12", "batch"),
        ("--global-batch-size 16", None),
        ("--global-batch-size 64 --rampup-batch-size 8 8 1000", None),
        ("--global-batch-size 64 --rampup-batch-size 4 4 1000", "rampup"),
        ("--global-batch-size 64 --rampup-batch-size 8 40 1000", "rampup"),
        # Shapes: transformer_config.py.
        (TP2 + "--group-query-attention --num-query-groups 1", None),
        ("--tensor-model-parallel-size 8 --group-query-attention --num-query-groups 3",
         "query-groups"),
        ("--context-parallel-size 2 --seq-length 2046", "sequence-cp"),
        ("--seq-length 4096", "positions"),
        (TP2 + "--sequence-parallel --seq-length 2047", "sequence-tp"),
        # Pipeline: arguments.py, transformer_config.py, schedules.py.
        ("--num-layers 6 " + PP4, "stage-layers"),
        ("--num-layers 6 --account-for-embedding-in-pipeline-split "
         "--account-for-loss-in-pipeline-split " + PP4, None),
        (PP4 + "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1", None),
        (PP4 + "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 1",
         "uneven-layers"),
        (PP4 + "--decoder-first-pipeline-num-layers 2 --num-layers-per-virtual-pipeline-stage 1",
         "uneven-chunks"),
        (PP2 + "--num-layers-per-virtual-pipeline-stage 3", "chunk-layers"),
        (PP2 + "--num-layers-per-virtual-pipeline-stage 2 --global-batch-size 8", None),
        (PP2 + "--num-layers-per-virtual-pipeline-stage 2 --global-batch-size 4",
         "interleave-group"),
        (PP2 + "--num-layers-per-virtual-pipeline-stage 2 --global-batch-size 12",
         "interleave-rest"),
        (PP2 + "--num-layers-per-virtual-pipeline-stage 2 --global-batch-size 12 "
         "--microbatch-group-size-per-virtual-pipeline-stage 3", None),
        (PP2 + "--num-layers-per-virtual-pipeline-stage 2 --num-virtual-stages-per-pipeline-rank "
         "2 --global-batch-size 8", "chunk-selectors"),
        (PP2 + "--num-layers-per-virtual-pipeline-stage 2 --no-overlap-p2p-communication "
         "--global-batch-size 8", "interleave-pp"),
        (PP2 + "--pipeline-model-parallel-layout 'Et*3|t*5L'", None),
        (PP2 + "--pipeline-model-parallel-layout 'Et*3|t*4L'", "layout-layers"),
        (PP2 + "--pipeline-model-parallel-layout 'Et*3|t|t*4L'", "layout-length"),
        (PP2 + "--pipeline-model-parallel-layout 't*3|t*5L'", "layout-ends"),
        (PP2 + "--pipeline-model-parallel-layout 'Ex|t*8L'", "layout-string"),
        # Context parallelism.
        ("--context-parallel-size 4 --cp-comm-type a2a+p2p", "cp-hierarchy"),
        ("--context-parallel-size 4 --cp-comm-type a2a+p2p "
         "--hierarchical-context-parallel-sizes 2 2", None),
        ("--context-parallel-size 4 --cp-comm-type a2a+p2p "
         "--hierarchical-context-parallel-sizes 2 4", "cp-hierarchy"),
        ("--context-parallel-size 2 --cp-comm-type p2p a2a", "cp-by-layer"),
        # Overlap, sharding, checkpoints: arguments.py.
        (TP2 + "--tp-comm-overlap", "overlap"),
        ("--overlap-param-gather --overlap-grad-reduce", "overlap"),
        ("--overlap-param-gather --use-distributed-optimizer", "overlap"),
        ("--overlap-param-gather --overlap-grad-reduce --use-distributed-optimizer", None),
        ("--ckpt-format torch_dcp", "checkpoint"),
        ("--ckpt-format fsdp_dtensor", "checkpoint"),
        # Recompute: transformer_config.py.
        ("--recompute-granularity full", "recompute"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", None),
        ("--recompute-granularity selective --recompute-method uniform", "recompute"),
        ("--recompute-granularity selective --recompute-modules core_attn attention", "recompute"),
        # Router: transformer_config.py.
        (MOE + "--moe-router-topk 1", "router"),
        (MOE + "--moe-router-topk 1 --moe-router-pre-softmax", None),
        (MOE + "--moe-router-enable-expert-bias", "router"),
        (MOE + "--moe-router-enable-expert-bias --moe-router-score-function sigmoid", None),
        (MOE + "--moe-expert-capacity-factor 1 --moe-router-load-balancing-type sinkhorn",
         "router"),
        (MOE + "--moe-pad-expert-input-to-capacity", "router"),
        (MOE + "--moe-router-group-topk 2 --moe-router-num-groups 3", "router"),
        ("--moe-ffn-hidden-size 64", "no-experts"),
        # A2A overlap: transformer_config.py.
        (MOE + "--overlap-moe-expert-parallel-comm --moe-token-dispatcher-type alltoall",
         "expert-overlap"),
        ("--delay-wgrad-compute", "overlap"),
        # Arguments of earlier versions.
        ("--checkpoint-activations", "gone"),
        ("--activations-checkpoint-method uniform", "gone"),
        ("--fp16", "dtype"),
        ("--multi-latent-attention --group-query-attention --num-query-groups 8", "mla-gqa"),
    ],
)  # fmt: skip
def test_what_is_refused(flags, rule):
    found = errors(flags)
    assert rule in found if rule else not found


def test_what_is_refused_in_the_first_step_and_not_before():
    _, _, found = asked(MOE + TP2 + "--expert-model-parallel-size 2")
    refusal = next(f for f in found if f.rule == "megatron-moe-sequence-parallel")
    assert "in the first step" in refusal.message
    _, _, found = asked("--global-batch-size 12")
    assert "at start" in next(f for f in found if f.rule == "megatron-batch").message


def test_torch_fsdp2_refuses_six_things_and_one_connection():
    """arguments.py, `if args.use_torch_fsdp2`."""
    flags = PP2 + "--use-torch-fsdp2 --use-distributed-optimizer --ckpt-format torch"
    _, _, found = asked(flags)
    refusals = [f.message for f in found if f.rule == "megatron-torch-fsdp2"]
    words = ("PP 2", "distributed optimizer", "accumulation fusion", "checkpoints torch", "untie")
    assert all(any(w in m for m in refusals) for w in words)
    assert "connections" in said(found)
    legal = (
        "--use-torch-fsdp2 --no-gradient-accumulation-fusion --untie-embeddings-and-output-weights"
    )
    assert not errors(legal, environment="CUDA_DEVICE_MAX_CONNECTIONS=8")
    _, job, _ = asked(legal)
    assert job.layout.zero == 3
    _, job, _ = asked(legal + " --torch-fsdp2-no-reshard-after-forward")
    assert job.layout.zero == 2


def test_megatron_fsdp():
    """Version 1 switches the distributed optimizer on, version 2 refuses it."""
    flags = "--use-megatron-fsdp --ckpt-format fsdp_dtensor"
    _, job, found = asked(flags, environment="A=b")
    assert job.layout.zero == 3
    assert not said(found)
    assert "fsdp-optimizer" in said(found, "warning")
    assert "fsdp" in errors(flags + " --megatron-fsdp-version 2 --use-distributed-optimizer",
                            environment="A=b")  # fmt: skip
    assert "fsdp" in errors("--use-megatron-fsdp", environment="A=b")
    for strategy, zero in (("optim", 1), ("optim_grads", 2), ("no_shard", 0)):
        _, job, _ = asked(f"{flags} --data-parallel-sharding-strategy {strategy}")
        assert job.layout.zero == zero


def test_one_connection_before_blackwell():
    """arguments.py: get_device_arch_version() < 10."""
    flags, none = TP2 + "--sequence-parallel", "A=b"
    assert "connections" in said(asked(flags, environment=none)[2], "warning")
    assert "connections" not in said(asked(flags)[2], "warning")
    eight = "CUDA_DEVICE_MAX_CONNECTIONS=8"
    assert "connections" in errors(flags, environment=eight, given={"gpus": "h100:8"})
    assert not errors(flags, environment=eight, given={"gpus": "b200:8"})


# ------------------------------------------------------------------------------------------
# What it means


def fields_of(flags, **more):
    return asked(flags, **more)[0].fields


def test_sequence_parallelism_without_tp_is_switched_off():
    launch, _, found = asked("--sequence-parallel")
    assert launch.fields["layout.sequence_parallel"] is False
    assert said(found, "warning") == {"sequence-parallel-off"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--cp-comm-type p2p", {"ulysses": 1, "cp_method": "ring"}),
        ("--cp-comm-type a2a", {"ulysses": 4}),
        ("--cp-comm-type allgather", {"ulysses": 1, "cp_method": "all-gather"}),
        ("--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
         {"ulysses": 2, "cp_method": "ring"}),
    ],
)  # fmt: skip
def test_ways_of_context_parallelism(flags, said):
    fields = fields_of(f"--context-parallel-size 4 {flags}")
    assert {k: fields[f"layout.{k}"] for k in said} == said


@pytest.mark.parametrize(
    ("flags", "vpp", "counts"),
    [
        ("--num-layers-per-virtual-pipeline-stage 2", 2, [2, 2, 2, 2]),
        ("--num-virtual-stages-per-pipeline-rank 4", 4, [1] * 8),
        # transformer_block.py, get_num_layers_to_build.
        ("--num-layers 6 --account-for-embedding-in-pipeline-split "
         "--account-for-loss-in-pipeline-split --num-layers-per-virtual-pipeline-stage 2",
         2, [1, 2, 2, 1]),
        ("--decoder-first-pipeline-num-layers 2", 1, [2, 6]),
        ("--decoder-last-pipeline-num-layers 2 --num-virtual-stages-per-pipeline-rank 2", 2,
         [3, 1, 3, 1]),
        ("--pipeline-model-parallel-layout 'E|(t|)*2,t*6L'", 2, [0, 1, 1, 6]),
        ("--pipeline-model-parallel-layout 'Ett|(tt|)*2ttL'", 2, [2, 2, 2, 2]),
    ],
)  # fmt: skip
def test_layers_of_chunks(flags, vpp, counts):
    _, job, _ = asked(f"{PP2} --global-batch-size 8 {flags}")
    assert job.layout.vpp == vpp
    assert [len(chunk) for chunk in chunk_layers(job.model, job.layout)] == counts


@pytest.mark.parametrize(
    ("flags", "zero", "replicas"),
    [
        ("", 0, 8),
        ("--use-distributed-optimizer", 1, 1),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 2", 1, 2),
    ],
)
def test_sharding(flags, zero, replicas):
    _, job, _ = asked(flags)
    assert (job.layout.zero, job.layout.dp_replicate) == (zero, replicas)


@pytest.mark.parametrize(
    ("flags", "recompute"),
    [
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2", "full"),
        ("--recompute-activations", "none"),  # core attention, which is fused
        ("--recompute-granularity selective --recompute-modules layernorm mlp",
         "selective:norm,mlp"),
        ("--recompute-granularity selective --recompute-modules core_attn moe_act", "none"),
    ],
)  # fmt: skip
def test_recompute(flags, recompute):
    assert fields_of(flags)["layout.recompute"] == recompute


@pytest.mark.parametrize(
    ("flags", "said"),
    [("--fp16", True), ("--fp16 --accumulate-allreduce-grads-in-fp32", False), ("--bf16", False)],
)
def test_float16_gradients_are_copied(flags, said):
    """optimizer/optimizer.py, Float16OptimizerWithFloat16Params: the gradients of the master
    weights are made from those of the model. docs of the distributed optimizer: 20, 4 + 16/d."""
    launch = read(f"torchrun --nproc-per-node 2 pretrain_gpt.py {SMALL.replace('--bf16', flags)}")
    found = [f for f in launch.findings + launch.settings.findings if "gradients to" in f.message]
    assert [f.rule for f in found] == ["megatron-fp16-gradients"] * said


def test_defaults_of_a_model():
    """Biases, LayerNorm, learned positions, tied tables, 4 x hidden, dropout 0.1, padded to 128 x
    TP, float32 without --bf16."""
    text = SMALL.replace("--bf16", "") + " --tensor-model-parallel-size 2 "
    fields = read(f"torchrun --nproc-per-node 2 pretrain_gpt.py {text}").fields
    assert fields["model.qkv_bias"]
    assert fields["model.mlp_bias"]
    assert fields["model.tied"]
    assert (fields["model.norm"], fields["model.positions"]) == ("layer", "learned")
    assert (fields["model.ffn"], fields["model.dropout"]) == (2048, 0.1)
    assert fields["model.vocab"] == 32000
    assert fields["train.dtype"] == "float32"
    swiglu = fields_of("--swiglu --disable-bias-linear --vocab-size 32001")
    assert swiglu["model.ffn"] == 1344  # int(8 x 512 / 3 / 64) x 64
    assert swiglu["model.vocab"] == 32128
    assert not swiglu["model.qkv_bias"]
    assert fields_of("--disable-bias-linear --add-qkv-bias")["model.qkv_bias"]


def test_groups_of_queries_need_their_switch():
    assert fields_of("--num-query-groups 2")["model.kv_heads"] == 8
    assert fields_of("--group-query-attention --num-query-groups 2")["model.kv_heads"] == 2
    assert fields_of("--group-query-attention")["model.kv_heads"] == 1


@pytest.mark.parametrize(
    ("pattern", "first", "every", "mixtures"),
    [
        ("1", 0, 1, 8),
        ("'([0]*2+[1]*6)'", 2, 1, 6),
        ("[0,1]*4", 0, 2, 4),
        ("'([0]*2+[0,0,1]*2)'", 2, 3, 2),
        ("2", 0, 2, 4),  # layers 0, 2, 4, 6: plait counts as many, one layer later
    ],
)
def test_which_layers_are_mixtures(pattern, first, every, mixtures):
    _, job, _ = asked(f"{MOE} --moe-layer-freq {pattern}")
    assert (job.model.moe.first_dense, job.model.moe.every) == (first, every)
    assert sum(job.model.is_moe(i) for i in range(8)) == mixtures


def test_a_pattern_is_never_run():
    _, _, found = asked(f"{MOE} --moe-layer-freq '__import__(\"os\").getpid()+[1]'")
    assert "moe-layers" in said(found, "note")


def test_router_of_deepseek():
    fields = fields_of(
        MOE + "--moe-router-topk 4 --moe-router-score-function sigmoid --moe-z-loss-coeff 1e-3 "
        "--moe-router-enable-expert-bias --moe-router-num-groups 4 --moe-router-group-topk 2 "
        "--moe-router-topk-scaling-factor 2.5 --moe-router-load-balancing-type seq_aux_loss "
        "--moe-aux-loss-coeff 1e-4 --moe-shared-expert-intermediate-size 128 "
        "--moe-ffn-hidden-size 64 --moe-expert-capacity-factor 1.5"
    )
    said = {k.removeprefix("model.moe."): v for k, v in fields.items() if "moe." in k}
    assert said["score"] == "sigmoid"
    assert said["correction"]
    assert said["normalize"]
    assert (said["groups"], said["topk_groups"], said["group_score"]) == (4, 2, "top2")
    assert (said["aux_form"], said["aux_loss"], said["z_loss"]) == ("sequence", 1e-4, 1e-3)
    assert (said["shared"], said["scaling"], said["capacity"]) == (2, 2.5, 1.5)
    assert said["drop"] == "probability"


def test_the_global_batch_is_one_micro_batch_a_rank_by_default():
    _, job, _ = asked("--micro-batch-size 2")
    assert (job.batch.global_, job.batch.accumulation) == (16, 1)


def test_schedules_that_it_lacks():
    _, job, _ = asked(PP2 + "--global-batch-size 8")
    for schedule, vpp, runs in (("zb-h1", 1, "1f1b"), ("zbv", 2, "interleaved-1f1b")):
        other = replace(job, layout=replace(job.layout, schedule=schedule, vpp=vpp))
        notes = [f.message for f in megatron.write(other).notes]
        assert any(f"no schedule {schedule}; it would run {runs}" in m for m in notes)


def test_fields_beside_the_command_are_stronger():
    """A degree given beside the launch moves the default that hangs on it."""
    flags = MOE + "--tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size"
    launch, _, _ = asked(f"{flags} 2", given={"layout.tp": "2"})
    assert (launch.fields["layout.tp"], launch.fields["layout.etp"]) == (2, 2)


@st.composite
def commands(draw):
    """Commands of any degrees, most of them illegal."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    flags = (
        f"--num-layers {pick(6, 8, 13)} --hidden-size 512 --num-attention-heads 8 "
        f"--max-position-embeddings 4096 --seq-length {pick(1000, 2048)} --vocab-size 32000 "
        f"--swiglu --disable-bias-linear --bf16 --micro-batch-size {pick(1, 2)} "
        f"--tensor-model-parallel-size {pick(1, 2, 4, 8)} --context-parallel-size {pick(1, 2, 4)} "
        f"--pipeline-model-parallel-size {pick(1, 2, 4)} --global-batch-size {pick(8, 20, 64)} "
    )
    maybe = (
        "--sequence-parallel",
        f"--num-experts {pick(6, 8)} --expert-model-parallel-size {pick(2, 4, 8)}",
        f"--num-virtual-stages-per-pipeline-rank {pick(2, 3)}",
        "--use-distributed-optimizer",
        "--cp-comm-type a2a",
    )
    flags += " ".join(flag for flag in maybe if draw(st.booleans()))
    return f"torchrun --nproc-per-node 8 --nnodes {pick(1, 2, 4)} pretrain_gpt.py {flags}"


@settings(max_examples=25, deadline=None)
@given(commands())
def test_the_nearest_legal_launch_is_legal(command):
    legal = launched(command).source["legal"]
    if legal:
        assert not reread(legal)[1]


@pytest.mark.parametrize(
    ("said", "vpp", "schedule"),
    [
        ({}, 4, "interleaved-1f1b"),
        ({"layout.vpp": "2"}, 2, "interleaved-1f1b"),
        ({"layout.stages": "1,0,1,1,1,1,1,2"}, 4, "interleaved-1f1b"),
        ({"layout.schedule": "gpipe", "layout.vpp": "1"}, 1, "gpipe"),
        ({"layout.pp": "1"}, 1, "1f1b"),
    ],
)
def test_what_is_said_beside_the_launch_replaces_what_it_says(said, vpp, schedule):
    flags = "--num-layers 8 --global-batch-size 32 --num-layers-per-virtual-pipeline-stage 1 "
    text = f"torchrun --nproc-per-node 8 pretrain_gpt.py {SMALL} {flags} {PP2}"
    job = launched(text, **said).job
    assert (job.layout.vpp, job.layout.schedule) == (vpp, schedule)
