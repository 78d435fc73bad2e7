"""The layouts that the parity tests go through: all legal ones, and a sample with every pair.

A case is a point in a space of choices. An axis of the space is a name and its values; later
strategies add axes. `legal` says which points are layouts at all.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from harness import Case
from plait.spec.job import Train
from plait.spec.layout import Layout
from plait.spec.model import Model, RopeScaling

SEQ = 16

_BASE = Model.of(
    "parity", layers=2, hidden=32, heads=8, head_dim=4, vocab=61, ffn=48, seq=SEQ, kv_heads=8
)

#: Choices of the model that meet a layout differently: norms over heads or over all heads,
#: biases, learned positions, dropout, norms after the branch, scaled embeddings.
MODELS = {
    "llama": replace(_BASE, rope_scaling=RopeScaling("llama3", 4.0, 8)),
    "qwen2": replace(_BASE, qkv_bias=True, norm_eps=1e-6),
    "qwen3": replace(_BASE, qk_norm="head"),
    "olmo2": replace(_BASE, qk_norm="full", norm_at="output"),
    "gemma": replace(_BASE, mlp="geglu", norm_offset=True, embed_scale=True, norm_at="both"),
    "gpt2": replace(
        _BASE,
        mlp="gelu",
        norm="layer",
        positions="learned",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        dropout=0.1,
    ),
}

SPACE: dict[str, Sequence[Any]] = {
    "world": (1, 2, 4, 8),
    "tp": (1, 2, 4, 8),
    "dp_replicate": (1, 2, 4, 8),
    "zero": (0, 1, 2, 3),
    "sequence_parallel": (False, True),
    "accumulation": (1, 2),
    "recompute": ("none", "selective", "full", "selective:attention"),
    "tied": (False, True),
    "kv_heads": (8, 2, 1),
    "model": tuple(MODELS),
    "bucket_mib": (25.0, 0.005),
    # Of one value here: what `UNEVEN` gives others to.
    "heads": (8,),
    "global_batch": (16,),
}

_TURNS = ("model", "bucket_mib")

Point = dict[str, Any]


def legal(point: Point) -> bool:
    """Whether a point is a layout (and not the same as another one)."""
    world, tp = point["world"], point["tp"]
    if world % tp or (point["sequence_parallel"] and tp == 1):
        return False
    dp = world // tp
    if point["zero"] == 0:
        return point["dp_replicate"] == dp
    return dp % point["dp_replicate"] == 0


def case(point: Point) -> Case:
    """The case of a legal point."""
    given = {key: point[key] for key in ("heads", "kv_heads", "tied")}
    model = replace(MODELS[point["model"]], name=point["model"], **given)
    fields = ("tp", "dp_replicate", "zero", "sequence_parallel", "recompute")
    dp = point["world"] // point["tp"]
    micro = point["global_batch"] // dp // point["accumulation"]
    layout = Layout.fill(point["world"], micro_batch=micro, **{f: point[f] for f in fields})
    train = Train(bucket_mib=point["bucket_mib"])
    return Case(model, layout, point["accumulation"], SEQ, train)


def _uneven(**given: Any) -> Point:
    return {key: given.get(key, values[0]) for key, values in SPACE.items()}


#: Worlds and degrees that are no powers of two, where nothing divides by luck: copies of KV heads
#: by threes, a vocabulary of 61 padded to 63 or 66, shards that end inside rows, HSDP of 2 x 3.
UNEVEN: list[Point] = [
    _uneven(world=3, zero=3, model="qwen2", global_batch=6, recompute="selective", tied=True),
    _uneven(world=3, tp=3, heads=6, kv_heads=6, model="gemma", global_batch=4, tied=True),
    _uneven(world=3, tp=3, heads=6, kv_heads=3, model="qwen3", global_batch=6,
            sequence_parallel=True, tied=True, accumulation=2),
    _uneven(world=3, tp=3, heads=12, kv_heads=1, model="olmo2", global_batch=3,
            sequence_parallel=True),
    _uneven(world=5, zero=1, model="gpt2", global_batch=10, accumulation=2, bucket_mib=0.005),
    _uneven(world=5, zero=3, model="olmo2", global_batch=5, recompute="full", tied=True),
    _uneven(world=6, tp=6, heads=6, kv_heads=2, model="llama", global_batch=4, tied=True),
    _uneven(world=6, tp=6, heads=12, kv_heads=3, model="olmo2", global_batch=6,
            sequence_parallel=True, recompute="full", accumulation=2),
    _uneven(world=6, tp=6, heads=12, kv_heads=12, model="gpt2", global_batch=3,
            sequence_parallel=True),
    _uneven(world=6, tp=3, heads=6, kv_heads=1, zero=3, model="qwen3", global_batch=12,
            sequence_parallel=True, accumulation=2, recompute="selective:attention"),
    _uneven(world=6, tp=3, heads=12, kv_heads=3, dp_replicate=2, model="qwen2", global_batch=4,
            tied=True),
    _uneven(world=6, tp=2, heads=6, kv_heads=1, zero=2, model="olmo2", global_batch=6,
            sequence_parallel=True, accumulation=2),
    _uneven(world=6, dp_replicate=2, zero=3, model="gemma", global_batch=12, accumulation=2,
            tied=True),
    _uneven(world=6, dp_replicate=3, zero=1, model="gpt2", global_batch=6, bucket_mib=0.005),
    _uneven(world=7, dp_replicate=7, model="llama", global_batch=14, accumulation=2),
    _uneven(world=7, zero=2, model="qwen3", global_batch=7, bucket_mib=0.005),
]  # fmt: skip


def name(point: Point) -> str:
    return "-".join(f"{key}={value}" for key, value in point.items())


def all_points() -> Iterator[Point]:
    """Every legal layout and batch; models and bucket sizes take turns over them."""
    turns = itertools.cycle(itertools.product(*(SPACE[a] for a in _TURNS)))
    rest = [a for a in SPACE if a not in _TURNS]
    for values in itertools.product(*(SPACE[a] for a in rest)):
        point = dict(zip(rest, values, strict=True))
        if legal(point):
            yield point | dict(zip(_TURNS, next(turns), strict=True))


def pairs(point: Point) -> set[tuple]:
    """Every pair of choices of two axes that a point makes."""
    return set(itertools.combinations(sorted(point.items(), key=lambda kv: kv[0]), 2))


def random_point(rng: random.Random, **fixed: Any) -> Point:
    """A random legal point with some choices fixed; raises LookupError if there seems none."""
    for _ in range(2000):
        point = {key: fixed.get(key, rng.choice(values)) for key, values in SPACE.items()}
        if legal(point):
            return point
    raise LookupError(fixed)


def sample(seed: int = 0) -> list[Point]:
    """Legal points that together hold every pair of choices that any legal point holds.

    Greedy: for a pair that is still missing, the best of some random points that have it. Smaller
    worlds are preferred where they do as well, since they are faster.
    """
    rng = random.Random(seed)
    axes = list(itertools.combinations(sorted(SPACE), 2))
    missing = {((a, x), (b, y)) for a, b in axes for x in SPACE[a] for y in SPACE[b]}
    chosen = []
    while missing:
        (a, x), (b, y) = min(missing, key=repr)
        try:
            candidates = [random_point(rng, **{a: x, b: y}) for _ in range(30)]
        except LookupError:
            missing.discard(((a, x), (b, y)))
            continue
        best = max(candidates, key=lambda p: len(pairs(p) & missing) - p["world"] / 4)
        missing -= pairs(best)
        chosen.append(best)
    return chosen
