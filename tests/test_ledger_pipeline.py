"""Pipelines: what each stage sends and holds, by hand and against what its program does dry."""

import random
from dataclasses import replace

import pytest

import cases
from plait.cost.ledger import MEMORY_CLASSES, differences, memory_differences
from plait.cost.memory import memory
from plait.cost.traffic import traffic
from plait.rules import check
from plait.schedules.csvfile import write_table
from plait.schedules.job import table_of
from plait.spec.job import Job, Train
from plait.spec.layout import Layout, divisors
from plait.spec.model import Model
from plait.spec.schedule import SCHEDULES
from plait.trace.dryrun import dryrun, measure
from tables import everywhere

LLAMA, GPT = cases.WIDE, cases.WIDE_GPT
MODELS = {
    "llama": LLAMA,
    "tied": replace(LLAMA, tied=True),
    "gpt": GPT,
    "dropout": replace(GPT, dropout=0.1),
    "olmo2": replace(LLAMA, qk_norm="full", norm_at="output"),
    "qwen3": replace(LLAMA, qk_norm="head"),
    "gemma": replace(LLAMA, norm_offset=True, embed_scale=True, tied=True, mlp="geglu"),
    "gemma2": replace(LLAMA, norm_at="both", logit_softcap=30.0, window=64, full_every=2),
    "bloom": replace(LLAMA, embed_norm=True, positions="learned"),
}
SEQ = 128


def make_job(
    model: Model, m: int, dtype: str = "float32", bucket_mib: float = 25.0, **layout: object
) -> Job:
    layout = Layout.fill(layout.pop("world", layout["pp"]), **layout)
    train = Train(
        seq_len=SEQ,
        dtype=dtype,
        bucket_mib=bucket_mib,
        accumulation=m,
        global_batch=layout.dp * layout.micro_batch * m,
    )
    return Job(model, layout, train)


# ------------------------------------------------------------------------------------------
# Traffic by hand: a message is [128, 128] in float32, 65,536 bytes

MESSAGE = 65_536


def sends(job: Job) -> list[dict[str, tuple[int, int]]]:
    """For each stage: phase -> (count, bytes) of what it sends along the pipeline."""
    result = [{} for _ in range(job.layout.pp)]
    for row in traffic(job).rows():
        if row.axis == "pp":
            result[row.stage][row.phase] = row.count, row.bytes
            assert (row.collective, row.wire_bytes) == ("send", row.bytes)
    return result


def messages(forward: int, backward: int) -> dict[str, tuple[int, int]]:
    counts = {"forward": forward, "backward": backward}
    return {phase: (n, n * MESSAGE) for phase, n in counts.items() if n}


def test_a_border_is_crossed_twice_by_each_micro_batch():
    assert sends(make_job(LLAMA, 6, pp=4)) == [
        messages(6, 0),
        messages(6, 6),
        messages(6, 6),
        messages(0, 6),
    ]


def test_chunks_in_a_loop_cross_more_often():
    # Chunks 0, 2 on stage 0 and 1, 3 on stage 1: three borders, all between the two.
    assert sends(make_job(LLAMA, 4, pp=2, vpp=2)) == [messages(8, 4), messages(4, 8)]


def test_a_v_turns_on_one_rank():
    # Chunks 0, 3 on stage 0 and 1, 2 on stage 1: of three borders one is within stage 1.
    assert sends(make_job(LLAMA, 4, pp=2, schedule="zbv")) == [messages(4, 4), messages(4, 4)]


def test_sequence_parallelism_sends_a_part_of_the_rows():
    (first, last) = sends(make_job(LLAMA, 4, pp=2, tp=4, world=8))
    assert first == {"forward": (4, 4 * MESSAGE // 4)}
    assert last == {"backward": (4, 4 * MESSAGE // 4)}


@pytest.mark.parametrize(("zero", "shards"), [(0, 1), (1, 2), (2, 2), (3, 2)])
def test_a_tied_table_sums_its_gradients_over_the_ends(zero, shards):
    """Each end sends what it owns of the table's gradient, 512 x 128 float32."""
    job = make_job(MODELS["tied"], 4, pp=2, world=4, zero=zero)
    table = 512 * 128 * 4 // shards
    assert [s["backward"] for s in sends(job)] == [(1, table), (5, 4 * MESSAGE + table)]


def test_a_tied_table_at_the_ends_of_a_v_is_on_one_rank():
    job = make_job(MODELS["tied"], 4, pp=2, schedule="zbv")
    assert sends(job) == [messages(4, 4), messages(4, 4)]


def test_dualpipe_sums_the_gradients_of_both_copies():
    # Half of the micro batches start at each end; each rank holds the whole model: one bucket a
    # chunk. A layer 123,136 elements (4 x (128 x 128 or 64 x 128 twice) + 3 x 320 x 128 + 2 x
    # 128); embedding 65,536; head 65,536 + 128.
    layer = 2 * 128 * 128 + 2 * 64 * 128 + 3 * 320 * 128 + 2 * 128
    ends = [2 * layer + 512 * 128, 2 * layer + 512 * 128 + 128]
    for sent in sends(make_job(LLAMA, 4, pp=2, schedule="dualpipe")):
        assert sent["forward"] == (2, 2 * MESSAGE)
        assert sent["backward"] == (2 + 2, 2 * MESSAGE + 4 * sum(ends))


def test_gradients_are_reduced_for_each_micro_batch_of_a_chunk():
    """ZeRO-2 with 4 micro batches: 4 reduce-scatters of each chunk's bucket, and one gather."""
    job = make_job(LLAMA, 4, pp=2, vpp=2, world=4, zero=2)
    counts = {
        (row.stage, row.collective): row.count for row in traffic(job).rows() if row.axis == "fsdp"
    }
    assert counts == {
        (stage, collective): 2 * times
        for stage in (0, 1)
        for collective, times in (("reduce-scatter", 4), ("all-gather", 1))
    }


# ------------------------------------------------------------------------------------------
# Memory by hand


def activations(job: Job, moment: str) -> list[int]:
    return [row.activations for row in memory(job) if row.moment == moment]


def test_an_earlier_stage_holds_a_micro_batch_more():
    """1F1B: stage s of p holds p - s micro batches. Of each a layer keeps x and the norm's output
    twice, q, k, v, attention's output, gate, up, product (4 bytes), two numbers a row and one a
    head and token; a chunk of layers its rotary tables too."""
    job = make_job(LLAMA.with_layers(8), 12, pp=4)
    q, kv, ffn, hidden, heads, width = 128, 64, 320, 128, 8, 16
    layer = 4 * SEQ * (4 * hidden + 2 * q + 2 * kv + 3 * ffn) + 4 * SEQ * (2 + heads)
    chunk = 2 * layer + 4 * 2 * SEQ * width
    held = activations(job, "forward")
    assert held[1] - held[2] == chunk


def test_half_of_the_activations_and_a_third():
    """V-half and V-min: against ZBV and 1F1B, which hold pp micro batches (2405.15362, table 1).
    Of few layers with much in them, a message is next to nothing."""
    wide = replace(LLAMA, hidden=16, heads=1, kv_heads=1, head_dim=16, ffn=8192, vocab=16)

    def most(schedule: str, pp: int = 6) -> float:
        vpp = 1 if schedule == "1f1b" else 2
        job = make_job(wide.with_layers(2 * pp), 24, pp=pp, schedule=schedule, vpp=vpp)
        return max(activations(job, "forward"))

    whole = most("1f1b")
    assert most("v-half") / whole == pytest.approx((6 / 2 + 1) / 6, rel=0.05)
    assert most("v-min") / whole == pytest.approx((6 / 3 + 1) / 6, rel=0.05)


# ------------------------------------------------------------------------------------------
# Against the program


def agree(job: Job) -> None:
    """Every stage: traffic exactly, memory within a hundredth in every moment."""
    measured = measure(job)
    assert differences(traffic(job), measured.traffic) == []
    said = {(row.stage, row.moment): row for row in memory(job)}
    assert said.keys() == {(row.stage, row.moment) for row in measured.memory}
    for row in measured.memory:
        expected = said[row.stage, row.moment]
        assert expected.total == pytest.approx(row.total, rel=0.01), (row.stage, row.moment)
        assert expected.total == sum(getattr(expected, name) for name in MEMORY_CLASSES)


def random_job(seed: int, schedule: str) -> Job:
    rng = random.Random(seed)
    low, high = SCHEDULES[schedule].vpp
    pp = 2 if schedule == "dualpipe" else rng.choice((2, 2, 2, 3))
    vpp = rng.choice((2, 3)) if high > 2 and low == 2 else low
    chunks, dp, zero = pp * vpp, rng.choice((1, 2, 4)), rng.choice((0, 1, 2, 3))
    tp = rng.choice((1, 1, 2, 4))
    model = MODELS[rng.choice(list(MODELS))]
    layout = {
        "world": pp * tp * dp,
        "pp": pp,
        "vpp": vpp,
        "schedule": schedule,
        "tp": tp,
        "sequence_parallel": tp > 1 and rng.random() < 0.6,
        "zero": zero,
        "dp_replicate": rng.choice(divisors(dp)) if zero else dp,
        "micro_batch": rng.choice((1, 2)),
        "recompute": rng.choice(("none", "none", "full", "selective", "selective:attention")),
    }
    # Fewer layers than chunks: then the ends are embedding and head alone.
    model = model.with_layers(rng.choice((max(chunks - 2, 1), chunks, chunks + 1)))
    m = 2 * pp + 2 * rng.choice((0, 1))
    dtype, bucket = rng.choice(("float32", "bfloat16")), rng.choice((0.1, 25.0))
    return make_job(model, m, dtype, bucket, **layout)


def legal_job(seed: int, schedule: str) -> Job:
    """The first of a row of random jobs that nothing speaks against."""
    tries = (random_job(seed + 10_000 * i, schedule) for i in range(100))
    return next(job for job in tries if all(f.level != "error" for f in check(job, "plan")))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(schedule):
    agree(legal_job(0, schedule))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_head_alone_on_its_stage(zero):
    """One layer over two stages; the gradient of what was received comes first there."""
    agree(make_job(MODELS["gpt"].with_layers(1), 2, "bfloat16", 0.1, pp=2, world=4, zero=zero))


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(1, 31))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_many_random_pipelines(schedule, seed):
    agree(legal_job(seed, schedule))


def test_a_table_in_a_file(tmp_path):
    job = make_job(LLAMA, 4, pp=2, schedule="zb-h1")
    path = tmp_path / "mine.csv"
    write_table(table_of(job), path)
    own = replace(job, layout=replace(job.layout, schedule=str(path)))
    assert [f for f in check(own, "plan") if f.level == "error"] == []
    assert traffic(own) == traffic(job)
    agree(own)


def test_a_dry_run_compares_every_stage():
    answer = dryrun(make_job(LLAMA, 4, pp=2), [])
    assert answer["agree"]
    stages = [(row["stage"], row["moment"]) for row in answer["measured"]["memory"]]
    moments = ("forward", "loss", "backward", "optimizer")
    assert stages == [(stage, moment) for stage in (0, 1) for moment in moments]


@pytest.mark.parametrize("zero", [1, 2])
def test_copies_on_every_stage(zero, tmp_path):
    """Three stages, each with the whole model: each sends its part of all gradients to two."""
    write_table(everywhere(3, 4), tmp_path / "mine.csv")
    layout = {"pp": 3, "vpp": 2, "world": 6, "zero": zero, "schedule": str(tmp_path / "mine.csv")}
    job = make_job(LLAMA.with_layers(6), 4, **layout)
    # As above; two ranks share the gradients of a stage.
    layer = 2 * 128 * 128 + 2 * 64 * 128 + 3 * 320 * 128 + 2 * 128
    own = 4 * (6 * layer + 2 * 512 * 128 + 128) // 2
    assert [s["backward"][1] for s in sends(job)] == [2 * own] * 3
    agree(job)


@pytest.mark.parametrize("recompute", ["full", "selective:mlp", "selective:attention"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_what_is_gathered_for_recomputation(schedule, recompute):
    """Under sequence parallelism a whole gradient of the stream is there while a region is made
    again: of eight ranks' rows that is much beside what one of them keeps."""
    model = Model.of(
        "wide", layers=4, hidden=1024, heads=16, kv_heads=8, ffn=3584, vocab=512, head_dim=64
    )
    layout = Layout.fill(16, tp=8, pp=2, schedule=schedule, recompute=recompute)
    train = Train(seq_len=8192, dtype="bfloat16", accumulation=2, global_batch=2)
    job = Job(model, layout, train)
    assert memory_differences(memory(job), measure(job).memory) == []
