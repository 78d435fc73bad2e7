"""The buffers of the data-parallel engine that come and go, told to a tape."""

from collections.abc import Sequence

from plait.cost.dtypes import dtypes_of
from plait.cost.tape import Tape
from plait.spec.buckets import Bucket, shards_of, zero_stage
from plait.spec.job import DTYPE_BYTES, Job


class Engine:
    """What `parallel.data.Chunk` takes and drops for a chunk of the model within a step.

    ZeRO 2 and 3: a whole gradient buffer lives from a bucket's first gradient until the bucket
    after it starts its reduction. ZeRO-3: a unit's weights, and those of its neighbour, live
    while it is in use.

    Args:
        units: the units of the chunk, in the order of the forward pass.
        buckets: its buckets.
    """

    def __init__(self, job: Job, units: Sequence[str], buckets: Sequence[Bucket]):
        dtypes = dtypes_of(job)
        self.tape = Tape()
        self.buckets = buckets
        self.zero = [zero_stage(job.layout, b.expert) for b in buckets]
        self.c, self.g = DTYPE_BYTES[dtypes.compute], DTYPE_BYTES[dtypes.grad]
        self.shards = [shards_of(job.layout, b.expert) for b in buckets]
        numbers = range(len(buckets))
        self.home = {e.parameter.name: i for i in numbers for e in buckets[i].entries}
        self.units = units
        self.uses: dict[str, list[int]] = {unit: [] for unit in units}
        for i in numbers:
            for unit in buckets[i].units:
                self.uses[unit].append(i)
        if job.model.tied and {"embed", "head"} <= self.uses.keys():
            self.uses["head"] += [i for i in self.uses["embed"] if i not in self.uses["head"]]
        self.final = {i: unit for unit in units for i in self.uses[unit]}
        self.gathered: set[int] = set()
        self.missing: dict[int, int] = {}  # bucket -> gradients still to come
        self.reducing: tuple[int, int] | None = None  # bucket, bytes of what arrives
        self.accumulated = False

    def begin_micro_batch(self, accumulated: bool) -> None:
        """Gradients of a micro batch come, which are not the first."""
        self.accumulated = accumulated
        self.missing = {i: len(b.entries) for i, b in enumerate(self.buckets)}

    def gather(self, *units: int) -> None:
        """The weights of units (by their number) come, where they are not there."""
        for unit in units:
            for i in self.uses[self.units[unit]] if 0 <= unit < len(self.units) else ():
                if self.zero[i] == 3 and i not in self.gathered:
                    self.gathered.add(i)
                    self.tape.take(self.c * self.buckets[i].size, "gathered")

    def release(self, unit: int) -> None:
        """After a unit's forward."""
        for i in self.uses[self.units[unit]]:
            if self.final[i] == self.units[unit]:
                self._release(i)

    def release_all(self, unit: int = 0) -> None:
        """After the input gradients of the units from this number on."""
        for name in self.units[unit:]:
            for i in self.uses[name]:
                self._release(i)

    def _release(self, i: int) -> None:
        if i in self.gathered:
            self.gathered.discard(i)
            self.tape.drop(self.c * self.buckets[i].size, "gathered")

    def arrive(self, name: str) -> None:
        """One parameter's gradient is added to its bucket."""
        i = self.home[name]
        if self.zero[i] < 2:
            return
        bucket, tape = self.buckets[i], self.tape
        if self.missing[i] == len(bucket.entries):
            tape.take(self.g * bucket.size, "buffers")
        self.missing[i] -= 1
        if self.missing[i] == 0:
            piece = self.g * bucket.size // self.shards[i] if self.accumulated else 0
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
