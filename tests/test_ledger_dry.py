"""Predicted traffic against what the program sends in a dry run, for random legal layouts."""

import random
from dataclasses import replace

import pytest
import torch.distributed as dist

import cases
from plait.cost.ledger import differences, memory_differences
from plait.cost.memory import memory
from plait.cost.traffic import traffic
from plait.spec import presets
from plait.spec.job import Job, Train
from plait.spec.layout import Layout, divisors
from plait.spec.model import Model
from plait.trace.dryrun import dryrun, measure

WIDE = Model.of("wide", layers=2, hidden=64, heads=8, vocab=97, ffn=96, seq=32)

#: Choices that decide what is sent, or might; values are drawn independently.
MODEL = {
    "kv_heads": (1, 2, 4, 8),
    "vocab": (97, 100, 256),
    "tied": (False, True),
    "qkv_bias": (False, True),
    "o_bias": (False, True),
    "mlp_bias": (False, True),
    "dropout": (0.0, 0.1),
    "norm_at": ("input", "output", "both"),
    "norm_offset": (False, True),
    "qk_norm": (None, "head", "full"),
    "embed_norm": (False, True),
    "embed_scale": (False, True),
    "logit_softcap": (None, 30.0),
    "window": (None, 8),
    "full_every": (None, 2),
    "mlp": ("swiglu", "geglu", "gelu"),
    "positions": ("rope", "learned"),
}
TRAIN = {
    "dtype": ("float32", "bfloat16", "float16", "float64"),
    "grad_dtype": ("auto", "float32", "bfloat16"),
    "bucket_mib": (0.0, 0.02, 0.1, 25.0),
    "accumulation": (1, 2, 3, 5),
}
RECOMPUTE = (
    "none",
    "full",
    "selective",
    "selective:norm",
    "selective:attention",
    "selective:attention,mlp",
)


def random_job(seed: int) -> Job:
    rng = random.Random(seed)

    def draw(space: dict) -> dict:
        return {name: rng.choice(values) for name, values in space.items()}

    model = replace(WIDE, layers=rng.choice((1, 2, 3)), **draw(MODEL))
    if model.qk_norm != "full":
        model = replace(model, norm=rng.choice(("rms", "layer")))
    tp, dp, zero = rng.choice((1, 2, 4, 8)), rng.choice((1, 2, 3, 4, 8)), rng.choice((0, 1, 2, 3))
    layout = Layout.fill(
        tp * dp,
        tp=tp,
        zero=zero,
        dp_replicate=rng.choice(divisors(dp)) if zero else dp,
        sequence_parallel=tp > 1 and rng.random() < 0.5,
        micro_batch=rng.choice((1, 2)),
        recompute=rng.choice(RECOMPUTE),
    )
    train = Train(seq_len=16, **draw(TRAIN))
    global_batch = dp * layout.micro_batch * train.accumulation
    return Job(model, layout, replace(train, global_batch=global_batch))


def random_context(seed: int) -> Job:
    """A random job whose samples lie on several ranks; long enough for memory to be seen."""
    rng, job = random.Random(seed), random_job(seed)
    layout, model = job.layout, job.model
    tp, cp = min(layout.tp, 2), rng.choice((2, 3, 4, 6, 8))
    heads, kv = model.heads // tp, max(1, model.kv_heads // tp)
    parts = [u for u in divisors(cp) if heads % u == 0 and (kv % u == 0 or u % kv == 0)]
    pp = rng.choice((1, 1, 2))
    changed = replace(
        layout,
        tp=tp,
        sequence_parallel=layout.sequence_parallel and tp > 1,
        cp=cp,
        ulysses=rng.choice(parts),
        cp_method=rng.choice(("ring", "all-gather")),
        pp=pp,
        schedule=rng.choice(("1f1b", "zb-h1")) if pp > 1 else "1f1b",
    )
    window = model.window and rng.choice((8, 64, 300))
    model = replace(model, window=window, seq=480, layers=max(pp, model.layers))
    return replace(job, model=model, layout=changed, train=replace(job.train, seq_len=480))


def agree(job: Job, full: bool) -> None:
    assert differences(traffic(job), measure(job, full).traffic) == []


@pytest.mark.parametrize("seed", range(20))
def test_random_layouts(seed):
    agree(random_job(seed), full=True)


@pytest.mark.parametrize("seed", range(12))
def test_random_layouts_with_context_parallelism(seed):
    job = random_context(seed)
    measured = measure(job, full=True)
    assert differences(traffic(job), measured.traffic) == []
    assert memory_differences(memory(job), measured.memory) == []


@pytest.mark.sweep
@pytest.mark.parametrize("seed", [*range(12, 24), *range(2000, 3000)])
def test_many_random_layouts_with_context_parallelism(seed):
    test_random_layouts_with_context_parallelism(seed)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", [*range(20, 40), *range(1000, 2000)])
def test_many_random_layouts(seed):
    agree(random_job(seed), full=True)


@pytest.mark.sweep
@pytest.mark.parametrize("point", list(cases.all_points()), ids=cases.name)
def test_every_layout_of_the_parity_tests(point):
    agree(cases.case(point).job, full=True)


@pytest.mark.parametrize("seed", range(8))
def test_two_micro_batches_stand_for_all(seed):
    """What a step of one and of two tell of a longer step is what it sends and holds."""
    job = random_job(seed)
    m = (3, 5)[seed % 2]
    batch = job.layout.dp * job.layout.micro_batch * m
    job = replace(job, train=replace(job.train, accumulation=m, global_batch=batch))
    whole, parts = measure(job, full=True), measure(job)
    assert differences(whole.traffic, parts.traffic) == []
    assert parts.memory == whole.memory


def published(name: str, world: int, accumulation: int = 1, **layout) -> Job:
    """A published model at its own length."""
    model, filled = presets.model(name), Layout.fill(world, **layout)
    train = Train(
        seq_len=model.seq,
        dtype="bfloat16",
        accumulation=accumulation,
        global_batch=filled.dp * filled.micro_batch * accumulation,
    )
    return Job(model, filled, train)


@pytest.mark.parametrize(
    "job",
    [
        published("gpt2", 8, zero=1),
        published("gpt2", 8, zero=2, accumulation=4),
        published("qwen3-8b", 16, tp=4, zero=2),
    ],
    ids=lambda job: job.model.name,
)
def test_published_models(job):
    """Of many layers, whose peaks do not grow with depth by equal steps."""
    answer = dryrun(job, [])
    assert answer["differences"] == []
    assert answer["agree"]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["gpt2", "qwen3-0.6b"])
def test_a_large_tied_table(name, tp, zero):
    """Few tokens and a whole vocabulary: what becomes of the table's gradients is the peak."""
    job = published(name, 8, tp=tp, zero=zero)
    train = replace(job.train, seq_len=128)
    answer = dryrun(replace(job, model=replace(job.model, layers=2), train=train), [])
    assert answer["differences"] == []


def test_a_model_of_405_billion_on_16384_ranks():
    layout = Layout.fill(16_384, tp=8, zero=3)
    train = Train(seq_len=8_192, dtype="bfloat16", accumulation=1, global_batch=layout.dp)
    job = Job(presets.model("llama3.1-405b"), layout, train)
    answer = dryrun(job, [])
    assert answer["differences"] == []
    assert answer["agree"]
    sent = {
        (r["axis"], r["collective"], r["phase"]): r["count"] for r in answer["measured"]["traffic"]
    }
    # 126 layers, embedding and head; two regions a layer, one more at each end.
    assert sent["fsdp", "all-gather", "forward"] == 128
    assert sent["tp", "all-gather", "forward"] == 253
    assert sent["tp", "all-gather", "backward"] == 506


def test_a_difference_is_found_and_named():
    """The comparison itself: a program of one layer less."""
    job = random_job(0)
    deeper = replace(job, model=job.model.with_layers(job.model.layers + 1))
    assert differences(traffic(deeper), measure(job).traffic)


def test_nothing_is_left_behind():
    measure(random_job(1))
    assert not dist.is_initialized()
