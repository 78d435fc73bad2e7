"""A flat buffer of parameters on one rank: its weights, its gradients, its reduction.

    full    the weights in the compute dtype. Under ZeRO-3 it has memory only while its unit is in
            use: the storage is emptied and filled again, so that what autograd saved stays valid.
    master  this rank's piece of the weights in the master dtype, which the optimizer steps. Where
            the dtypes agree and the weights stay, it is a view of `full`.
    grads   gradients in their own dtype: all of them (ZeRO 0 and 1) or this rank's piece (2 and
            3; then a whole buffer lives only from the bucket's first gradient to its reduction).

What ZeRO does is decided by two questions: are gradients scattered after each micro batch
(2, 3) or once a step (0, 1), and do weights stay gathered (0 to 2) or not (3). Papers: ZeRO
1910.02054 section 5; FSDP 2304.11277 section 3.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.parallel.collectives import Axis, Done, Handle
from plait.parallel.mesh import Mesh
from plait.spec.buckets import Bucket, Entry


@dataclass(frozen=True)
class Dtypes:
    """compute: of weights and activations; master: of the optimizer; grad: of gradients."""

    compute: torch.dtype = torch.float32
    master: torch.dtype = torch.float32
    grad: torch.dtype = torch.float32


@dataclass(frozen=True)
class Segment:
    """A stretch of this rank's weights that is stepped alike: flat, in the master dtype.

    Attributes:
        start: where it begins in its bucket's `master`.
        weight, grad: [n] views; grad is valid between `finish` and the next backward.
        decay: weight decay applies.
        holders: ranks of the whole world that hold these same elements.
        by_load: moved by the load of experts: `grad` is no gradient, and has no part in the norm.
    """

    start: int
    weight: Tensor
    grad: Tensor
    decay: bool
    holders: int
    by_load: bool = False


class FlatBucket:
    """A bucket's buffers on one rank.

    zero: the ZeRO stage, 0 to 3.
    copies: how often the pipeline holds its contents (tied tables, DualPipe's two directions).
    """

    def __init__(
        self,
        bucket: Bucket,
        mesh: Mesh,
        zero: int,
        dtypes: Dtypes,
        device: str,
        copies: int = 1,
    ):
        self.bucket, self.mesh, self.zero, self.dtypes = bucket, mesh, zero, dtypes
        self.copies = copies
        # Who holds the same parameters: those over whom states are sharded, and replicas of these.
        expert = bucket.expert
        self.sharers: Axis = mesh["edp" if expert else "fsdp"]
        self.replicas: Axis = mesh["dp_replicate"]
        if expert and mesh.layout.zero == 0:
            self.replicas = Axis("dp_replicate")  # then edp is all of them
        self.shards: Axis = self.sharers if zero else Axis(self.sharers.name)
        n = bucket.size // self.shards.size
        self.own = slice(self.shards.rank * n, (self.shards.rank + 1) * n)
        self.full = torch.zeros(bucket.size, dtype=dtypes.compute, device=device)
        self.aliased = zero < 3 and dtypes.compute == dtypes.master
        self.master = (
            self.full[self.own]
            if self.aliased
            else torch.zeros(n, dtype=dtypes.master, device=device)
        )
        whole = bucket.size if zero < 2 else n
        self.grads = torch.zeros(whole, dtype=dtypes.grad, device=device)
        self.whole: Tensor | None = self.grads if zero < 2 else None
        self.places: dict[int, Tensor] = {}  # by their start in `whole`
        self.weights: Handle = Done()  # the gather under way into `full`
        self.gathered = True
        self.arrived: set[str] = set()  # parameters whose gradient of this micro batch is in
        self.accumulated = False  # `grads` holds something of this step already
        self.reduction: tuple[Handle, Tensor] | None = None
        starts = [e.start for e in bucket.entries[1:]] + [bucket.size]
        pairs = zip((e.stop for e in bucket.entries), starts, strict=True)
        self.gaps = [slice(a, b) for a, b in pairs if a < b]

    def reset(self) -> None:
        """Before a step: nothing of an earlier one is left, also not of one that broke off."""
        if self.reduction is not None:
            self.reduction[0].wait()
            self.reduction = None
        self.release()
        if self.zero >= 2:
            self.whole = None
        else:
            self._zero_gaps()
        self.accumulated = False
        self.arrived.clear()

    # -- weights

    def publish(self, wait: bool) -> None:
        """Brings what the optimizer wrote into `master` to every rank's `full`."""
        if self.zero == 3:
            self.release()
            return
        self.weights.wait()
        own = self.full[self.own]
        if not self.aliased:
            own.copy_(self.master)
        if self.shards.size > 1:
            self.weights = self.shards.all_gather(self.full, own, wait)

    def gather(self) -> None:
        """ZeRO-3: starts to fill `full`; `ready` waits for it."""
        if self.gathered:
            return
        self.gathered = True
        self.full.untyped_storage().resize_(self.bucket.size * self.full.element_size())
        own = self.full[self.own]
        own.copy_(self.master)
        self.weights = self.shards.all_gather(self.full, own, wait=False)

    def ready(self) -> None:
        """Waits until `full` may be read."""
        self.gather()
        self.weights.wait()
        self.weights = Done()

    def release(self) -> None:
        """ZeRO-3: gives back the memory of `full`."""
        if self.zero == 3 and self.gathered:
            self.ready()
            self.gathered = False
            self.full.untyped_storage().resize_(0)

    # -- gradients

    def accumulate(self, entry: Entry, grad: Tensor) -> None:
        """Adds one parameter's gradient of the current micro batch."""
        if self.whole is None:
            self.whole = torch.empty(self.bucket.size, dtype=self.dtypes.grad, device=grad.device)
            self._zero_gaps()
        place = self.places.get(entry.start)
        if place is None:
            place = self.whole[entry.start : entry.stop].view(entry.shape)
            if self.zero < 2:  # where `whole` stays
                self.places[entry.start] = place
        if self.accumulated and self.zero < 2:
            place.add_(grad)
        else:
            place.copy_(grad)
        self.arrived.add(entry.parameter.name)

    def _zero_gaps(self) -> None:
        """Alignment between parameters is part of what is sent, summed and stepped: as zeros."""
        for gap in self.gaps:
            self.whole[gap].zero_()

    @property
    def complete(self) -> bool:
        return len(self.arrived) == len(self.bucket.entries)

    def close(self) -> None:
        """Ends a micro batch: gradients that never came are zero."""
        if self.complete:
            return
        for entry in self.bucket.entries:
            if entry.parameter.name not in self.arrived and not (
                self.accumulated and self.zero < 2
            ):
                zero = torch.zeros((), dtype=self.dtypes.grad, device=self.full.device)
                self.accumulate(entry, zero.expand(entry.shape))

    def start_reduction(self) -> None:
        """Sums partial gradients over tp and starts the reduction over the data ranks."""
        for axis, start, stop in self.bucket.partial_runs():
            self.mesh[axis].all_reduce(self.whole[start:stop])
        if self.zero == 0:
            # Context-parallel ranks see other tokens of the same samples.
            work = self.sharers.all_reduce(self.grads, wait=self.replicas.size > 1)
            if self.replicas.size > 1:
                work = self.replicas.all_reduce(self.grads, wait=False)
            self.reduction = (work, self.grads)
            return
        out = self.grads[self.own] if self.zero < 2 else None
        if out is None:
            out = torch.empty_like(self.grads) if self.accumulated else self.grads
        self.reduction = (self.shards.reduce_scatter(out, self.whole, wait=False), out)

    def finish_reduction(self) -> None:
        """Waits for the reduction; ZeRO 2 and 3 add what came and drop the whole buffer."""
        if self.reduction is None:
            return
        handle, out = self.reduction
        handle.wait()
        self.reduction = None
        if self.zero >= 2:
            if out is not self.grads:
                self.grads.add_(out)
            self.whole = None
            self.accumulated = True

    @property
    def own_grads(self) -> Tensor:
        """This rank's piece of the gradients, [n]."""
        return self.grads[self.own] if self.zero < 2 else self.grads

    def segments(self) -> list[Segment]:
        """This rank's weights and gradients as flat stretches."""
        own = self.own
        replicas = self.replicas.size * (1 if self.zero else self.sharers.size)
        result = []
        for run in self.bucket.runs:
            start = max(run.start, own.start) - own.start
            stop = min(run.stop, own.stop) - own.start
            if start < stop:
                weight, grad = self.master[start:stop], self.own_grads[start:stop]
                holders = run.copies * replicas * self.copies
                result.append(Segment(start, weight, grad, run.decay, holders, run.by_load))
        return result
