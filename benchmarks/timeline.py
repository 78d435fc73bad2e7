"""Does a step take as long as `plait schedule` says? Schedules in real time, and simulated.

    python benchmarks/timeline.py [--only NAME] [--repeats N] [--quick] [--json]

Every rank is a process that runs its row of the table in plait's runtime, with real messages; only
the chunks of the model do nothing but sleep. See docs/benchmarks.md.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from time import monotonic, sleep
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # ranks are forked

import torch
import torch.distributed as dist
from rich.table import Table as Printed
from torch import Tensor

from contenders import work
from plait.parallel.collectives import Axis, Handle
from plait.parallel.mesh import make_mesh
from plait.parallel.pipeline import MicroBatch, Pipeline
from plait.schedules.build import build
from plait.schedules.simulate import Slots, Times, run, simulate
from plait.schedules.table import Table
from plait.schedules.transfers import with_transfers
from plait.spec.layout import Layout
from plait.spec.schedule import SCHEDULES
from sidebyside import command, run_ranks

#: Tiny messages: one row of so many numbers.
_HIDDEN = 2


@dataclass(frozen=True)
class Case:
    """A schedule and how long its actions take, in seconds."""

    schedule: str
    times_name: str
    ranks: int
    micro_batches: int
    table: Table
    times: Times

    @property
    def name(self) -> str:
        return f"{self.schedule}-{self.times_name}"


@dataclass(frozen=True)
class Result:
    """Seconds from the moment at which the first rank begins until the last one is done.

    Attributes:
        measured: the least of the repeats: other programs can only make it longer.
        simulated: `simulate`'s makespan of the same table and times.
        middle, most: median and largest ratio of the two.
        replayed: the least ratio of a run to the makespan that the simulator finds when each
            action takes as long as it did in that run. A machine that wakes a rank late is left out
            of it; what is left is messages and the runtime itself.
    """

    name: str
    ranks: int
    micro_batches: int
    measured: float
    simulated: float
    middle: float
    most: float
    replayed: float

    @property
    def ratio(self) -> float:
        return self.measured / self.simulated

    def json(self) -> dict:
        return asdict(self) | {"ratio": self.ratio}


# ------------------------------------------------------------------------------------------
# A model that sleeps


class Sleeper:
    """A chunk for the runtime (as `parallel.data.Chunk` is one) that takes its time and no more.

    What it sends is the time at which it was made, so that messages can be late on purpose. How
    long each action really took goes to `slept`, for all chunks of a rank in its order.
    """

    def __init__(self, chunk: int, times: Times, slept: list[float]):
        self.slept = slept
        self.forward = times.forward[chunk]
        self.input_grad = times.input_grad[chunk]
        self.weight_grad = times.weight_grad[chunk]
        self.queue: list[Callable[[], None]] | None = None

    def module(
        self, tokens: Tensor, targets: Tensor | None, index: Tensor, stream: Tensor | None, *_: None
    ) -> Tensor:
        if stream is None:
            stream = torch.zeros(1, _HIDDEN, dtype=torch.float64, requires_grad=True)
        return _Sleep.apply(stream, self, targets is not None)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        yield

    def sleep(self, seconds: float) -> None:
        start = monotonic()
        sleep(seconds)
        self.slept.append(monotonic() - start)

    @contextmanager
    def put_off(self, queue: list[Callable[[], None]]) -> Iterator[None]:
        self.queue = queue
        yield
        self.queue = None


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, chunk: Sleeper, head: bool) -> Tensor:
        ctx.chunk = chunk
        chunk.sleep(chunk.forward)
        return x.new_zeros(()) if head else torch.full_like(x, monotonic())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        chunk = ctx.chunk
        if chunk.queue is None:
            chunk.sleep(chunk.input_grad + chunk.weight_grad)
        else:
            chunk.sleep(chunk.input_grad)
            chunk.queue.append(lambda: chunk.sleep(chunk.weight_grad))
        return grad.new_full((1, _HIDDEN), monotonic()), None, None


@dataclass(frozen=True)
class _Late:
    """A message that has arrived `delay` seconds after it was made."""

    work: Handle
    message: Tensor
    delay: float

    def wait(self) -> None:
        self.work.wait()
        sleep(max(0.0, self.message[0, 0].item() + self.delay - monotonic()))


@dataclass(frozen=True)
class SlowAxis(Axis):
    """An axis on which messages take their time, and keep neither side from its work."""

    delay: float = 0.0

    def receive(self, out: Tensor, source: int, what: str = "message") -> Handle:
        return _Late(super().receive(out, source, what), out, self.delay)


def _run(case: Case, repeats: int, rank: int) -> list[tuple[float, float, list[float]]]:
    """Of each run: its begin and end on this rank, by a clock that all ranks share, and how long
    each action took."""
    layout = Layout.fill(case.ranks, pp=case.ranks)
    mesh = make_mesh(layout, work(64, case.ranks, 1, 1, 64).model, rank)
    pp = mesh["pp"]
    slow = SlowAxis(pp.name, pp.size, pp.rank, pp.group, pp.scope, case.times.transfer)
    mesh = replace(mesh, axes=mesh.axes | {"pp": slow})
    table, actions = case.table, with_transfers(case.table)[rank]
    one = torch.zeros(1, 1, dtype=torch.int64)
    batches = [MicroBatch(one, one, one[0])] * case.micro_batches

    def once(times: Times) -> tuple[float, float, list[float]]:
        slept: list[float] = []
        chunks: Any = {c: Sleeper(c, times, slept) for c in table.held[rank]}
        runtime = Pipeline(chunks, table.chunks - 1, mesh, _HIDDEN, torch.float64, "cpu")
        dist.barrier()
        start = monotonic()
        runtime.run(actions, table.place, batches, torch.ones(()))
        return start, monotonic(), slept

    once(Times.even(table, 0.0, 0.0, 0.0))  # connects the ranks
    return [once(case.times) for _ in range(repeats)]


def measure(case: Case, repeats: int) -> Result:
    """One schedule, in fresh processes."""
    ranks = run_ranks(case.ranks, partial(_run, case, repeats), timeout=300)
    simulated, slots = simulate(case.table, case.times).makespan, Slots.of(case.table)
    took, replayed = [], []
    for rows in zip(*ranks, strict=True):
        starts, ends, slept = zip(*rows, strict=True)
        took.append(max(ends) - min(starts))
        replay = run(slots, slept, case.times.transfer)
        assert replay is not None, case.name
        replayed.append(took[-1] / replay[0])
    return Result(
        case.name,
        case.ranks,
        case.micro_batches,
        min(took),
        simulated,
        median(took) / simulated,
        max(took) / simulated,
        min(replayed),
    )


# ------------------------------------------------------------------------------------------
# The command


def cases(quick: bool) -> list[Case]:
    """Every schedule with equal times, with uneven ones, and with slow messages too."""
    ranks, micro, unit = (2, 4, 0.002) if quick else (4, 8, 0.05)
    result = []
    for kind in ("even", "uneven", "slow"):
        for name in SCHEDULES:
            result.append(_case(name, kind, ranks, micro, unit))
    return result


def _case(name: str, kind: str, ranks: int, micro: int, unit: float) -> Case:
    """F, I and W of a rank's share take `unit` when even; uneven: 0.8, 1.2 and 0.7 of it, and the
    chunks up to 1.5 times as long as each other; slow: moreover, messages take 0.3 of it."""
    vpp = 1 if name == "auto" else None
    even = build("1f1b" if name == "auto" else name, ranks, micro, vpp=vpp)
    times = Times.even(even, unit, unit, unit)
    if kind != "even":
        factor = [(1.0, 1.3, 0.9, 1.2)[c % 4] for c in range(even.chunks)]

        def uneven(part: float) -> tuple[float, ...]:
            return tuple(part * unit * even.share * x for x in factor)

        times = Times(uneven(0.8), uneven(1.2), uneven(0.7), 0.3 * unit * (kind == "slow"))
    timed = name in ("auto", "zb-auto")
    table = build(name, ranks, micro, vpp=vpp, times=times, cap=ranks) if timed else even
    return Case(name, kind, ranks, micro, table, times)


def printed(results: list[Result]) -> Printed:
    """The results for people."""
    out = Printed(title="a step in real time over the simulated one", box=None)
    for name in ("schedule-times", "ranks", "micro batches", "measured", "simulated", "ratio"):
        out.add_column(name, justify="left" if name.startswith("schedule") else "right")
    for name in ("median", "max", "replayed"):
        out.add_column(name, justify="right")
    for r in results:
        out.add_row(
            r.name,
            str(r.ranks),
            str(r.micro_batches),
            f"{r.measured:.3f} s",
            f"{r.simulated:.3f} s",
            f"{r.ratio:.3f}",
            f"{r.middle:.3f}",
            f"{r.most:.3f}",
            f"{r.replayed:.3f}",
        )
    return out


def main(arguments: list[str] | None = None) -> int:
    return command(__doc__, cases, measure, arguments, repeats=("repeats", 5), printed=printed)


if __name__ == "__main__":
    sys.exit(main())
