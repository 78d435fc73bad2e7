"""Data parallelism: DDP, ZeRO 1 to 3, FSDP and HSDP, one engine.

Parameters live in flat buckets (`parallel/flat.py`, `spec/buckets.py`). Each chunk of the model
that a rank holds has buckets of its own, so that the micro batches of one may be anywhere while
those of another are somewhere else. Without a pipeline there is one chunk.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor, nn

from plait.models.transformer import Transformer
from plait.parallel.deferred import Later
from plait.parallel.flat import Dtypes, FlatBucket, Segment
from plait.parallel.mesh import Mesh
from plait.schedules.table import Table
from plait.spec.buckets import Entry, Piece, make_buckets, pieces, zero_stage
from plait.spec.chunks import TABLE
from plait.spec.model import Model


class Chunk:
    """A run of layers on this rank: its module, its weights and gradients.

    A micro batch's gradients are taken between `begin_micro_batch` and `end_micro_batch`: as
    autograd makes them, or, where they were put off (`later`), in `weight_gradients`.

    Attributes:
        number: of the chunk, in model order.
        module: the slice of the model. buckets: its weights. parameters: by name.
    """

    def __init__(
        self,
        number: int,
        module: Transformer,
        buckets: list[FlatBucket],
        model: Model,
        later: Later,
    ):
        self.number, self.module, self.buckets = number, module, buckets
        self.model, self.later = model, later
        self.last = True  # whether this is the step's last micro batch
        self.reducing: FlatBucket | None = None
        self.places: dict[int, tuple[FlatBucket, Entry]] = {}
        self.parameters = self._install()
        later.deliver = self.take
        for b in buckets:
            b.release()
        self._watch_units()

    # -- construction

    def _install(self) -> dict[str, nn.Parameter]:
        module = self.module
        owners: dict[str, list[tuple[nn.Module, str]]] = {}
        names = {id(p): name for name, p in module.named_parameters()}
        for child in module.modules():
            for attribute, p in child.named_parameters(recurse=False):
                owners.setdefault(names[id(p)], []).append((child, attribute))
        if self.model.tied and module.embed is None and module.head is not None:
            owners[TABLE] = owners.pop("head.output.weight")
        parameters = {}
        for flat in self.buckets:
            for entry in flat.bucket.entries:
                # `.data` starts a version counter of its own: refilling the bucket is not a
                # change that autograd should refuse.
                view = flat.full.data[entry.start : entry.stop].view(entry.shape)
                p = nn.Parameter(view)
                for child, attribute in owners.pop(entry.parameter.name):
                    setattr(child, attribute, p)
                p.register_post_accumulate_grad_hook(self._made)
                parameters[entry.parameter.name] = p
                self.places[id(p)] = flat, entry
        assert not owners, f"parameters in no bucket: {sorted(owners)}"
        return parameters

    def _made(self, p: nn.Parameter) -> None:
        """Autograd has made a gradient."""
        grad, p.grad = p.grad, None
        if grad is None:  # it was put off
            return
        if self.later.queue is None:
            self.take(p, grad)
        else:
            self.later.queue.append(lambda: self.take(p, grad))

    def _watch_units(self) -> None:
        """Gathers before, and releases after, each unit's forward and backward."""
        units = dict(_units(self.module))
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
            if any(b.zero == 3 for b in self.buckets):
                unit.register_forward_hook(self._closer(mine, before, done, after))

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
        self,
        mine: list[FlatBucket],
        preceding: list[FlatBucket],
        done: list[FlatBucket],
        following: list[FlatBucket],
    ) -> Callable:
        def before_backward(grad: Tensor) -> None:
            if self.later.queue is not None:  # no weight gradient will come to release them
                for b in following:
                    b.release()
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

    # -- a micro batch

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Within it come the gradients of a micro batch, of the step's last one with `last`."""
        self.last = last
        yield
        self.end_micro_batch()

    @contextmanager
    def put_off(self, queue: list[Callable[[], None]]) -> Iterator[None]:
        """Within it, weight gradients are not computed: what makes them goes to `queue`."""
        self.later.queue = queue
        try:
            yield
        finally:
            self.later.queue = None
        for b in self.buckets:
            b.release()

    def take(self, p: nn.Parameter, grad: Tensor) -> None:
        """Takes one parameter's gradient; reduces its bucket when all of them are there."""
        flat, entry = self.places[id(p)]
        flat.accumulate(entry, grad)
        if flat.complete:
            self._reduce(flat)

    def _reduce(self, flat: FlatBucket) -> None:
        if self.last or flat.zero >= 2:
            flat.start_reduction()
            if flat.zero >= 2:
                # One whole buffer being filled and one being reduced, never more.
                if self.reducing is not None:
                    self.reducing.finish_reduction()
                self.reducing = flat
        flat.release()

    def end_micro_batch(self) -> None:
        """After backward: what is missing counts as zero; pieces that are under way arrive.

        What is reduced once a step is waited for at its end, when other chunks are done too.
        """
        for b in self.buckets:
            if not b.complete:
                b.close()
                self._reduce(b)
        for b in self.buckets:
            if b.zero >= 2:
                b.finish_reduction()
            b.accumulated = True
            b.arrived.clear()
        self.reducing = None


class DataParallel:
    """Keeps the weights and gradients of all chunks of a rank in step with the other ranks.

    A step is: `begin`, forward and backward of each micro batch through the chunks, `finish`, the
    optimizer on `segments`, and `publish`.

    Args:
        modules: chunk number -> its slice of the model.
        later: chunk number -> where its linear maps put off their weight gradients.
        table: says which ranks hold which chunks.
    """

    def __init__(
        self,
        modules: Mapping[int, Transformer],
        later: Mapping[int, Later],
        table: Table,
        model: Model,
        mesh: Mesh,
        dtypes: Dtypes,
        bucket_bytes: float,
        device: str = "cpu",
    ):
        self.model, self.layout, self.mesh, self.table = model, mesh.layout, mesh, table
        self.chunks: dict[int, Chunk] = {}
        for c, module in modules.items():
            buckets = [
                FlatBucket(
                    b,
                    mesh,
                    zero_stage(mesh.layout, b.expert),
                    dtypes,
                    device,
                    len(self._copies(c, b.entries)),
                )
                for b in make_buckets(
                    model, mesh.layout, bucket_bytes, dtypes.grad.itemsize, chunk=c
                )
            ]
            self.chunks[c] = Chunk(c, module, buckets, model, later[c])
        self.buckets = [b for chunk in self.chunks.values() for b in chunk.buckets]
        self.segments = [s for b in self.buckets for s in b.segments()]
        if not self.segments:  # a rank whose pieces are all padding steps nothing, like the others
            b = self.buckets[0]
            self.segments = [Segment(0, b.master[:0], b.own_grads[:0], False, 1)]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """By name; of copies on this rank the last one."""
        return {n: p for chunk in self.chunks.values() for n, p in chunk.parameters.items()}

    # -- copies of the same parameters along the pipeline

    def _copies(self, chunk: int, entries: tuple[Entry, ...]) -> list[tuple[int, int]]:
        """Every (stage, chunk) that holds these parameters."""
        chunks = {chunk}
        if entries[0].parameter.name == TABLE and self.model.tied and self.layout.pp > 1:
            chunks = {0, self.table.chunks - 1}
        return [(r, c) for r, held in enumerate(self.table.held) for c in held if c in chunks]

    def _agree(self) -> None:
        """Sums the gradients of parameters that are in several places of the pipeline: of a tied
        table in its first and last chunk, of everything under DualPipe. Copies are stepped alike
        and stay the same."""
        pp = self.mesh["pp"]
        seen: dict[tuple[int, ...], list[FlatBucket]] = {}
        for c, chunk in self.chunks.items():
            for i, b in enumerate(chunk.buckets):
                copies = self._copies(c, b.bucket.entries)
                if len(copies) > 1:
                    table = b.bucket.entries[0].parameter.name == TABLE
                    seen.setdefault((-1,) if table else (c, i), []).append(b)
        for key in sorted(seen):
            first, *others = seen[key]
            for b in others:
                first.own_grads.add_(b.own_grads)
            place = next(c for c, chunk in self.chunks.items() if first in chunk.buckets)
            ranks = {r for r, _ in self._copies(place, first.bucket.entries)}
            pp.exchange_sum(first.own_grads, ranks - {pp.rank})
            for b in others:
                b.own_grads.copy_(first.own_grads)

    # -- a step

    def begin(self) -> None:
        """Starts a step: nothing has been accumulated."""
        for chunk in self.chunks.values():
            chunk.reducing = None
        for b in self.buckets:
            b.reset()

    def finish(self) -> None:
        """After the last micro batch: gradients are summed over all ranks that share them."""
        for b in self.buckets:
            b.finish_reduction()
        works = [b.replicas.all_reduce(b.own_grads, wait=False) for b in self.buckets if b.zero]
        for work in works:
            work.wait()
        self._agree()

    def publish(self, wait: bool = False) -> None:
        """After the optimizer: weights go to every rank, each bucket before its next use."""
        for b in reversed(self.buckets):  # the order of the next forward
            b.publish(wait)

    # -- what a rank holds

    def held(self) -> Iterator[tuple[Piece, int, slice]]:
        """The boxes of whole parameters that this rank owns; of copies, each.

        Each as (box, index into `segments`, where its elements lie in that segment).
        """
        place, first = self.mesh.place, 0
        for b in self.buckets:
            segments = b.segments()
            for piece in pieces(b.bucket, b.own.start, b.own.stop, self.model, self.layout, place):
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


def _units(module: Transformer) -> Iterator[tuple[str, nn.Module]]:
    """The modules that are gathered as one, in the order of the forward pass."""
    if module.embed is not None:
        yield "embed", module.embed
    for name, layer in module.layers.items():
        yield f"layers.{name}", layer
    if module.head is not None:
        yield "head", module.head
