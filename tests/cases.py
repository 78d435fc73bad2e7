"""The layouts that the parity tests go through: all legal ones, and a sample with every pair.

A case is a point in a space of choices. An axis of the space is a name and its values. `legal`
says which points are layouts at all.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from harness import Case
from plait.schedules.build import problems
from plait.schedules.job import split_name
from plait.spec.job import Train
from plait.spec.layout import Layout
from plait.spec.model import MLA, Model, MoE, RopeScaling
from plait.spec.schedule import SCHEDULES

SEQ = 16

_BASE = Model.of(
    "parity", layers=2, hidden=32, heads=8, head_dim=4, vocab=61, ffn=48, seq=SEQ, kv_heads=8
)

#: Wider, for ledgers: what grows with the width outweighs what does not.
WIDE = Model.of("llama", layers=4, hidden=128, heads=8, kv_heads=4, ffn=320, vocab=512)
WIDE_GPT = replace(
    WIDE,
    kv_heads=8,
    mlp="gelu",
    norm="layer",
    positions="learned",
    seq=512,
    tied=True,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
)

#: Choices of the model that meet a layout differently: norms over heads or over all heads,
#: biases, windows, learned positions, dropout, norms after the branch, scaled embeddings.
MODELS = {
    "llama": replace(_BASE, rope_scaling=RopeScaling("llama3", 4.0, 8)),
    "qwen2": replace(_BASE, qkv_bias=True, norm_eps=1e-6),
    "qwen3": replace(_BASE, qk_norm="head"),
    "olmo2": replace(_BASE, qk_norm="full", norm_at="output"),
    "mistral": replace(_BASE, window=6, full_every=2),
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

_MOE = MoE(experts=8, topk=2, ffn=16, aux_loss=0.01, z_loss=0.001)
_MLA = MLA(kv_rank=16, nope_dim=8, rope_dim=4, v_dim=8, q_rank=12)
_DEEPSEEK = MoE(
    experts=8,
    topk=3,
    ffn=16,
    shared=2,
    first_dense=1,
    score="sigmoid",
    scaling=2.5,
    groups=4,
    topk_groups=2,
    group_score="top2",
    correction=True,
    aux_loss=0.01,
)

#: Mixtures of experts and latent attention: shared experts, groups, scores of both kinds, the
#: correction, biases, sinks, windows, a mixture in every layer or in some.
MIXTURES = {
    "mixtral": replace(_BASE, moe=_MOE),
    "qwen2-moe": replace(
        _BASE, qkv_bias=True, moe=replace(_MOE, topk=3, normalize=False, shared=1, every=2)
    ),
    "deepseek": replace(_BASE, moe=_DEEPSEEK, mla=_MLA),
    "mla": replace(_BASE, mla=replace(_MLA, q_rank=None)),
    "gpt-oss": replace(
        _BASE,
        mlp="swiglu-clamped",
        qkv_bias=True,
        o_bias=True,
        sinks=True,
        window=5,
        full_every=2,
        moe=replace(_MOE, topk_first=True, bias=True, router_bias=True),
    ),
}

Space = dict[str, Sequence[Any]]
Point = dict[str, Any]

#: Layouts without a pipeline.
SPACE: Space = {
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
    # Of one value here: what `UNEVEN`, `PIPELINES`, `CONTEXT` and `EXPERTS` give others to.
    "heads": (8,),
    "global_batch": (16,),
    "pp": (1,),
    "vpp": (1,),
    "schedule": ("1f1b",),
    "stages": ("even",),
    "check": (False,),
    "cp": (1,),
    "ulysses": (1,),
    "cp_method": ("ring",),
    "ep": (1,),
    "etp": (1,),
    "capacity": (None,),
}

#: Layouts with a pipeline; every micro batch is one sample. Accumulations are below pp, equal to
#: it, above, and odd. Stages: as even as can be; "bare", the first chunk the embedding alone and
#: the last the head; "heavy", most layers in the first. With `check` the ranks compare what they
#: are about to send.
PIPELINES: Space = SPACE | {
    "world": (2, 4, 8),
    "tp": (1, 2),
    "dp_replicate": (1, 2, 4),
    "accumulation": (1, 2, 3, 4, 8, 9),
    "global_batch": (None,),
    "pp": (2, 4),
    "vpp": (1, 2, 3),
    "schedule": (*SCHEDULES, "interleaved-1f1b:5"),
    "stages": ("even", "bare", "heavy"),
    "check": (False, True),
}

#: Layouts whose samples lie on several ranks, with every axis of a dense model.
CONTEXT: Space = PIPELINES | {
    "dp_replicate": (1, 2),
    "bucket_mib": (0.005,),
    "accumulation": (1, 4),
    "global_batch": (None, 16),
    "pp": (1, 2),
    "vpp": (1, 2),
    "schedule": ("1f1b", "zb-h1", "dualpipev"),
    "stages": ("even",),
    "model": ("llama", "qwen3", "olmo2", "mistral", "gpt2"),
    "cp": (2, 4),
    "ulysses": (1, 2, 4),
    "cp_method": ("ring", "all-gather"),
}

#: Mixtures and latent attention, with every axis that there is. Capacity: the share of an even
#: load that an expert takes; where it is given, the models drop by "position" and "probability".
EXPERTS: Space = PIPELINES | {
    "world": (1, 2, 4, 8),
    "tp": (1, 2, 4),
    "dp_replicate": (1, 2, 4),
    "accumulation": (1, 2, 4),
    "kv_heads": (8, 2),
    "model": tuple(MIXTURES),
    "global_batch": (None, 16),
    "pp": (1, 2, 4),
    "vpp": (1, 2),
    "schedule": ("1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zbv", "dualpipev"),
    "stages": ("even",),
    "cp": (1, 2, 4),
    "ulysses": (1, 2, 4),
    "cp_method": ("ring", "all-gather"),
    "ep": (1, 2, 4, 8),
    "etp": (1, 2, 4),
    "capacity": (None, 1.0, 0.5),
}


def legal(point: Point) -> bool:
    """Whether a point is a layout (and not the same as another one)."""
    world, tp, pp, cp = (point[axis] for axis in ("world", "tp", "pp", "cp"))
    if world % (tp * pp * cp) or (point["sequence_parallel"] and tp == 1):
        return False
    dp, ulysses, method = world // tp // pp // cp, point["ulysses"], point["cp_method"]
    if cp % ulysses or (cp == ulysses and method != "ring"):
        return False
    if ulysses > 1:
        heads, kv = point["heads"] // tp, max(1, point["kv_heads"] // tp)
        if heads % ulysses or (kv % ulysses and ulysses % kv):
            return False
    replicate = point["dp_replicate"]
    if replicate != dp if point["zero"] == 0 else dp % replicate:
        return False
    shards = tp * cp * dp // (1 if point["zero"] == 0 else replicate)
    if shards % (point["ep"] * point["etp"]):
        return False
    model = MIXTURES.get(point.get("model"))
    if model and not model.moe and (point["ep"], point["etp"], point["capacity"]) != (1, 1, None):
        return False
    if model and model.mla and point["kv_heads"] != point["heads"]:
        return False
    if pp == 1:
        return (point["vpp"], point["schedule"], point["stages"]) == (1, "1f1b", "even")
    if point["global_batch"] is not None:
        return False
    schedule, group = split_name(point["schedule"])
    return not problems(schedule, pp, point["accumulation"], point["vpp"], group)


def case(point: Point) -> Case:
    """The case of a legal point."""
    pp, chunks, micro = point["pp"], point["pp"] * point["vpp"], 1
    given = {key: point[key] for key in ("heads", "kv_heads", "tied")}
    model = replace((MODELS | MIXTURES)[point["model"]], name=point["model"], **given)
    if point["capacity"] is not None:
        drop = "probability" if model.moe.score == "sigmoid" or model.moe.bias else "position"
        model = replace(model, moe=replace(model.moe, capacity=point["capacity"], drop=drop))
    fields = ("tp", "sequence_parallel", "cp", "ulysses", "cp_method", "pp", "ep", "etp")
    fields += ("dp_replicate", "zero", "recompute")
    told = {f: point[f] for f in fields}
    if pp > 1:
        stages = {
            "even": None,
            "bare": (0, *(1,) * (chunks - 2), 0 if chunks > 2 else 2),
            "heavy": (2, *(1,) * (chunks - 1)),
        }[point["stages"]]
        model = replace(model, layers=sum(stages) if stages else chunks)
        told |= {"vpp": point["vpp"], "schedule": point["schedule"], "stages": stages}
    if point["global_batch"] is not None:
        dp = point["world"] // point["tp"] // pp // point["cp"]
        micro = point["global_batch"] // dp // point["accumulation"]
    layout = Layout.fill(point["world"], micro_batch=micro, **told)
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
    """What a point chooses where there is a choice."""
    space = PIPELINES if point["pp"] > 1 else SPACE
    if point["model"] in MIXTURES or point["cp"] > 1:
        space = EXPERTS
        point = {k: v for k, v in point.items() if v != SPACE[k][0] or k == "model"}
    shown = {k: v for k, v in point.items() if len(space[k]) > 1 or v != space[k][0]}
    return "-".join(f"{key}={value}" for key, value in shown.items())


def all_points(
    space: Space = SPACE, turning: Sequence[str] = ("model", "bucket_mib")
) -> Iterator[Point]:
    """Every legal layout and batch; the choices of the axes `turning` take turns over them."""
    turns = list(itertools.product(*(space[a] for a in turning)))
    random.Random(0).shuffle(turns)
    turn = itertools.cycle(turns)
    rest = [a for a in space if a not in turning]
    for values in itertools.product(*(space[a] for a in rest)):
        point = dict(zip(rest, values, strict=True))
        if legal(point):
            yield point | dict(zip(turning, next(turn), strict=True))


def pairs(point: Point) -> set[tuple]:
    """Every pair of choices of two axes that a point makes."""
    return set(itertools.combinations(sorted(point.items(), key=lambda kv: kv[0]), 2))


def _idle(point: Point) -> Iterator[str]:
    """Axes that only take their first value at a point."""
    if point["tp"] == 1:
        yield "sequence_parallel"
    if point["cp"] == 1:
        yield from ("ulysses", "cp_method")
    if point["ulysses"] == point["cp"]:
        yield "cp_method"
    if point["pp"] == 1:
        yield from ("vpp", "schedule", "stages")
    elif point["model"] in MIXTURES or point["cp"] > 1:
        yield "global_batch"
    if point["model"] == "mla":
        yield from ("ep", "etp", "capacity")
    if point["model"] in ("mla", "deepseek"):
        yield "kv_heads"


def random_point(rng: random.Random, space: Space = SPACE, **fixed: Any) -> Point:
    """A random legal point with some choices fixed; raises LookupError if there seems none."""
    first = ("world", "tp", "pp", "cp")
    for _ in range(10000):
        # Most draws fail at these, and need no more.
        point = {key: fixed.get(key) or rng.choice(space[key]) for key in first}
        if point["world"] % (point["tp"] * point["pp"] * point["cp"]):
            continue
        rest = (key for key in space if key not in first)
        point |= {key: fixed.get(key, rng.choice(space[key])) for key in rest}
        # What has no choice at such a point: drawn freely, hardly any would be legal.
        point |= {axis: space[axis][0] for axis in _idle(point)} | fixed
        if legal(point):
            return point
    raise LookupError(fixed)


def sample(space: Space = SPACE, seed: int = 0) -> list[Point]:
    """Legal points that together hold every pair of choices that any legal point holds.

    Greedy: for a pair that is still missing, of some random points that have it the one that holds
    most other missing ones for its time, which grows faster than the world.
    """
    rng = random.Random(seed)
    axes = list(itertools.combinations(sorted(space), 2))
    missing = {((a, x), (b, y)) for a, b in axes for x in space[a] for y in space[b]}
    chosen = []
    while missing:
        (a, x), (b, y) = min(missing, key=repr)
        try:
            candidates = [random_point(rng, space, **{a: x, b: y}) for _ in range(30)]
        except LookupError:
            missing.discard(((a, x), (b, y)))
            continue
        best = max(candidates, key=lambda p: len(pairs(p) & missing) / p["world"] ** 1.2)
        missing -= pairs(best)
        chosen.append(best)
    return chosen
