"""Data parallelism: DDP, ZeRO 1 to 3, FSDP and HSDP, one engine.

Parameters live in flat buckets (`spec/buckets.py`). A bucket holds

    full    the weights in the compute dtype. Under ZeRO-3 it has memory only while its unit is in
            use: the storage is emptied and filled again, so that what autograd saved stays valid.
    master  this rank's piece of the weights in the master dtype, which the optimizer steps. Where
            the dtypes agree and the weights stay, it is a view of `full`.
    grads   gradients in their own dtype: all of them (ZeRO 0 and 1) or this rank's piece (2 and
            3; then a whole buffer lives only from the bucket's first gradient to its reduction).

What a stage does is decided by two questions: are gradients scattered after each micro batch
(2, 3) or once a step (0, 1), and do weights stay gathered (0 to 2) or not (3). Papers: ZeRO
1910.02054 section 5; FSDP 2304.11277 section 3.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from plait.parallel.collectives import Axis, Done, Handle
from plait.parallel.mesh import Mesh
from plait.spec.buckets import Bucket, Entry, Piece, make_buckets, pieces, zero_stage
from plait.spec.model import Model


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
    """

    start: int
    weight: Tensor
    grad: Tensor
    decay: bool
    holders: int


class FlatBucket:
    """A bucket's buffers on one rank."""

    def __init__(self, bucket: Bucket, mesh: Mesh, stage: int, dtypes: Dtypes, device: str):
        self.bucket, self.mesh, self.stage, self.dtypes = bucket, mesh, stage, dtypes
        self.shards: Axis = mesh["fsdp"] if stage else Axis("fsdp")
        n = bucket.size // self.shards.size
        self.own = slice(self.shards.rank * n, (self.shards.rank + 1) * n)
        self.full = torch.zeros(bucket.size, dtype=dtypes.compute, device=device)
        self.aliased = stage < 3 and dtypes.compute == dtypes.master
        self.master = (
            self.full[self.own]
            if self.aliased
            else torch.zeros(n, dtype=dtypes.master, device=device)
        )
        whole = bucket.size if stage < 2 else n
        self.grads = torch.zeros(whole, dtype=dtypes.grad, device=device)
        self.whole: Tensor | None = self.grads if stage < 2 else None
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
        if self.stage >= 2:
            self.whole = None
        else:
            self._zero_gaps()
        self.accumulated = False
        self.arrived.clear()

    # -- weights

    def publish(self, wait: bool) -> None:
        """Brings what the optimizer wrote into `master` to every rank's `full`."""
        if self.stage == 3:
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
        if self.stage == 3 and self.gathered:
            self.ready()
            self.gathered = False
            self.full.untyped_storage().resize_(0)

    # -- gradients

    def accumulate(self, entry: Entry, grad: Tensor) -> None:
        """Adds one parameter's gradient of the current micro batch."""
        if self.whole is None:
            self.whole = torch.empty(self.bucket.size, dtype=self.dtypes.grad, device=grad.device)
            self._zero_gaps()
        place = self.whole[entry.start : entry.stop]
        if self.accumulated and self.stage < 2:
            place.add_(grad.reshape(-1))
        else:
            place.copy_(grad.reshape(-1))
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
                self.accumulated and self.stage < 2
            ):
                zero = torch.zeros((), dtype=self.dtypes.grad, device=self.full.device)
                self.accumulate(entry, zero.expand(entry.shape))

    def start_reduction(self) -> None:
        """Sums partial gradients over tp and starts the reduction over the data ranks."""
        for axis, start, stop in self.bucket.partial_runs():
            self.mesh[axis].all_reduce(self.whole[start:stop])
        if self.stage == 0:
            work = self.mesh["dp_replicate"].all_reduce(self.grads, wait=False)
            self.reduction = (work, self.grads)
            return
        out = self.grads[self.own] if self.stage < 2 else None
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
        if self.stage >= 2:
            if out is not self.grads:
                self.grads.add_(out)
            self.whole = None
            self.accumulated = True

    @property
    def own_grads(self) -> Tensor:
        """This rank's piece of the gradients, [n]."""
        return self.grads[self.own] if self.stage < 2 else self.grads

    def segments(self) -> list[Segment]:
        """This rank's weights and gradients as flat stretches."""
        mesh, own = self.mesh, self.own
        replicas = mesh["dp_replicate"].size * (1 if self.stage else mesh["fsdp"].size)
        result = []
        for run in self.bucket.runs:
            start = max(run.start, own.start) - own.start
            stop = min(run.stop, own.stop) - own.start
            if start < stop:
                weight, grad = self.master[start:stop], self.own_grads[start:stop]
                holders = run.copies * replicas
                result.append(Segment(start, weight, grad, run.decay, holders))
        return result


class DataParallel:
    """Installs a model's parameters into buckets and keeps weights and gradients in step.

    A step is: `begin`, then forward and backward for each micro batch, each closed by
    `end_micro_batch`, then `finish`, the optimizer on `segments`, and `publish`.
    """

    def __init__(
        self,
        module: nn.Module,
        model: Model,
        mesh: Mesh,
        dtypes: Dtypes,
        bucket_bytes: float,
        device: str = "cpu",
    ):
        self.model, self.layout, self.mesh = model, mesh.layout, mesh
        self.stage = zero_stage(mesh.layout)
        grad_bytes = dtypes.grad.itemsize
        self.buckets = [
            FlatBucket(b, mesh, self.stage, dtypes, device)
            for b in make_buckets(model, mesh.layout, bucket_bytes, grad_bytes)
        ]
        self.last = True  # whether this is the step's last micro batch
        self.reducing: FlatBucket | None = None
        self.parameters = self._install(module)
        for b in self.buckets:
            b.release()
        self._watch_units(module)
        self.segments = [s for b in self.buckets for s in b.segments()]
        if not self.segments:  # a rank whose pieces are all padding steps nothing, like the others
            b = self.buckets[0]
            self.segments = [Segment(0, b.master[:0], b.own_grads[:0], False, 1)]

    # -- construction

    def _install(self, module: nn.Module) -> dict[str, nn.Parameter]:
        owners: dict[str, list[tuple[nn.Module, str]]] = {}
        names = {id(p): name for name, p in module.named_parameters()}
        for child in module.modules():
            for attribute, p in child.named_parameters(recurse=False):
                owners.setdefault(names[id(p)], []).append((child, attribute))
        parameters = {}
        for flat in self.buckets:
            for entry in flat.bucket.entries:
                # `.data` starts a version counter of its own: refilling the bucket is not a
                # change that autograd should refuse.
                view = flat.full.data[entry.start : entry.stop].view(entry.shape)
                p = nn.Parameter(view)
                for child, attribute in owners.pop(entry.parameter.name):
                    setattr(child, attribute, p)
                p.register_post_accumulate_grad_hook(self._hook(flat, entry))
                parameters[entry.parameter.name] = p
        assert not owners, f"parameters in no bucket: {sorted(owners)}"
        return parameters

    def _hook(self, flat: FlatBucket, entry: Entry) -> Callable[[Tensor], None]:
        def take(p: Tensor) -> None:
            grad, p.grad = p.grad, None
            self.accumulate(flat, entry, grad)

        return take

    def _watch_units(self, module: nn.Module) -> None:
        """Gathers before, and releases after, each unit's forward and backward."""
        units = {name: child for name, child in _units(module)}
        uses: dict[str, list[FlatBucket]] = {name: [] for name in units}
        for flat in self.buckets:
            for unit in flat.bucket.units:
                uses[unit].append(flat)
        if self.model.tied and {"embed", "head"} <= set(units):
            uses["head"] += [b for b in uses["embed"] if b not in uses["head"]]
        names = list(units)
        final = {id(b): name for name in names for b in uses[name]}
        for i, (name, unit) in enumerate(units.items()):
            after = uses[names[i + 1]] if i + 1 < len(names) else []
            before = uses[names[i - 1]] if i > 0 else []
            mine = uses[name]
            done = [b for b in mine if final[id(b)] == name]
            unit.register_forward_pre_hook(self._opener(mine, after))
            if self.stage == 3:
                unit.register_forward_hook(self._closer(mine, before, done))

    def _opener(self, mine: list[FlatBucket], following: list[FlatBucket]) -> Callable:
        def before_forward(*_: object) -> None:
            for b in mine:
                b.gather()
            for b in following:
                b.gather()
            for b in mine:
                b.ready()

        return before_forward

    def _closer(
        self, mine: list[FlatBucket], preceding: list[FlatBucket], done: list[FlatBucket]
    ) -> Callable:
        def before_backward(grad: Tensor) -> None:
            for b in mine + preceding:
                b.gather()
            for b in mine:
                b.ready()

        def after_forward(_: nn.Module, __: object, out: Tensor) -> None:
            for b in done:
                b.release()
            if out.requires_grad:
                out.register_hook(before_backward)

        return after_forward

    # -- a step

    def begin(self) -> None:
        """Starts a step: nothing has been accumulated."""
        self.reducing = None
        for b in self.buckets:
            b.reset()

    def begin_micro_batch(self, last: bool) -> None:
        """Says whether the micro batch that comes is the step's last."""
        self.last = last

    def accumulate(self, flat: FlatBucket, entry: Entry, grad: Tensor) -> None:
        """Takes one parameter's gradient; reduces its bucket when all of them are there."""
        flat.accumulate(entry, grad)
        if flat.complete:
            self._reduce(flat)

    def _reduce(self, flat: FlatBucket) -> None:
        if self.last or (self.stage >= 2):
            flat.start_reduction()
            if self.stage >= 2:
                # One whole buffer being filled and one being reduced, never more.
                if self.reducing is not None:
                    self.reducing.finish_reduction()
                self.reducing = flat
        flat.release()

    def end_micro_batch(self) -> None:
        """After backward: what is missing counts as zero, what is under way arrives."""
        for b in self.buckets:
            if not b.complete:
                b.close()
                self._reduce(b)
        for b in self.buckets:
            b.finish_reduction()
            b.accumulated = True
            b.arrived.clear()
        self.reducing = None

    def finish(self) -> None:
        """After the last micro batch: sums the pieces over the replicas (HSDP)."""
        if self.stage:
            replicas = self.mesh["dp_replicate"]
            works = [replicas.all_reduce(b.own_grads, wait=False) for b in self.buckets]
            for work in works:
                work.wait()

    def publish(self, wait: bool = False) -> None:
        """After the optimizer: weights go to every rank, each bucket before its next use."""
        for b in reversed(self.buckets):  # the order of the next forward
            b.publish(wait)

    # -- what a rank holds

    def held(self) -> Iterator[tuple[Piece, int, slice]]:
        """The boxes of whole parameters that this rank owns.

        Each as (box, index into `segments`, where its elements lie in that segment).
        """
        tp_rank, first = self.mesh["tp"].rank, 0
        for b in self.buckets:
            segments = b.segments()
            for piece in pieces(
                b.bucket, b.own.start, b.own.stop, self.model, self.layout, tp_rank
            ):
                at = piece.start - b.own.start
                i = max(i for i, s in enumerate(segments) if s.start <= at)
                at -= segments[i].start
                yield piece, first + i, slice(at, at + prod(piece.size))
            first += len(segments)

    @torch.no_grad()
    def initialize(self, value: Callable[[Piece], Tensor]) -> None:
        """Fills this rank's pieces with `value(box)` and brings the weights to every rank."""
        for piece, i, s in self.held():
            self.segments[i].weight[s].copy_(value(piece).view(-1))
        self.publish(wait=True)


def _units(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that are gathered as one, in the order of the forward pass."""
    if module.embed is not None:
        yield "embed", module.embed
    for name, layer in module.layers.items():
        yield f"layers.{name}", layer
    if module.head is not None:
        yield "head", module.head
