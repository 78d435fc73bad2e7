"""What layers cost, and which of them a chunk gets."""

import itertools
import random
from dataclasses import replace

import pytest

from plait.cost.flops import Flops, chunk_flops, layer_flops
from plait.planner.partition import by_cost, placement
from plait.schedules.job import chunk_times
from plait.spec import presets
from plait.spec.findings import UserError
from plait.spec.jobfile import read_job
from plait.spec.layout import Layout
from plait.spec.model import Model

#: Parameters of matrices by hand: a layer 2 x 32 x 32 + 2 x 16 x 32 + 3 x 80 x 32 = 10,752; the
#: head 32 x 100 = 3,200.
HAND = Model.of("hand", layers=2, hidden=32, heads=4, kv_heads=2, ffn=80, vocab=100)


# ------------------------------------------------------------------------------------------
# Operations


def test_by_hand():
    """64 tokens: a map of n parameters takes 2 x 64 n forward, and each way back as much; scores
    and values of 64 x 64 / 2 pairs, 2 x 2 x 32 for each pair."""
    maps, core = 2 * 64 * 10_752, 2 * 2 * 32 * 64 * 64 // 2
    layers, head = layer_flops(HAND, Layout(), 64)
    assert layers == (Flops(maps + core, maps + 2 * core, maps),) * 2
    assert head == Flops(*[2 * 64 * 3_200] * 3)


def test_recompute_is_backward():
    maps, core = 2 * 64 * 10_752, 2 * 2 * 32 * 64 * 64 // 2
    mlp = 2 * 64 * 3 * 80 * 32
    for recompute, again in (
        ("full", maps + core),
        ("selective:mlp", mlp),
        ("selective:attention", maps - mlp + core),
        ("selective:norm", 0),
    ):
        layers, _ = layer_flops(HAND, Layout(recompute=recompute), 64)
        assert layers[0] == Flops(maps + core, maps + 2 * core + again, maps)


def test_a_window_is_seen_and_no_more():
    """Of 64 positions 16 back: 16 x 64 - 16 x 16 / 2 = 896 pairs."""
    windowed = replace(HAND, window=16, full_every=2)
    layers, _ = layer_flops(windowed, Layout(), 64)
    assert layers[1].forward - layers[0].forward == 2 * 2 * 32 * (64 * 64 // 2 - 896)


@pytest.mark.parametrize("name", ["llama3.1-8b", "llama3.1-405b", "gpt3-175b"])
def test_the_convention_of_published_numbers(name):
    """Causal halved, head counted: 3 x 2 x (L (h q + 2 h kv + q h + n h f) + V h) + 3 x 2 s q L a
    token, which 89 published rows of Megatron-Bridge follow."""
    model, s = presets.model(name), 2048
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    h, matrices = model.hidden, 3 if model.gated else 2
    per_layer = h * q + 2 * h * kv + q * h + matrices * h * model.ffn
    token = 6 * (model.layers * per_layer + model.vocab * h) + 6 * s * q * model.layers
    layers, head = layer_flops(model, Layout(), s)
    assert sum(map(sum, layers)) + sum(head) == token * s


def test_tensor_parallel_ranks_share_the_work():
    whole, shared = (layer_flops(HAND, Layout(tp=tp), 64) for tp in (1, 2))
    assert [2 * n for n in shared[0][0]] == list(whole[0][0])
    # Four ranks, two KV heads: k and v are computed twice.
    (four, _), kv = layer_flops(HAND, Layout(tp=4), 64), 2 * 64 * 2 * 16 * 32
    assert 4 * four[0].weight_grad == whole[0][0].weight_grad + kv


def test_experts_work_for_their_tokens():
    moe, dense = presets.model("mixtral-8x7b"), presets.model("mixtral-8x7b")
    dense = replace(moe, moe=None, ffn=2 * moe.moe.ffn)  # two of eight experts
    router = 2 * 64 * 8 * moe.hidden
    (mixed, _), (plain, _) = (layer_flops(m, Layout(), 64) for m in (moe, dense))
    assert mixed[0].weight_grad == plain[0].weight_grad + router


def test_chunks_are_sums():
    model = HAND.with_layers(6)
    layers, head = layer_flops(model, Layout(), 64)
    chunks = chunk_flops(model, Layout(pp=3, stages=(1, 3, 2)), 64)
    assert chunks[0] == layers[0]
    assert chunks[2] == layers[4] + layers[5] + head
    times = chunk_times(model, Layout(pp=3, stages=(1, 3, 2)), 64)
    assert times.forward == tuple(c.forward for c in chunks)
    assert times.transfer == 0


# ------------------------------------------------------------------------------------------
# Partition


def slowest(model: Model, layout: Layout, seq: int, stages: tuple[int, ...]) -> int:
    costs = [sum(c) for c in chunk_flops(model, replace(layout, stages=stages), seq)]
    return max(sum(costs[c] for c in held) for held in placement(layout))


def partitions(layers: int, chunks: int):
    """Every one in which only the ends may have no layer."""
    for cut in itertools.combinations_with_replacement(range(layers + 1), chunks - 1):
        ends = (0, *cut, layers)
        counts = tuple(b - a for a, b in itertools.pairwise(ends))
        if 0 not in counts[1:-1]:
            yield counts


def random_case(seed: int) -> tuple[Model, Layout]:
    rng = random.Random(seed)
    schedule = rng.choice(("1f1b", "interleaved-1f1b", "zbv", "dualpipe"))
    pp, vpp = rng.choice((2, 4)), 2 if schedule in ("interleaved-1f1b", "zbv") else 1
    model = HAND.with_layers(rng.randint(pp * vpp - 2 or 1, 9))
    model = replace(model, vocab=rng.choice((100, 500, 3000)), tied=rng.random() < 0.5)
    if vpp == 1 and schedule == "1f1b" and rng.random() < 0.5:
        model = replace(model, window=8, full_every=3)
    return model, Layout(pp=pp, vpp=vpp, schedule=schedule)


@pytest.mark.parametrize("seed", range(30))
def test_no_partition_is_faster(seed):
    model, layout = random_case(seed)
    found = by_cost(model, layout, 64)
    every = list(partitions(model.layers, layout.pp * layout.vpp))
    assert found in every
    best = min(slowest(model, layout, 64, counts) for counts in every)
    assert slowest(model, layout, 64, found) == best


def test_llama_405b_as_its_makers_cut_it():
    """126 layers over 16 stages: one less at each end (2407.21783, section 3.3.2)."""
    stages = by_cost(presets.model("llama3.1-405b"), Layout(tp=8, pp=16), 8192)
    assert stages == (7, *[8] * 14, 7)


def test_too_few_layers_have_no_partition():
    assert sum(by_cost(HAND, Layout(pp=8), 64)) == 2


# ------------------------------------------------------------------------------------------
# As a person says it


def read(stages: str, **said: object):
    overrides = {"pp": 4, "stages": stages, "seq_len": 4096} | said
    return read_job("plan", model="llama3.1-8b", ranks=8, overrides=overrides).layout.stages


def test_words_become_numbers():
    assert read("balanced") == (8, 8, 8, 8)
    assert read("cost") == by_cost(presets.model("llama3.1-8b"), Layout(pp=4), 4096)
    assert sum(read("cost", vpp=2)) == 32
    assert len(read("cost", schedule="zbv")) == 8
    assert read("9,9,8,6") == (9, 9, 8, 6)
    assert read("none") is None


def test_another_word_is_an_error():
    with pytest.raises(UserError) as e:
        read("blanced")
    (finding,) = e.value.findings
    assert (finding.where, finding.nearest) == ("layout.stages", "balanced")
