"""Megatron-LM: launches read, checked and written."""

from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.dialects import megatron
from plait.dialects.launch import Told
from plait.dialects.source import Source
from plait.spec.chunks import chunk_layers
from plait.spec.findings import UserError
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
