"""Predicted traffic against closed forms of the papers, with the numbers worked out by hand.

The model: hidden 32, four heads of 8, ffn 64, vocabulary 64, two layers. Its parameters:
    embedding  64 x 32                                          2,048
    a layer    two norms of 32, q k v o of 32 x 32, three matrices of 64 x 32
               64 + 4 x 1,024 + 3 x 2,048                      10,304
    head       a norm of 32, 64 x 32                            2,080
    all        2,048 + 2 x 10,304 + 2,080                      24,736, in float32 98,944 bytes
A micro batch: 2 samples of 16 tokens, 32 tokens, [32, 32] in float32 is 4,096 bytes.
"""

from dataclasses import replace

import pytest

from plait.cost.ledger import (
    StageMemory,
    TrafficLedger,
    differences,
    memory_differences,
    wire_bytes,
)
from plait.cost.traffic import traffic
from plait.spec.job import Job, Train
from plait.spec.layout import Layout
from plait.spec.model import Model

MODEL = Model.of("hand", layers=2, hidden=32, heads=4, ffn=64, vocab=64)
ALL = 98_944
STREAM = 4_096


def job(world, model=MODEL, accumulation=1, dtype="float32", bucket_mib=25.0, **layout) -> Job:
    layout = Layout.fill(world, micro_batch=2, **layout)
    train = Train(
        seq_len=16,
        dtype=dtype,
        bucket_mib=bucket_mib,
        accumulation=accumulation,
        global_batch=2 * layout.dp * accumulation,
    )
    return Job(model, layout, train)


def entries(job: Job, *axes: str) -> dict[str, tuple[int, int, int]]:
    """ "collective phase" -> (count, bytes, wire bytes) of some axes."""
    rows = [row for row in traffic(job).rows() if row.axis in axes]
    return {f"{r.collective} {r.phase}": (r.count, r.bytes, r.wire_bytes) for r in rows}


# ------------------------------------------------------------------------------------------
# The ledger itself


@pytest.mark.parametrize(
    ("collective", "bytes", "size", "wire"),
    [
        ("all-reduce", 800, 4, 1200),
        ("all-gather", 800, 4, 600),
        ("reduce-scatter", 800, 8, 700),
        ("all-to-all", 800, 2, 400),
        ("send", 800, 2, 800),
        ("all-reduce", 8, 3, 11),  # 10 2/3
    ],
)
def test_wire_bytes_of_a_ring(collective, bytes, size, wire):
    assert wire_bytes(collective, bytes, size) == wire


def test_messages_add_up_and_one_rank_sends_nothing():
    ledger = TrafficLedger()
    ledger.add(0, "tp", "all-reduce", "forward", "float32", 100, 2, count=3)
    ledger.add(0, "tp", "all-reduce", "forward", "float32", 50, 2)
    ledger.add(0, "fsdp", "all-gather", "forward", "float32", 50, 1)
    (row,) = ledger.rows(inter_node={"tp"})
    assert (row.axis, row.count, row.bytes, row.wire_bytes) == ("tp", 4, 350, 350)
    assert row.inter_node


def test_differences_name_the_entry_and_both_sides():
    predicted, measured = TrafficLedger(), TrafficLedger()
    for ledger in (predicted, measured):
        ledger.add(0, "tp", "all-reduce", "forward", "float32", 100, 2)
    assert predicted == measured
    assert differences(predicted, measured) == []
    measured.add(0, "fsdp", "all-gather", "backward", "bfloat16", 64, 4)
    predicted.add(0, "tp", "all-reduce", "forward", "float32", 100, 2)
    assert predicted != measured
    assert differences(predicted, measured) == [
        "stage 0: all-gather over fsdp in backward (bfloat16): predicted 0 x, 0 bytes, "
        "0 on the wire; measured 1 x, 64 bytes, 48 on the wire",
        "stage 0: all-reduce over tp in forward (float32): predicted 2 x, 200 bytes, "
        "200 on the wire; measured 1 x, 100 bytes, 100 on the wire",
    ]


def test_memory_may_be_off_by_a_hundredth():
    def row(moment, total):
        return StageMemory(0, moment, total, 0, 0, 0, 0, 0, 0, total)

    gib = 2**30
    measured = [row("forward", 100 * gib), row("loss", 2**20), row("backward", 100 * gib)]
    near = [row("forward", 99 * gib), row("loss", 0), row("backward", 101 * gib)]
    assert memory_differences(near, measured) == []
    lines = memory_differences([*near[:2], row("backward", 102 * gib), row("norm", gib)], measured)
    assert [line.partition(":")[2].split(":")[0] for line in lines] == [
        " peak of backward",
        " peak of norm",
    ]


# ------------------------------------------------------------------------------------------
# Data parallelism: 4 ranks, 3 micro batches (ZeRO 1910.02054 section 7)


def test_ddp_sends_all_gradients_once():
    sent = entries(job(4, zero=0, accumulation=3), "dp_replicate", "fsdp")
    assert sent == {"all-reduce backward": (1, ALL, 148_416)}  # 2 x 3/4


def test_zero_1_splits_the_all_reduce():
    sent = entries(job(4, zero=1, accumulation=3), "dp_replicate", "fsdp")
    assert sent == {
        "reduce-scatter backward": (1, ALL, 74_208),  # 3/4
        "all-gather optimizer": (1, ALL, 74_208),
    }


def test_zero_2_scatters_after_each_micro_batch():
    sent = entries(job(4, zero=2, accumulation=3), "dp_replicate", "fsdp")
    assert sent == {
        "reduce-scatter backward": (3, 296_832, 222_624),
        "all-gather optimizer": (1, ALL, 74_208),
    }


def test_zero_3_gathers_each_unit_twice_a_micro_batch():
    # Four units: embedding, two layers, head; each of them divides by 4.
    sent = entries(job(4, zero=3, accumulation=3), "dp_replicate", "fsdp")
    assert sent == {
        "all-gather forward": (12, 296_832, 222_624),
        "all-gather backward": (12, 296_832, 222_624),
        "reduce-scatter backward": (12, 296_832, 222_624),
    }


def test_hsdp_reduces_the_shards_over_the_replicas_once():
    for zero in (1, 2, 3):
        sent = entries(job(4, zero=zero, dp_replicate=2, accumulation=3), "dp_replicate")
        messages = 4 if zero == 3 else 1
        assert sent == {"all-reduce backward": (messages, 49_472, 49_472)}  # half of all


def test_weights_travel_in_bfloat16_and_gradients_in_float32():
    sent = entries(job(4, zero=1, dtype="bfloat16"), "fsdp")
    assert sent == {
        "reduce-scatter backward": (1, ALL, 74_208),
        "all-gather optimizer": (1, ALL // 2, 37_104),
    }


def test_padding_travels_too():
    # 24,736 elements over 3 ranks are padded to 24,738; twice over 3 of 98,952 bytes.
    sent = entries(job(3, zero=1), "fsdp")
    assert sent["reduce-scatter backward"] == (1, 98_952, 65_968)


def test_small_buckets_carry_a_parameter_each():
    # The embedding, nine tensors in each of two layers, norm and output of the head.
    sent = entries(job(4, zero=0, bucket_mib=0.0), "dp_replicate")
    assert sent["all-reduce backward"][:2] == (21, ALL)


# ------------------------------------------------------------------------------------------
# Tensor parallelism


def layer(**given) -> dict[str, tuple[int, int, int]]:
    """What one layer more sends over tp 2 in a micro batch."""
    deep = entries(job(2, replace(MODEL, layers=3), tp=2, **given), "tp")
    flat = entries(job(2, tp=2, **given), "tp")
    gap = {
        key: tuple(a - b for a, b in zip(deep[key], flat.get(key, (0, 0, 0)), strict=True))
        for key in deep
    }
    return {key: value for key, value in gap.items() if any(value)}


def test_megatron_all_reduces_twice_a_pass():
    # 1909.08053 figure 4: two forward, two backward; 8 x 1/2 x b s h on the wire.
    sent = layer(sequence_parallel=False)
    assert sent == {
        "all-reduce forward": (2, 2 * STREAM, 2 * STREAM),
        "all-reduce backward": (2, 2 * STREAM, 2 * STREAM),
    }


def test_sequence_parallelism_gathers_and_scatters():
    # 2205.05198 section 4.2.2: 4 all-gathers, 4 reduce-scatters, and 2 all-gathers of the rows
    # that were kept; with half of each on the wire 10 x 1/2 x b s h.
    sent = layer(sequence_parallel=True)
    # The two norms' gradients, 64 numbers, ride in a message that is there already.
    assert sent.pop("all-reduce backward") == (0, 256, 256)
    assert sent == {
        "all-gather forward": (2, 2 * STREAM, STREAM),
        "reduce-scatter forward": (2, 2 * STREAM, STREAM),
        "all-gather backward": (4, 4 * STREAM, 2 * STREAM),
        "reduce-scatter backward": (2, 2 * STREAM, STREAM),
    }


@pytest.mark.parametrize(
    ("recompute", "gathers", "scatters"),
    [
        ("full", 2, 1),  # the last sum keeps nothing, so it is not repeated
        ("selective:mlp", 1, 0),
        ("selective:attention", 1, 0),
        ("selective:attention,mlp", 2, 0),
        ("selective:norm", 0, 0),
    ],
)
def test_recompute_repeats_what_backward_needs(recompute, gathers, scatters):
    sent = layer(sequence_parallel=True, recompute=recompute)
    for name, count in (("all-gather", gathers), ("reduce-scatter", scatters)):
        expected = (count, count * STREAM, count * STREAM // 2)
        assert sent.get(f"{name} recompute", (0, 0, 0)) == expected


def test_embedding_head_and_loss():
    sent = entries(job(2, tp=2, sequence_parallel=False, accumulation=3), "tp")
    # 3 x (2 layers x 2 + embedding) forward, 3 x (2 layers x 2 + head) backward.
    assert sent["all-reduce forward"] == (15, 15 * STREAM, 15 * STREAM)
    assert sent["all-reduce backward"] == (15, 15 * STREAM, 15 * STREAM)
    # 3 x the maxima of 32 tokens, and 3 x sums and targets.
    assert sent["all-reduce loss"] == (6, 3 * 128 + 3 * 256, 3 * 128 + 3 * 256)


def test_copied_kv_heads_sum_their_gradients():
    # Two KV heads on four ranks: pairs hold the same head, k and v of [8, 32] in each layer.
    grouped = replace(MODEL, kv_heads=2)
    sent = entries(job(4, grouped, tp=4, sequence_parallel=False), "tp")
    # 5 x the stream over four ranks, 3/2 of it on the wire; 4,096 bytes over two.
    assert sent["all-reduce backward"] == (6, 5 * STREAM + 4_096, 5 * 6_144 + 4_096)


def test_a_norm_over_all_heads_sums_over_the_ranks():
    # q and k, 32 numbers each, forward and backward; the norms' own weights are cut.
    sent = layer_of(replace(MODEL, qk_norm="full"))
    assert sent["all-reduce forward"] == (4, 2 * STREAM + 256, 2 * STREAM + 256)
    assert sent["all-reduce backward"] == (4, 2 * STREAM + 256, 2 * STREAM + 256)


def layer_of(model: Model) -> dict[str, tuple[int, ...]]:
    deep = entries(job(2, replace(model, layers=3), tp=2, sequence_parallel=False), "tp")
    flat = entries(job(2, model, tp=2, sequence_parallel=False), "tp")
    return {k: tuple(a - b for a, b in zip(deep[k], flat[k], strict=True)) for k in deep}


def test_scalars_of_a_step():
    assert entries(job(4, zero=1, accumulation=3), "world") == {
        "all-reduce loss": (1, 8, 12),  # valid tokens, int64
        "all-reduce norm": (1, 16, 24),  # loss and squared norm, float64
    }


def test_one_rank_sends_nothing():
    assert traffic(job(1)).rows() == []


# ------------------------------------------------------------------------------------------
# Context parallelism: a rank of cp 4 has 8 of the 32 tokens; queries, keys and values of them are
# [8, 32] each, in float32 1,024 bytes. Two layers, one micro batch.

PART = 1_024


def test_a_ring_passes_keys_and_values_on():
    """(c - 1) messages forward, 2 (c - 1) backward (2310.01889 section 3)."""
    sent = entries(job(4, cp=4), "cp", "ulysses")
    kv = 2 * PART
    assert sent == {
        "send forward": (2 * 3, 6 * kv, 6 * kv),
        "send backward": (4 * 3, 12 * kv, 12 * kv),
    }


def test_only_kv_heads_travel():
    """One of four: a fourth of the bytes."""
    sent = entries(job(4, model=replace(MODEL, kv_heads=1), cp=4), "cp")
    assert sent["send forward"][1] == 6 * 2 * PART // 4


def test_a_ring_ends_where_no_query_sees_further():
    """Head-tail pieces of 2 of 16 positions: rank r has neighbours on both sides, so a window
    lets nobody stop before the last step but for itself alone."""
    short = replace(MODEL, window=1)
    assert entries(job(4, model=short, cp=4), "cp") == {}
    half = replace(MODEL, window=1, full_every=2)
    assert entries(job(4, model=half, cp=4), "cp")["send forward"][0] == 3


def test_gathering_keys_of_all_ranks():
    """Output of the gather and input of the scatter: four times what a rank has; 3/4 on the wire
    (2407.21783 section 3.3.2)."""
    sent = entries(job(4, cp=4, cp_method="all-gather"), "cp", "ulysses")
    whole, wire = 4 * 2 * PART, 3 * 2 * PART
    assert sent == {
        "all-gather forward": (2, 2 * whole, 2 * wire),
        "all-gather backward": (2, 2 * whole, 2 * wire),
        "reduce-scatter backward": (2, 2 * whole, 2 * wire),
    }


def test_ulysses_exchanges_positions_for_heads():
    """Queries, keys and values, then the output: 4 [8, 32] of which 3/4 leave the rank
    (2309.14509 section 3.1)."""
    sent = entries(job(4, cp=4, ulysses=4), "cp", "ulysses")
    each = (4, 2 * 4 * PART, 2 * 3 * PART)
    assert sent == {"all-to-all forward": each, "all-to-all backward": each}


def test_what_ulysses_sends_stays_when_sequence_and_ranks_grow():
    """2309.14509: with S and P grown together the message of a rank is the same; the ring's is
    sent P - 1 times."""
    both = [job(p, cp=p, ulysses=p) for p in (2, 4)]
    both = [replace(j, train=replace(j.train, seq_len=4 * j.layout.cp)) for j in both]
    assert len({entries(j, "ulysses")["all-to-all forward"][1] for j in both}) == 1


def test_ulysses_inside_of_a_ring():
    """Two positions for heads, two groups in a ring: half of what cp 4 in a ring sends."""
    sent = entries(job(4, cp=4, ulysses=2), "cp", "ulysses")
    assert sent["send forward"] == (2 * 1, 2 * 2 * PART, 2 * 2 * PART)
    assert sent["all-to-all forward"] == (4, 2 * 4 * PART, 4 * PART)
    # Copies of a single KV head for two ranks: 32 + 2 x 16 columns instead of 32 + 2 x 8.
    copied = entries(job(4, model=replace(MODEL, kv_heads=1), cp=4, ulysses=2), "ulysses")
    assert copied["all-to-all forward"][1] == 2 * (2 * PART + PART)


def test_recomputation_passes_keys_on_once_more():
    for recompute, again in (("full", True), ("selective:attention", True), ("selective", False)):
        sent = entries(job(4, cp=4, ulysses=2, recompute=recompute), "cp", "ulysses")
        for name in ("send", "all-to-all"):
            assert sent.get(f"{name} recompute") == (sent[f"{name} forward"] if again else None)


def test_model_states_are_sharded_over_cp_too():
    """fsdp = dp_shard x cp; under ZeRO 0 cp ranks sum their gradients, then the replicas."""
    assert entries(job(4, cp=4, zero=1), "fsdp") == entries(job(4, zero=1), "fsdp")
    sent = entries(job(4, cp=2, zero=0), "fsdp")
    assert sent == entries(job(4, cp=2, zero=0), "dp_replicate")
    assert sent == {"all-reduce backward": (1, ALL, ALL)}


def test_regions_of_tensor_parallelism_are_smaller():
    alone, both = (entries(job(2 * cp, tp=2, cp=cp), "tp") for cp in (1, 2))
    assert both["all-gather forward"][1] == alone["all-gather forward"][1] // 2
