"""Weight gradients of a split backward: nothing of them before W, all of them in W, and in
between only what they need is held."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import cases
from harness import Case, micro_batches
from plait.parallel.flat import FlatBucket
from plait.parallel.mesh import make_mesh
from plait.schedules.table import Action
from plait.spec.chunks import chunk_parameters
from plait.spec.job import Job
from plait.spec.layout import Layout
from plait.spec.parameters import local_shape
from plait.trace.memory import MemoryTracker
from plait.train.program import Program
from ranks import run_ranks

#: A micro batch of 20 rows: no dim of any weight.
ROWS = 20
SPLIT = ("zb-h1", "zb-h2", "zb-auto", "zbv", "v-half", "v-min", "dualpipe", "dualpipev")
PRODUCTS = {"mm", "addmm", "addmm_"}


def job_of(schedule: str, micro: int, model: str = "llama", **layout: Any) -> Job:
    world = layout.pop("world", 2)
    layout = Layout.fill(world, pp=layout.pop("pp", 2), schedule=schedule, **layout)
    model = (cases.MODELS | cases.MIXTURES)[model]
    heads = {"kv_heads": 4}
    if model.moe is not None:  # no number of rows is a dim of an expert's, router's are no map's
        heads = {}
        model = replace(model, hidden=160, moe=replace(model.moe, ffn=200))
    model = replace(model, layers=layout.pp * layout.vpp, seq=ROWS, **heads)
    return Case(model, layout, micro, ROWS).job


class Watch(TorchDispatchMode):
    """What each action computes and delivers, while a program makes a step.

    Attributes:
        products: action -> how often it made matrices of this shape.
        delivered: action -> parameters whose gradient went into a bucket.
    """

    def __init__(self, program: Program):
        super().__init__()
        self.products: dict[str, Counter] = {}
        self.delivered: dict[str, list[str]] = {}
        self.now = ""
        program.mesh.scope.note = self.note
        for b in program.engine.buckets:
            b.accumulate = self._watched(b)

    def note(self, doing: str) -> None:
        if doing.startswith("in "):
            self.now = doing[3:]

    def _watched(self, bucket: FlatBucket) -> Callable:
        accumulate = bucket.accumulate

        def watched(entry: Any, grad: Tensor) -> None:
            self.delivered.setdefault(self.now, []).append(entry.parameter.name)
            accumulate(entry, grad)

        return watched

    def __torch_dispatch__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.__name__.partition(".")[0]
        if name in PRODUCTS:
            self.products.setdefault(self.now, Counter())[tuple(result.shape)] += 1
        elif name == "embedding_dense_backward":
            self.products.setdefault(self.now, Counter())["table"] += 1
        return result


def watched(rank: int, job: Job) -> tuple[dict, dict, tuple[Action, ...]]:
    program = Program(job, make_mesh(job.layout, job.model, rank))
    program.initialize()
    program.step(micro_batches(job, program.mesh, 0), 0)
    with Watch(program) as watch:
        program.step(micro_batches(job, program.mesh, 1), 1)
    return watch.products, watch.delivered, program.table.ranks[program.mesh["pp"].rank]


def weights_of(job: Job, chunk: int, rank: int) -> dict[str, tuple[int, ...]]:
    """Shapes, on a rank, of a chunk's matrices by name, and all vectors as ()."""
    shapes = {}
    for p in chunk_parameters(job.model, job.layout, chunk):
        shape = tuple(local_shape(p, job.model, job.layout))
        shapes[p.name] = shape if len(shape) == 2 else ()
    return shapes


@pytest.mark.parametrize("recompute", ["none", "selective:norm,mlp", "selective:attention", "full"])
@pytest.mark.parametrize("tp", [1, 2])
def test_what_each_action_computes(tp, recompute):
    """In matrix products: F one a map; I one a map for the input gradient, and those that are
    computed again; W one a map, of the weight's shape."""
    job = job_of("zbv", 3, world=2 * tp, tp=tp, recompute=recompute)
    again = {"none": 0, "selective:norm,mlp": 3, "selective:attention": 4, "full": 7}[recompute]
    for rank, (products, _, row) in enumerate(run_ranks(2 * tp, watched, job)):
        for action in row:
            made = products[str(action)]
            shapes = weights_of(job, action.chunk, rank % tp)
            matrices = Counter(s for name, s in shapes.items() if s and "embed" not in name)
            head = int(action.chunk == 3)
            if action.kind == "W":
                matrices["table"] += action.chunk == 0
                assert made == +matrices, action
            else:
                assert made.keys().isdisjoint(matrices), action
                assert all(shape[0] in (ROWS, ROWS // tp) for shape in made), action
                assert sum(made.values()) == 7 + head + (again if action.kind == "I" else 0)


@pytest.mark.parametrize("schedule", SPLIT)
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("gpt2", {"zero": 1}),
        ("qwen3", {"zero": 3}),
        ("gpt-oss", {"world": 4, "ep": 2, "zero": 2}),
        ("deepseek", {"world": 4, "tp": 2, "ep": 2, "zero": 0}),
    ],
    ids=["gpt2", "qwen3", "gpt-oss", "deepseek"],
)
def test_gradients_come_at_w(schedule, model, layout):
    """Those of gains, biases and sinks too, and what corrects a router: before W no bucket is
    touched, in W each parameter once."""
    job = job_of(schedule, 4, model, recompute="selective", **layout)
    for _, delivered, row in run_ranks(job.layout.world, watched, job):
        split = {(a.chunk, a.micro) for a in row if a.kind == "W"}
        assert split
        for action in row:
            expected = []
            if action.kind in "WB":
                expected = sorted(weights_of(job, action.chunk, 0))
            assert sorted(delivered.get(str(action), [])) == expected, action


@pytest.mark.parametrize("recompute", ["none", "selective:mlp", "full"])
@pytest.mark.parametrize("layout", [{"ep": 2}, {"tp": 2, "etp": 2}, {"cp": 2, "ep": 2}], ids=str)
def test_products_of_experts_wait_for_w(layout, recompute):
    """Of every expert that a rank has: F one a matrix; I one for the input gradient, and those
    that are computed again; W one, of the weight's shape, and one for the router."""
    job = job_of("zbv", 3, "mixtral", world=4, recompute=recompute, **layout)
    experts, ffn, hidden = 8 // job.layout.ep, 200 // job.layout.etp, 160
    again = {"none": 0, "selective:mlp": 2, "full": 2}[recompute]
    for products, _, row in run_ranks(4, watched, job):
        for action in row:
            made = products[str(action)]
            weights = {s: n for s, n in made.items() if s in ((ffn, hidden), (hidden, ffn))}
            router = made[8, hidden]
            inner = sum(
                n for s, n in made.items() if len(s) == 2 and s[1] == ffn and s[0] != hidden
            )
            if action.kind == "W":
                assert weights == {(ffn, hidden): 2 * experts, (hidden, ffn): experts}, action
                assert (router, inner) == (1, 0), action
            else:
                assert weights == {}, action
                # Up and gate in F, the gradient of down's input in I.
                expected = 2 if action.kind == "F" else 1 + again
                assert inner == expected * experts, action


# ------------------------------------------------------------------------------------------
# What is held from I to W


def held_between(rank: int, job: Job) -> dict[str, int]:
    """Bytes of activations right after each action of a step."""
    program = Program(job, make_mesh(job.layout, job.model, rank))
    program.initialize()
    program.step(micro_batches(job, program.mesh, 0), 0)
    batches, after, now = micro_batches(job, program.mesh, 1), {}, [""]
    with MemoryTracker(program) as tracker:

        def note(doing: str) -> None:
            if doing.startswith("in ") and doing[3:] != now[0]:
                after[now[0]] = tracker.current["activations"] + tracker.current["logits"]
                now[0] = doing[3:]

        program.mesh.scope.note = note
        program.step(batches, 1)
    return after


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_only_inputs_and_output_gradients_of_maps_are_held(recompute):
    """Of a chunk in the middle, one micro batch: to the byte."""
    job = job_of("zb-h1", 1, world=4, pp=4, recompute=recompute)
    m, t = job.model, ROWS
    q, kv, h, f = m.heads * m.head_dim, m.kv_heads * m.head_dim, m.hidden, m.ffn
    maps = {"qkv": (h, q + 2 * kv), "o": (q, h), "gate and up": (h, 2 * f), "down": (f, h)}
    gains = 2 * h
    expected = t * sum(x + dy for x, dy in maps.values()) + gains
    stream = t * h
    for rank, after in enumerate(run_ranks(4, held_between, job)[1:3], start=1):
        start = after[f"{rank}RECV_F0"] - 8 * stream
        # The stream's gradient is on its way out, its output may still be under way.
        held = (after[f"{rank}I0"] - start) // 8 - 2 * stream
        assert held == expected
        assert after[f"{rank}F0"] - start > 8 * stream
