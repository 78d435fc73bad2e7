"""Which parameters travel together: the flat buffers of the data-parallel engine.

A bucket is one flat run of elements: the local parts of some parameters, one behind the other.
Its gradients are reduced, and its weights gathered, as one message. Rank i of the n ranks that
shard model states owns the i-th of n equal pieces of the run. Both the formulas (`cost/data.py`)
and the engine (`parallel/data.py`) read this table.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

from plait.spec.chunks import TABLE, chunk_parameters
from plait.spec.layout import Layout
from plait.spec.model import Model
from plait.spec.parameters import (
    Parameter,
    Place,
    local_box,
    local_shape,
    partial_over,
    tp_copies,
)

#: Elements; every parameter starts at a multiple, so that bf16 matrices are 16-byte aligned.
ALIGNMENT = 8


@dataclass(frozen=True)
class Entry:
    """A parameter's place in a bucket: elements [start, start + numel) hold its local part."""

    parameter: Parameter
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Run:
    """Neighbouring entries that are treated alike: elements [start, stop) of a bucket.

    Attributes:
        partial: ranks over which the gradient must still be summed: "", "tp", "kv" or "etp".
        decay: weight decay applies.
        copies: tensor-parallel ranks that hold the same values.
        by_load: it is no gradient but a load (`Parameter.by_load`).
    """

    start: int
    stop: int
    partial: str
    decay: bool
    copies: int
    by_load: bool = False


@dataclass(frozen=True)
class Bucket:
    """One flat buffer.

    Attributes:
        entries: its parameters in the order of the buffer.
        runs: the same, grouped by how they are treated; they cover [0, numel).
        size: elements with padding, a multiple of the number of shards.
    """

    entries: tuple[Entry, ...]
    runs: tuple[Run, ...]
    size: int

    @property
    def numel(self) -> int:
        return self.entries[-1].stop

    @property
    def expert(self) -> bool:
        """Whether it holds parameters of experts, which lie on a grid of their own; all or none
        of its entries do."""
        return self.entries[0].parameter.expert

    @property
    def units(self) -> tuple[str, ...]:
        """The units whose parameters it holds."""
        return tuple(dict.fromkeys(e.parameter.unit for e in self.entries))

    def partial_runs(self) -> Iterator[tuple[str, int, int]]:
        """("tp" | "kv" | "etp", start, stop) of the elements whose gradients are partial."""
        for partial, runs in groupby(self.runs, key=lambda r: r.partial):
            runs = list(runs)
            if partial:
                yield partial, runs[0].start, runs[-1].stop


def zero_stage(layout: Layout, expert: bool = False) -> int:
    """The ZeRO stage in effect: with one shard there is nothing to shard.

    expert: of the experts, whose states lie on other ranks.
    """
    return layout.zero if shards_of(layout, expert) > 1 else 0


def shards_of(layout: Layout, expert: bool) -> int:
    """Ranks that share model states, if any are shared."""
    return layout.expert_shards if expert else layout.fsdp


def make_buckets(
    model: Model, layout: Layout, bucket_bytes: float, element_bytes: int, chunk: int = 0
) -> list[Bucket]:
    """All buckets of a chunk, in the order in which backward completes them.

    Under ZeRO-3 a bucket is a unit (embedding, one layer, head), for it is gathered and
    released as one. Otherwise parameters are packed from the last to the first until a bucket
    holds about `bucket_bytes` (at least one parameter). A table that the first and the last chunk
    share is alone in its bucket, so that both cut it in the same pieces. Parameters of experts
    have buckets of their own: other ranks hold the same ones.
    """
    table = list(chunk_parameters(model, layout, chunk))
    packs = _packs([p for p in table if not p.expert], model, layout, bucket_bytes, element_bytes)
    packs += _packs([p for p in table if p.expert], model, layout, bucket_bytes, element_bytes)
    order = {p.name: i for i, p in enumerate(table)}
    packs.sort(key=lambda pack: -max(order[p.name] for p in pack))
    return [_bucket(pack, model, layout) for pack in packs]


def _packs(
    table: Sequence[Parameter],
    model: Model,
    layout: Layout,
    bucket_bytes: float,
    element_bytes: int,
) -> list[list[Parameter]]:
    """What goes into a bucket together, from the last to the first."""
    shared = model.tied and layout.pp > 1
    expert = bool(table) and table[0].expert

    def alone(p: Parameter) -> bool:
        return shared and p.name == TABLE

    if zero_stage(layout, expert) == 3:
        packs = [list(unit) for _, unit in groupby(table, key=lambda p: (p.unit, alone(p)))][::-1]
    else:
        packs, room = [], 0.0
        for p in reversed(table):
            need = prod(local_shape(p, model, layout)) * element_bytes
            if alone(p):
                packs.append([p])
                room = 0.0
                continue
            if need > room:
                packs.append([])
                room = bucket_bytes
            packs[-1].insert(0, p)
            room -= need
    return packs


def _bucket(pack: Sequence[Parameter], model: Model, layout: Layout) -> Bucket:
    def treatment(p: Parameter) -> tuple[str, bool, int, bool]:
        return partial_over(p, model, layout), p.decay, tp_copies(p, model, layout), p.by_load

    entries, runs, position = [], [], 0
    for alike, members in groupby(sorted(pack, key=treatment), key=treatment):
        start = position
        for p in members:
            entry = Entry(p, local_shape(p, model, layout), position)
            entries.append(entry)
            position = -(-entry.stop // ALIGNMENT) * ALIGNMENT
        runs.append(Run(start, position, *alike))
    numel = entries[-1].stop
    runs[-1] = Run(runs[-1].start, numel, *treatment(entries[-1].parameter))
    expert = pack[0].expert
    shards = shards_of(layout, expert) if zero_stage(layout, expert) else 1
    return Bucket(tuple(entries), tuple(runs), -(-numel // shards) * shards)


@dataclass(frozen=True)
class Piece:
    """A box of a parameter inside a stretch of a bucket.

    Attributes:
        parameter: whose box it is.
        offset, size: the box in the whole parameter.
        start: where in the bucket its elements begin (they lie in row-major order).
    """

    parameter: Parameter
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int


def pieces(
    bucket: Bucket, start: int, stop: int, model: Model, layout: Layout, place: Place
) -> Iterator[Piece]:
    """The boxes of whole parameters that elements [start, stop) of a bucket hold on a rank.

    Padding, of buckets and of vocabularies, belongs to no box.
    """
    for entry in bucket.entries:
        origin, valid = local_box(entry.parameter, model, layout, place)
        # Only dim 0 is ever padded, so what is valid is a leading stretch of the elements.
        first = max(start - entry.start, 0)
        last = min(stop - entry.start, prod(valid))
        if first >= last:
            continue
        for offset, size in boxes(entry.shape, first, last):
            at = sum(o * prod(entry.shape[d + 1 :]) for d, o in enumerate(offset))
            where = tuple(a + b for a, b in zip(origin, offset, strict=True))
            yield Piece(entry.parameter, where, size, entry.start + at)


def boxes(
    shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Row-major elements [start, stop) of a tensor as few boxes: (offset, size) each, in order."""
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    inner = prod(shape[1:])
    row = start // inner
    while start < stop:
        if start % inner == 0 and stop - start >= inner:
            rows = (stop - start) // inner
            yield (row, *(0 for _ in shape[1:])), (rows, *shape[1:])
            start, row = start + rows * inner, row + rows
            continue
        end = min(stop, (row + 1) * inner)
        for offset, size in boxes(shape[1:], start - row * inner, end - row * inner):
            yield (row, *offset), (1, *size)
        start, row = end, row + 1
