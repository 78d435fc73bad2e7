"""The end of a step on one rank: the gradient norm, what the ranks add up, the optimizer.

It mirrors `train/program.py`, `train/optimizer.py` and `train/routing.py`. All of it is small
where a model is not: with n elements of a stretch that the optimizer steps at once,

    the squared norm     of rows of 1,024 gradients, float32 and twice float64
    the sums             loss and squares, and what routers chose: 2 E + 2 a mixture; float64
    the optimizer        a step count for each stretch (float32), kept; gradients in the master
                         dtype where theirs is another, all at once; a few scalars
"""

from collections.abc import Iterable
from dataclasses import dataclass

from plait.cost.context import fullest
from plait.cost.dtypes import dtypes_of
from plait.cost.expert import tallied, told
from plait.cost.parts import Part
from plait.cost.tape import Tape
from plait.spec.buckets import Bucket, shards_of, zero_stage
from plait.spec.grid import dense_grid, expert_grid
from plait.spec.job import DTYPE_BYTES, Job
from plait.spec.layout import Layout

#: Elements of a row whose squares are added up first.
ROW = 1024


@dataclass(frozen=True)
class Ending:
    """What a rank that stands for its stage does after the last backward.

    Attributes:
        steps: elements of each stretch of weights that the optimizer steps.
        loads: of each that is moved by the load of experts.
        momentless: bytes of moments that there are none of, as of what is padded or moved by load.
        told: numbers that ranks add up of what routers chose.
        begin: bytes of what mixtures have from the beginning of the step: what their balance is
            multiplied by, and soon what they have chosen in it.
        left: of those the bytes that stay to the end.
        master, grad: bytes of an element.
    """

    steps: tuple[int, ...]
    loads: tuple[int, ...]
    momentless: int
    told: int
    begin: int
    left: int
    master: int
    grad: int

    @staticmethod
    def of(job: Job, parts: Iterable[Part], buckets: Iterable[Bucket]) -> "Ending":
        buckets = list(buckets)
        found = [stretch for b in buckets for stretch in _stretches(job.layout, b)]
        found = found or [(0, False)]  # whose pieces are all padding steps nothing, like the others
        steps, loads = (tuple(n for n, load in found if load is kind) for kind in (False, True))
        dtypes = dtypes_of(job)
        master, grad = (DTYPE_BYTES[d] for d in (dtypes.master, dtypes.grad))
        begin = left = 0
        for part in parts:
            for _ in filter(job.model.is_moe, part.layers):
                begin += 8 + tallied(job, min(part.micro_batches, 3))
                left += 8 + tallied(job, 0)
        own = sum(stop - start for start, stop in (_own(job.layout, b) for b in buckets))
        momentless = 2 * master * (own - sum(steps))
        return Ending(steps, loads, momentless, told(job), begin, left, master, grad)

    @property
    def counts(self) -> int:
        """Bytes of step counts."""
        return 4 * len(self.steps)

    def run(self, tape: Tape) -> None:
        """From the last backward on."""
        tape.enter("forward", "activations")  # which a program is in when it is in nothing else
        rows = max((n // ROW for n in self.steps), default=0)
        tape.take(8)  # the sum of squares
        tape.spike((max(self.grad, 4) + 16) * rows)
        table = 8 * self.told
        tape.drop(self.begin - self.left)
        tape.take(16 + table + 16 + table)  # this rank's, by themselves and as one message
        tape.enter("optimizer", "activations")
        tape.take(8)  # the norm
        tape.drop(8 + 16 + table)
        tape.enter("optimizer", "optimizer")
        cast = self.master * sum(self.steps) if self.grad != self.master else 0
        with tape.during(8):  # what gradients are multiplied by
            tape.spike(24)
            with tape.during(4):  # whether the norm is finite
                tape.spike(max(cast, 1 + 2 * self.grad * max(self.loads, default=0)))


def _own(layout: Layout, bucket: Bucket) -> tuple[int, int]:
    """The elements of a bucket that the rank owns."""
    if not zero_stage(layout, bucket.expert):
        return 0, bucket.size
    shard, n = _shard(layout, bucket.expert), bucket.size // shards_of(layout, bucket.expert)
    return shard * n, (shard + 1) * n


def _stretches(layout: Layout, bucket: Bucket) -> Iterable[tuple[int, bool]]:
    """(elements, moved by load) of the stretches of those that are stepped alike."""
    start, stop = _own(layout, bucket)
    for run in bucket.runs:
        n = min(run.stop, stop) - max(run.start, start)
        if n > 0:
            yield n, run.by_load


def standing(layout: Layout) -> int:
    """The rank that stands for the first stage; so far behind the others' first ranks are those of
    theirs."""
    return dense_grid(layout).rank(cp=fullest(layout) * layout.ulysses)


def _shard(layout: Layout, expert: bool) -> int:
    """Which of the pieces of states it has."""
    rank = standing(layout)
    if expert:
        return expert_grid(layout).coordinate(rank)["edp"] % layout.expert_shards
    at = dense_grid(layout).coordinate(rank)
    return at["dp_shard"] * layout.cp + at["cp"]
