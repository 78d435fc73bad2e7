"""The buffers of the data-parallel engine that come and go, told to a tape."""

from collections.abc import Sequence

from plait.cost.dtypes import dtypes_of
from plait.cost.tape import Tape
from plait.spec.buckets import Bucket, zero_stage
from plait.spec.job import DTYPE_BYTES, Job


class Engine:
    """What `parallel.data.DataParallel` takes and drops within a step.

    ZeRO 2 and 3: a whole gradient buffer lives from a bucket's first gradient until the bucket
    after it starts its reduction. ZeRO-3: a unit's weights, and those of its neighbour, live
    while it is in use.
    """

    def __init__(self, job: Job, tape: Tape, buckets: Sequence[Bucket]):
        dtypes = dtypes_of(job)
        self.tape, self.buckets, self.zero = tape, buckets, zero_stage(job.layout)
        self.c, self.g = DTYPE_BYTES[dtypes.compute], DTYPE_BYTES[dtypes.grad]
        self.shards = job.layout.fsdp
        # Where they differ, gradients are cast to the master dtype, all of this rank's at once.
        own = sum(b.size for b in buckets) // (self.shards if self.zero else 1)
        self.cast = DTYPE_BYTES[dtypes.master] * own if dtypes.master != dtypes.grad else 0
        numbers = range(len(buckets))
        self.home = {e.parameter.name: i for i in numbers for e in buckets[i].entries}
        self.units = ["embed", *(f"layers.{i}" for i in range(job.model.layers)), "head"]
        self.uses: dict[str, list[int]] = {unit: [] for unit in self.units}
        for i in numbers:
            for unit in buckets[i].units:
                self.uses[unit].append(i)
        if job.model.tied:
            self.uses["head"] += [i for i in self.uses["embed"] if i not in self.uses["head"]]
        self.final = {i: unit for unit in self.units for i in self.uses[unit]}
        self.gathered: set[int] = set()
        self.missing: dict[int, int] = {}  # bucket -> gradients still to come
        self.reducing: tuple[int, int] | None = None  # bucket, bytes of what arrives
        self.accumulated = False

    def begin_micro_batch(self, first: bool) -> None:
        self.accumulated = not first
        self.missing = {i: len(b.entries) for i, b in enumerate(self.buckets)}

    def gather(self, *units: int) -> None:
        """The weights of units (by their number) come, where they are not there."""
        if self.zero < 3:
            return
        for unit in units:
            for i in self.uses[self.units[unit]] if 0 <= unit < len(self.units) else ():
                if i not in self.gathered:
                    self.gathered.add(i)
                    self.tape.take(self.c * self.buckets[i].size, "gathered")

    def release(self, unit: int) -> None:
        """After a unit's forward."""
        for i in self.uses[self.units[unit]]:
            if self.final[i] == self.units[unit]:
                self._release(i)

    def _release(self, i: int) -> None:
        if i in self.gathered:
            self.gathered.discard(i)
            self.tape.drop(self.c * self.buckets[i].size, "gathered")

    def arrive(self, name: str) -> None:
        """One parameter's gradient is added to its bucket."""
        if self.zero < 2:
            return
        i = self.home[name]
        bucket, tape = self.buckets[i], self.tape
        if self.missing[i] == len(bucket.entries):
            tape.take(self.g * bucket.size, "buffers")
        self.missing[i] -= 1
        if self.missing[i] == 0:
            piece = self.g * bucket.size // self.shards if self.accumulated else 0
            tape.take(piece, "buffers")
            self.finish()
            self.reducing = (i, piece)
            self._release(i)

    def finish(self) -> None:
        """The reduction under way ends."""
        if self.reducing is not None:
            i, piece = self.reducing
            self.tape.drop(self.g * self.buckets[i].size + piece, "buffers")
            self.reducing = None
