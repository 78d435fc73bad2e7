"""Memory: states against closed forms, real ranks, and predicted peaks against traced ones."""

from dataclasses import replace
from math import prod

import pytest

import cases
from harness import micro_batches
from plait.cost.ledger import MEMORY_CLASSES
from plait.cost.memory import buckets_of, memory, states
from plait.cost.tape import Tape
from plait.parallel.mesh import make_mesh
from plait.spec.job import Batch, Job, Train
from plait.spec.layout import Layout
from plait.spec.model import Model
from plait.spec.parameters import parameter_count
from plait.trace.dryrun import measure
from plait.trace.memory import MemoryTracker
from plait.train.program import Program
from ranks import run_ranks

LLAMA, GPT = replace(cases.WIDE, layers=3), replace(cases.WIDE_GPT, layers=3)
OLMO = replace(LLAMA, qk_norm="full", norm_at="output")
GEMMA = replace(LLAMA, norm_offset=True, embed_scale=True, tied=True, mlp="geglu")
WINDOWED = replace(LLAMA, window=512, full_every=2)
GEMMA2 = replace(LLAMA, norm_at="both", logit_softcap=30.0, window=64, full_every=2)


def make_job(
    model: Model,
    world: int,
    seq: int = 256,
    accumulation: int = 1,
    dtype: str = "bfloat16",
    grad_dtype: str = "auto",
    bucket_mib: float = 25.0,
    **layout: object,
) -> Job:
    filled = Layout.fill(world, **layout)
    batch = Batch.fill(filled.dp, filled.micro_batch, None, accumulation)
    train = Train(
        seq_len=seq,
        global_batch=batch.global_,
        accumulation=accumulation,
        dtype=dtype,
        grad_dtype=grad_dtype,
        bucket_mib=bucket_mib,
    )
    return Job(model, filled, train)


# ------------------------------------------------------------------------------------------
# States

#: (dtype, zero) -> bytes of a parameter on one of 4 ranks: parameters, gradients, optimizer.
#: bfloat16 with float32 gradients, masters and moments: 2 + 4 + 12 = 18, as Megatron-LM counts.
RECIPES = {
    ("bfloat16", 0): (2, 4, 12),
    ("bfloat16", 1): (2, 4, 12 / 4),
    ("bfloat16", 2): (2, 4 / 4, 12 / 4),
    ("bfloat16", 3): (0, 4 / 4, 12 / 4),
    ("float32", 0): (4, 4, 8),
    ("float32", 1): (4, 4, 8 / 4),
    ("float32", 2): (4, 4 / 4, 8 / 4),
    ("float32", 3): (4 / 4, 4 / 4, 8 / 4),
}


@pytest.mark.parametrize(("dtype", "zero"), RECIPES)
def test_states_are_bytes_of_a_parameter(dtype, zero):
    job = make_job(LLAMA, 4, dtype=dtype, zero=zero)
    n = parameter_count(LLAMA)  # all sizes are multiples of 32, so there is no padding
    held = states(job, buckets_of(job))
    assert tuple(held.values()) == tuple(n * per for per in RECIPES[dtype, zero])
    assert list(held) == ["parameters", "gradients", "optimizer"]


def test_gradients_may_be_reduced_in_bfloat16():
    job = make_job(LLAMA, 4, zero=1, grad_dtype="bfloat16")
    assert states(job, buckets_of(job))["gradients"] == 2 * parameter_count(LLAMA)


def test_padding_is_held_too():
    odd = replace(LLAMA, vocab=509)
    job = make_job(odd, 6, zero=1, tp=2)
    # Two tables of 255 rows on each tp rank; everything else is cut in halves or whole.
    assert sum(b.size for b in buckets_of(job)) % 3 == 0
    rows = -(-509 // 2)
    tables = [
        prod(e.shape) for b in buckets_of(job) for e in b.entries if e.parameter.split == "vocab"
    ]
    assert tables == [rows * 128] * 2


def _held_on_rank(rank: int, job: Job) -> tuple[list[dict], int]:
    """A rank's rows. gloo's threads let go of a message some time after it has arrived, now and
    then so late that it shows: of three steps the one that held least counts."""
    program = Program(job, mesh := make_mesh(job.layout, job.model, rank))
    program.initialize()
    program.step(micro_batches(job, mesh, 0), 0)
    steps = []
    for step in (1, 2, 3):
        with MemoryTracker(program) as tracker:
            program.step(micro_batches(job, mesh, step), step)
        steps.append(tracker.rows())
    rows = [min(same, key=lambda row: row["total"]) for same in zip(*steps, strict=True)]
    return rows, 4 * len(program.engine.segments)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_real_ranks_hold_what_the_stage_promises(zero):
    """ZeRO-1 a quarter of the optimizer on each of 4 ranks, 2 of gradients, 3 of parameters."""
    job = make_job(LLAMA, 4, seq=64, accumulation=2, dtype="float32", zero=zero)
    n = parameter_count(LLAMA)
    parameters, gradients, optimizer = (n * per for per in RECIPES["float32", zero])
    for rows, step_counts in run_ranks(4, _held_on_rank, job):
        assert [row["moment"] for row in rows] == ["forward", "loss", "backward", "optimizer"]
        for row in rows:
            assert row["parameters"] == parameters
            assert row["gradients"] == gradients
        assert rows[0]["optimizer"] == optimizer + step_counts
        assert rows[0]["gathered"] <= (4 * n if zero == 3 else 0)
        for row, said in zip(rows, memory(job), strict=True):
            assert abs(said.total - row["total"]) <= 0.01 * row["total"], row["moment"]


# ------------------------------------------------------------------------------------------
# Activations


@pytest.mark.parametrize("tp", [1, 2])
def test_what_a_layer_keeps(tp):
    """By hand, 2 bytes an element: x and the norm's output twice, q, k, v, attention's output,
    gate, up and product; 4 bytes: two numbers a row, one a head and token. With tp 2 the rows
    and the heads are halved."""
    seq, hidden, heads, ffn, width = 256, 128, 8, 320, 16
    job = make_job(LLAMA, tp, tp=tp, dtype="bfloat16")
    deeper = replace(job, model=LLAMA.with_layers(4))
    q, kv = heads * width, 4 * width
    by_hand = 2 * seq * (4 * hidden + 2 * q + 2 * kv + 3 * ffn) + 4 * seq * (2 + heads)
    one, two = (memory(j)[1].activations for j in (job, deeper))
    assert two - one == by_hand // tp


@pytest.mark.parametrize(
    ("schedule", "vpp"),
    [("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1), ("zbv", 2), ("dualpipev", 2)],
)
def test_a_steady_state_is_gone_through_once(monkeypatch, schedule, vpp):
    """A schedule that only goes on longer holds no more, and takes no longer to count."""
    played, replay = [], Tape.replay
    monkeypatch.setattr(Tape, "replay", lambda tape, other: played.append(replay(tape, other)))
    said = []
    model = replace(LLAMA, layers=8)
    for m in (32, 128):
        job = make_job(model, 4, accumulation=m, pp=4, schedule=schedule, vpp=vpp)
        played.clear()
        said.append((memory(job), len(played)))
    assert said[0] == said[1]


def test_full_recompute_keeps_the_stream_alone():
    job = make_job(LLAMA, 1, recompute="full")
    deeper = replace(job, model=LLAMA.with_layers(4))
    assert memory(deeper)[1].activations - memory(job)[1].activations == 2 * 256 * 128


CASES = {
    "plain": (LLAMA, dict(world=1)),
    "float32": (LLAMA, dict(world=1, dtype="float32")),
    "float64": (LLAMA, dict(world=2, tp=2, dtype="float64")),
    "micro-4": (LLAMA, dict(world=1, micro_batch=4)),
    "zero-1": (LLAMA, dict(world=2, accumulation=2)),
    "zero-2": (LLAMA, dict(world=2, zero=2, accumulation=2)),
    "zero-2-small-buckets": (LLAMA, dict(world=2, zero=2, accumulation=2, bucket_mib=0.5)),
    "zero-3": (LLAMA, dict(world=2, zero=3)),
    "zero-3-accumulated": (LLAMA, dict(world=2, zero=3, accumulation=2)),
    "zero-3-tied": (replace(LLAMA, tied=True), dict(world=2, zero=3)),
    "hsdp-tp": (LLAMA, dict(world=8, zero=3, tp=2, dp_replicate=2)),
    "tp-4": (LLAMA, dict(world=4, tp=4)),
    "tp-8-kv-copies": (LLAMA, dict(world=8, tp=8, dtype="float32")),
    "tp-4-whole-sequence": (LLAMA, dict(world=4, tp=4, sequence_parallel=False)),
    "full": (LLAMA, dict(world=1, recompute="full")),
    "full-zero-3-tp": (LLAMA, dict(world=4, tp=2, zero=3, recompute="full")),
    "norm-mlp": (LLAMA, dict(world=1, recompute="selective")),
    "attention": (LLAMA, dict(world=2, tp=2, recompute="selective:attention")),
    "gpt": (GPT, dict(world=2, tp=2)),
    "gpt-zero-3": (replace(GPT, tied=False), dict(world=2, zero=3, seq=128)),
    "gpt-dropout": (replace(GPT, dropout=0.1), dict(world=1, dtype="float32")),
    "gpt-dropout-tp": (replace(GPT, dropout=0.1), dict(world=2, tp=2)),
    "qwen3": (replace(LLAMA, qk_norm="head"), dict(world=2, tp=2)),
    "olmo2": (OLMO, dict(world=2)),
    "olmo2-tp": (OLMO, dict(world=2, tp=2)),
    "gemma": (GEMMA, dict(world=1)),
    "gemma2": (GEMMA2, dict(world=1)),
    "bloom-like": (replace(LLAMA, embed_norm=True), dict(world=2, tp=2)),
    "bf16-gradients": (LLAMA, dict(world=1, grad_dtype="bfloat16")),
    "ring": (LLAMA, dict(world=4, cp=4, seq=4096)),
    "ring-of-two": (LLAMA, dict(world=2, cp=2, seq=4096, dtype="float32")),
    "ring-full": (LLAMA, dict(world=4, cp=4, seq=4096, recompute="full", micro_batch=2)),
    "ring-zero-3-tp": (LLAMA, dict(world=8, tp=2, cp=2, zero=3, seq=4096)),
    "ring-attention": (LLAMA, dict(world=6, tp=2, cp=3, seq=3072, recompute="selective:attention")),
    "ring-window": (WINDOWED, dict(world=4, cp=4, seq=4096)),
    "ring-gpt": (replace(GPT, seq=4096), dict(world=4, cp=4, seq=4096, accumulation=2)),
    "gathered": (LLAMA, dict(world=4, cp=4, cp_method="all-gather", seq=4096)),
    "gathered-float32": (
        LLAMA,
        dict(world=3, cp=3, cp_method="all-gather", seq=3072, dtype="float32"),
    ),
    "ulysses": (LLAMA, dict(world=4, cp=4, ulysses=4, seq=4096)),
    "ulysses-kv-copies": (LLAMA, dict(world=8, cp=8, ulysses=8, seq=8192, micro_batch=2)),
    "ulysses-qwen3": (
        replace(LLAMA, qk_norm="head"),
        dict(world=4, cp=2, tp=2, ulysses=2, seq=4096),
    ),
    "ulysses-full": (LLAMA, dict(world=2, cp=2, ulysses=2, seq=2048, recompute="full")),
    "ulysses-window": (WINDOWED, dict(world=2, cp=2, ulysses=2, seq=4096)),
    "ulysses-in-a-ring": (LLAMA, dict(world=8, cp=8, ulysses=2, seq=8192)),
    "ulysses-in-a-gather": (
        LLAMA,
        dict(world=4, cp=4, ulysses=2, cp_method="all-gather", seq=4096),
    ),
}


def assert_near(traced: list[dict], predicted: list, tolerance: float) -> None:
    """Every total within the tolerance, every class within the same bytes."""
    said = {row.moment: row for row in predicted}
    for row in traced:
        bound = tolerance * row["total"]
        for name in (*MEMORY_CLASSES, "total"):
            value = getattr(said[row["moment"]], name)
            assert abs(value - row[name]) <= bound, (
                f"{row['moment']}: {name} {value} predicted, {row[name]} traced"
            )


@pytest.mark.parametrize("name", CASES)
def test_predicted_peaks_are_traced_peaks(name):
    """Within 1 % in every moment; in these small models a number a token still shows."""
    model, given = CASES[name]
    job = make_job(model, **given)
    traced = [vars(row) for row in measure(job, full=True).memory]
    assert_near(traced, memory(job), 0.01)


# ------------------------------------------------------------------------------------------
# Context parallelism


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, dict(cp=2)),
        (4, dict(cp=4)),
        (4, dict(cp=4, ulysses=2, recompute="full")),
        (4, dict(cp=2, tp=2, cp_method="all-gather")),
    ],
)
def test_every_rank_of_a_ring_holds_about_what_the_fullest_does(world, layout):
    """What a rank keeps is the same on all; what its calls make is not."""
    job = make_job(replace(LLAMA, layers=4), world, seq=1024, dtype="float32", **layout)
    for rows, _ in run_ranks(world, _held_on_rank, job):
        for row, said in zip(rows, memory(job), strict=True):
            assert abs(said.total - row["total"]) <= 0.01 * row["total"], row["moment"]


@pytest.mark.parametrize(
    "layout", [{}, {"recompute": "full"}, {"cp_method": "all-gather"}], ids=str
)
def test_a_ring_that_grows_with_the_sample_holds_the_same(layout):
    """1,024 positions on each of 2 to 32 ranks. States are sharded over them and shrink; what
    remains of a ring is the same to the byte from 3 ranks on, for with 2 no block follows."""
    rest = {}
    for cp in (2, 4, 8, 32):
        job = make_job(LLAMA, cp, cp=cp, seq=1024 * cp, zero=1, **layout)
        rest[cp] = [row.activations + row.buffers + row.logits for row in memory(job)]
    if "cp_method" in layout:  # which holds the keys of all
        assert rest[32][2] > rest[8][2] > rest[4][2]
    else:
        assert rest[4] == rest[8] == rest[32]
