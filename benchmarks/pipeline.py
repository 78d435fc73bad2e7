"""What plait's pipeline runtime costs beside torch.distributed.pipelining: time, memory.

    python benchmarks/pipeline.py [--only NAME] [--pairs N] [--quick] [--json]

Each line is one schedule, the same table of actions on both sides; see docs/benchmarks.md.
"""

import os
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, thread_time
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # one thread a rank; and ranks are forked

import torch
import torch.distributed as dist
from rich.table import Table as Printed
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import contenders as who
from plait.models.layers import cross_entropy
from plait.models.transformer import Transformer
from plait.parallel.mesh import make_mesh
from plait.schedules.build import build
from plait.schedules.csvfile import write_table
from plait.schedules.table import Action, Table
from plait.spec.chunks import chunk_layers
from plait.spec.job import Job
from plait.spec.layout import Layout
from plait.train.program import MicroBatch, Program
from sidebyside import WARM_UP, Step, command, run_ranks

#: torch's class, whether its ranks hold two chunks and these as a V.
SCHEDULES = {
    "gpipe": ("GPipe", 1, False),
    "1f1b": ("1F1B", 1, False),
    "interleaved-1f1b": ("Interleaved1F1B", 2, False),
    "looped-bfs": ("LoopedBFS", 2, False),
    "zb-h1": ("InterleavedZeroBubble", 2, False),
    "zbv": ("ZBVZeroBubble", 2, True),
    "dualpipev": ("DualPipeV", 2, True),
}


@dataclass(frozen=True)
class Case:
    """A schedule on so many ranks; the work is that of one micro batch."""

    schedule: str
    ranks: int
    micro_batches: int
    work: who.Work

    @property
    def name(self) -> str:
        return f"{self.schedule}-{self.ranks}"


@dataclass(frozen=True)
class Result:
    """Ratios are torch's over plait's, so above 1 plait needs less.

    Attributes:
        actions: that a rank computes in a step, mean over ranks.
        ours_us, theirs_us: microseconds an action: a step, from a barrier until the last rank is
            done, over the actions of a rank; medians.
        ratio, low, high: of these in a pair of neighbouring steps: median, least, largest.
        ours_cpu_us, theirs_cpu_us: processor time of all ranks over all their actions, of the
            threads that go through the schedule (gloo's own threads poll, alike for both).
        compute_us: processor time of the same forwards and backwards without any pipeline.
        ours_mib, theirs_mib: the most that a rank holds beside weights and their gradients.
    """

    name: str
    pairs: int
    actions: float
    ours_us: float
    theirs_us: float
    ratio: float
    low: float
    high: float
    ours_cpu_us: float
    theirs_cpu_us: float
    compute_us: float
    ours_mib: float
    theirs_mib: float

    @property
    def cpu_ratio(self) -> float:
        return self.theirs_cpu_us / self.ours_cpu_us

    @property
    def overhead_ratio(self) -> float:
        """Of processor time beyond the computing."""
        return (self.theirs_cpu_us - self.compute_us) / (self.ours_cpu_us - self.compute_us)

    @property
    def memory_ratio(self) -> float:
        return self.theirs_mib / self.ours_mib

    def json(self) -> dict:
        ratios = ("cpu_ratio", "overhead_ratio", "memory_ratio")
        return asdict(self) | {r: getattr(self, r) for r in ratios}


# ------------------------------------------------------------------------------------------
# The two runtimes


class Stage(nn.Module):
    """A slice of plait's model as a stage of torch's: one tensor in, one out."""

    def __init__(self, module: Transformer, tokens: Tensor):
        super().__init__()
        self.module, self.tokens = module, tokens

    def forward(self, x: Tensor) -> Tensor:
        if self.module.embed is not None:
            return self.module(x)
        return self.module(self.tokens, stream=x)


def batches_of(case: Case) -> list[MicroBatch]:
    tokens, targets = who.batch(case.work, 0)
    return [MicroBatch(tokens, targets, torch.arange(case.work.samples))] * case.micro_batches


def layout_of(case: Case, schedule: str) -> Layout:
    vpp = SCHEDULES[case.schedule][1]
    return Layout.fill(
        case.ranks, pp=case.ranks, vpp=vpp, schedule=schedule, micro_batch=case.work.samples
    )


def slice_of(case: Case, chunk: int) -> Transformer:
    """A chunk as a module of its own; layers as plait divides them."""
    layers = chunk_layers(case.work.model, layout_of(case, "x.csv"))
    last = len(layers) - 1
    return Transformer(case.work.model, layers[chunk], embed=chunk == 0, head=chunk == last)


def torchs(case: Case, rank: int) -> tuple[Step, Table]:
    """torch's runtime under its own class of a schedule; its step, and the table that it runs."""
    name, vpp, v = SCHEDULES[case.schedule]
    p, batches = case.ranks, batches_of(case)
    chunks = [rank, 2 * p - 1 - rank] if v else [rank + i * p for i in range(vpp)]
    stages = [
        PipelineStage(Stage(slice_of(case, c), batches[0].tokens), c, p * vpp, torch.device("cpu"))
        for c in chunks
    ]
    valid = sum(int((b.targets >= 0).sum()) for b in batches)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets.reshape(-1)) / valid

    kind = get_schedule_class(name)
    single = issubclass(kind, PipelineScheduleSingle)
    schedule = kind(
        stages[0] if single else stages, case.micro_batches, loss_fn=loss, scale_grads=False
    )
    weights = [w for stage in stages for w in stage.submod.parameters()]
    for w in weights:
        w.grad = torch.zeros_like(w)
    inputs = (torch.cat([b.tokens for b in batches]),) if 0 in chunks else ()
    last = p * vpp - 1 in chunks
    target = {"target": torch.cat([b.targets for b in batches])} if last else {}

    def step() -> None:
        schedule.step(*inputs, **target, return_outputs=False)
        for w in weights:
            w.grad.zero_()

    # The classes with one stage a rank are loops; the order that they show is not what they run.
    table = (
        build(case.schedule, p, case.micro_batches)
        if single
        else _table(case.schedule, schedule.pipeline_order)
    )
    return step, table


def _table(name: str, order: dict[int, list]) -> Table:
    """What is computed in torch's order of actions."""
    ranks = []
    for rank in sorted(order):
        actions = [a for a in order[rank] if a is not None]
        parts = [b for a in actions for b in (a.sub_actions or (a,))]
        read = [Action(b.computation_type.value, b.stage_index, b.microbatch_index) for b in parts]
        ranks.append(tuple(a for a in read if a.kind in "FIWB"))
    return Table(name, tuple(ranks))


def plaits(case: Case, table: Table, rank: int) -> Step:
    """plait's runtime over a table that comes in a file, as any of torch's may; with the buckets
    of gradients, without the count of valid tokens, which torch is told too."""
    train = replace(
        who.TRAIN,
        dtype="float32",
        seq_len=case.work.seq,
        global_batch=case.work.samples * case.micro_batches,
        accumulation=case.micro_batches,
        steps=1000,
    )
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{case.schedule}.csv"
        write_table(table, path)
        job = Job(case.work.model, layout_of(case, str(path)), train)
        program = Program(job, make_mesh(job.layout, job.model, rank))
    program.initialize()
    batches = batches_of(case)
    valid = sum((b.targets >= 0).sum() for b in batches)

    def step() -> None:
        program.engine.begin()
        program.pipeline.run(program.actions, program.table.place, batches, valid)
        program.engine.finish()

    return step


def computing(case: Case, table: Table, rank: int) -> Step:
    """What a rank computes in a step and nothing else: each micro batch's forward and backward
    through each of its chunks."""
    modules = {c: slice_of(case, c) for c in table.held[rank]}
    batch = batches_of(case)[0]
    stream = torch.randn(case.work.tokens, case.work.model.hidden)
    inner = table.chunks - 1

    def step() -> None:
        for c, module in modules.items():
            for _ in range(case.micro_batches):
                x = stream.detach().requires_grad_() if c else None
                out = module(batch.tokens, batch.targets if c == inner else None, None, x)
                out.backward(None if c == inner else stream)
        for module in modules.values():
            module.zero_grad(set_to_none=False)

    return step


# ------------------------------------------------------------------------------------------
# Measuring


def _times(case: Case, pairs: int, rank: int) -> tuple[list[list[tuple[float, float]]], int]:
    """For plait, torch and computing alone: (seconds, processor seconds) of each step on this
    rank's main thread; and how many actions the rank has in a step."""
    theirs, table = torchs(case, rank)
    steps = (plaits(case, table, rank), theirs, computing(case, table, rank))
    for _ in range(WARM_UP):
        for step in steps:
            step()
    times: list[list[tuple[float, float]]] = [[], [], []]
    for i in range(pairs):
        for one in (0, 1, 2) if i % 2 == 0 else (1, 0, 2):
            dist.barrier()
            start, cpu = perf_counter(), thread_time()
            steps[one]()
            times[one].append((perf_counter() - start, thread_time() - cpu))
    return times, len(table.ranks[rank])


class Held(TorchDispatchMode):
    """Counts the bytes of every storage that is made while it is entered; the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: dict[int, int] = {}

    def __torch_dispatch__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self._see(value.untyped_storage())
        return result

    def _see(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known[key] = size
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self.known.pop(key)


def _held(case: Case, ours: bool, rank: int) -> int:
    """Bytes that a rank holds at most in two steps from the first on, beside what it held when the
    runtime was built (weights and gradients of both)."""
    step, table = torchs(case, rank)
    if ours:
        step = plaits(case, table, rank)
    with Held() as held:
        step()
        step()
    return held.peak


def measure(case: Case, pairs: int) -> Result:
    """One comparison, in fresh processes."""
    ranks = run_ranks(case.ranks, partial(_times, case, pairs), timeout=600)
    actions = sum(n for _, n in ranks)
    mean = actions / case.ranks

    def walls(contender: int) -> list[float]:
        return [max(times[contender][i][0] for times, _ in ranks) for i in range(pairs)]

    def cpu_us(contender: int) -> float:
        sums = [sum(times[contender][i][1] for times, _ in ranks) for i in range(pairs)]
        return median(sums) / actions * 1e6

    ours, theirs = walls(0), walls(1)
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    mib = [
        max(run_ranks(case.ranks, partial(_held, case, side), timeout=600)) / 2**20
        for side in (True, False)
    ]
    return Result(
        case.name,
        pairs,
        mean,
        median(ours) / mean * 1e6,
        median(theirs) / mean * 1e6,
        median(ratios),
        min(ratios),
        max(ratios),
        cpu_us(0),
        cpu_us(1),
        cpu_us(2),
        *mib,
    )


# ------------------------------------------------------------------------------------------
# The command


def cases(quick: bool) -> list[Case]:
    """Every schedule of both on 2 and 4 ranks: a layer of width 64 a chunk, 8 tokens."""
    ranks, vocab = ((2,), 64) if quick else ((2, 4), 256)
    return [
        Case(name, p, 2 * p if quick else 4 * p, who.work(64, p * vpp, 1, 8, vocab))
        for p in ranks
        for name, (_, vpp, _) in SCHEDULES.items()
    ]


def printed(results: list[Result]) -> Printed:
    """The results for people."""
    title = "torch.distributed.pipelining over plait, the same tables; microseconds an action"
    out = Printed(title=title, box=None)
    columns = ("schedule-ranks", "ratio", "min..max", "plait us", "torch us", "cpu us", "torch's")
    columns += ("computing", "overhead ratio", "MiB", "torch's", "ratio")
    for name in columns:
        out.add_column(name, justify="left" if name == columns[0] else "right")
    for r in results:
        out.add_row(
            r.name,
            f"{r.ratio:.2f}",
            f"{r.low:.2f}..{r.high:.2f}",
            f"{r.ours_us:,.0f}",
            f"{r.theirs_us:,.0f}",
            f"{r.ours_cpu_us:,.0f}",
            f"{r.theirs_cpu_us:,.0f}",
            f"{r.compute_us:,.0f}",
            f"{r.overhead_ratio:.2f}",
            f"{r.ours_mib:.2f}",
            f"{r.theirs_mib:.2f}",
            f"{r.memory_ratio:.2f}",
        )
    return out


def main(arguments: list[str] | None = None) -> int:
    warnings.simplefilter("ignore")
    return command(__doc__, cases, measure, arguments, printed=printed)


if __name__ == "__main__":
    sys.exit(main())
