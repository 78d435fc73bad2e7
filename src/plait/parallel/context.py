"""Context parallelism: attention of a sample whose positions lie on several ranks.

Everything else in a transformer looks at one position at a time. Three ways to bring queries and
keys together, which all compute what the mask leaves and nothing else:

    ring         keys and values go round the ranks, block by block, the next one under way while
                 the last one is computed with; their gradients follow and come home
                 (Liu et al. 2310.01889). Per rank (c - 1) messages forward, 2 (c - 1) backward, of
                 B x S_local x kv heads x (dim + value dim) elements each
    all-gather   every rank gathers all keys and values, forward and once more backward, and
                 gradients are reduce-scattered (Llama 3, 2407.21783, section 3.3.2)
    Ulysses      an all-to-all gives each rank all positions of some heads, another takes the
                 output back (Jacobs et al. 2309.14509): two forward, two backward

and Ulysses inside of one of the others (2405.07719): neighbouring ranks exchange positions for
heads, and the ring goes from group to group. Only KV heads travel, keys and values as one message.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from plait.models import kernels
from plait.models.attention import AtHand, Plan, attend, make_scores, plan
from plait.models.heads import Context, Heads, Held
from plait.parallel.collectives import Axis, Handle
from plait.parallel.mesh import Mesh
from plait.parallel.pipeline import MicroBatch
from plait.spec.calls import calls
from plait.spec.sequence import Split, ring_steps, sample_split, sample_steps

METHODS = ("ring", "all-gather")


def apply_context_parallel(module: nn.Module, mesh: Mesh, seq: int) -> None:
    """Puts attention over the cp ranks into a Transformer, in place; seq: of whole samples."""
    if mesh.layout.cp == 1:
        return
    for layer in module.layers.values():
        layer.attention.attend = _Attend(layer.attention, mesh, seq)


def own_positions(batches: Sequence[MicroBatch], mesh: Mesh) -> list[MicroBatch]:
    """Of whole samples what this rank holds."""
    if mesh.layout.cp == 1:
        return list(batches)
    seq, device = batches[0].tokens.shape[1], batches[0].tokens.device

    @cache
    def positions(documents: tuple[int, ...]) -> Tensor:
        mine = sample_split(mesh.layout, documents).positions(mesh.coordinate["cp"])
        return torch.tensor(mine, device=device)

    def own(batch: MicroBatch) -> MicroBatch:
        if batch.documents is None:
            mine = positions((seq,))
        else:
            mine = torch.stack([positions(d) for d in batch.documents])
        each = mine.expand(len(batch.tokens), -1)
        tokens, targets = (t.gather(1, each) for t in (batch.tokens, batch.targets))
        return replace(batch, tokens=tokens, targets=targets, held=Held(mine, seq))

    return [own(batch) for batch in batches]


class _Attend:
    """A layer's attention over the cp ranks, in place of its own."""

    def __init__(self, heads: Heads, mesh: Mesh, seq: int):
        self.heads, self.mesh, self.seq = heads, mesh, seq

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        heads, mesh = self.heads, self.mesh
        each = ctx.documents or ((self.seq,),)
        return context_attention(
            q,
            k,
            v,
            mesh["ring"],
            mesh["ulysses"],
            [sample_split(mesh.layout, documents) for documents in each],
            heads.window,
            heads.scale,
            heads.softcap,
            heads.sinks,
            mesh.layout.cp_method,
            sample_steps(mesh.layout, self.seq, heads.window),
        )


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring: Axis,
    ulysses: Axis,
    splits: Sequence[Split],
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    method: str = "ring",
    steps: int | None = None,
) -> Tensor:
    """Causal attention over samples that are cut over the ranks of ring x ulysses.

    Args:
        q: [B, S_local, heads, dim], the positions of this rank, all heads.
        k, v: [B, S_local, kv heads, dim]; v may have another dim.
        ring, ulysses: the two axes; of the cp ranks in order, this one is number
            ring.rank * ulysses.size + ulysses.rank. ulysses.size divides the heads, and divides
            the KV heads or is a multiple of them (then several ranks have the same one).
        splits: how the sample lies on all cp ranks: one for the batch, or one for each sample.
        window, scale, softcap, sinks: as in `models.attention.attention`.
        method: how the ring's ranks come by keys, one of METHODS.
        steps: blocks that a rank of the ring is given, its own included (None: as many as any
            rank's queries need).

    Returns:
        [B, S_local, heads, v's dim].
    """
    assert method in METHODS, method
    assert len(splits) in (1, q.shape[0]), (len(splits), q.shape)
    assert all(s.cp == ring.size * ulysses.size for s in splits), (splits, ring, ulysses)
    first = ring.rank * ulysses.size
    sizes = splits[0].sizes[first : first + ulysses.size]
    assert q.shape[1] == sizes[ulysses.rank], (q.shape, sizes)
    scores = make_scores(q, scale, softcap)

    if ulysses.size > 1:
        if sinks is not None:
            sinks = sinks.chunk(ulysses.size)[ulysses.rank]
        q, k, v = _ToHeads.apply(q, k, v, ulysses, sizes)
    joined = tuple(s.joined(ulysses.size) for s in splits)
    steps = steps or max(ring_steps(s, window) for s in joined)
    blocks = Blocks(ring, joined, window, steps)
    source = AtHand(blocks.plan(ring.rank))
    if ring.size > 1:
        source = Ring(blocks) if method == "ring" else Gathered(blocks)
    y = attend(q, k, v, source, scores, sinks)
    return y if ulysses.size == 1 else _ToSequence.apply(y, ulysses, sizes)


@dataclass(frozen=True)
class Blocks:
    """Which block of keys lies on which rank of an axis, and what this rank's queries see of it;
    steps: blocks that a rank of a ring is given."""

    axis: Axis
    splits: tuple[Split, ...]
    window: int | None
    steps: int

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Positions of each rank, the same for every sample."""
        sizes = self.splits[0].sizes
        assert all(s.sizes == sizes for s in self.splits), self.splits
        return sizes

    def plan(self, owner: int) -> Plan:
        """The calls with the block of a rank."""
        mine = self.axis.rank
        return plan(
            [calls(s.shards[mine], s.shards[owner], s.documents, self.window) for s in self.splits]
        )


@dataclass(frozen=True)
class Ring:
    """A source whose blocks go round: in step s this rank has the block of the s-th before it."""

    of: Blocks

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[Plan, Tensor, Tensor]]:
        held = _pack(k, v)
        for step in range(self.of.steps):
            coming = self._pass_on(held, step)
            yield self.of.plan(self._owner(step)), *_unpack(held, k)
            held = coming.wait()
            del coming  # what has been sent is let go before the next block is made room for

    def gradients(
        self, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor
    ) -> Iterator[tuple[Plan, Tensor, Tensor, Tensor, Tensor]]:
        held = _pack(k, v)
        before = Coming()  # what the ranks before have found of the gradients of the block in hand
        for step in range(self.of.steps):
            coming, seen = self._pass_on(held, step), self.of.plan(self._owner(step))
            if step == 0:
                yield seen, *_unpack(held, k), dk, dv
            else:
                share = torch.zeros_like(held, dtype=dk.dtype)
                yield seen, *_unpack(held, k), *_unpack(share, k)
                if step > 1:
                    share += before.wait()
                    before = Coming()  # lets go of what was sent and what came
                before = self._pass_gradients(share.to(k.dtype), step)
                del share
            held = coming.wait()
            del coming
        mine = before.wait()
        if mine is not None:
            for whole, part in zip((dk, dv), _unpack(mine, k), strict=True):
                whole += part

    def _owner(self, step: int) -> int:
        return (self.of.axis.rank - step) % self.of.axis.size

    def _pass_on(self, held: Tensor, step: int) -> "Coming":
        """Sends the block in hand to the next rank, if that still needs it."""
        if step + 1 == self.of.steps:
            return Coming()
        return self._shift(held, 1, "keys and values", self._owner(step), self._owner(step + 1))

    def _pass_gradients(self, share: Tensor, step: int) -> "Coming":
        """The gradients of the block in hand go where the block goes, and at last to its owner."""
        here, last = self._owner(step), step + 1 == self.of.steps
        by, back = (-step, self.of.axis.rank) if last else (1, self._owner(step + 1))
        return self._shift(share, by, "gradients of keys and values", here, back)

    def _shift(self, x: Tensor, by: int, what: str, here: int, back: int) -> "Coming":
        out = x.new_empty(x.shape[0], self.of.sizes[back], *x.shape[2:])
        names = (f"{what} of rank {owner}" for owner in (here, back))
        return Coming(self.of.axis.shift(out, x, by, *names), x, out)


@dataclass(frozen=True)
class Coming:
    """A message under way, with what is sent meanwhile; or none."""

    handle: Handle | None = None
    sent: Tensor | None = None
    out: Tensor | None = None

    def wait(self) -> Tensor | None:
        if self.handle is not None:
            self.handle.wait()
        return self.out


@dataclass(frozen=True)
class Gathered:
    """A source that gathers all blocks at once, and begins with its own meanwhile."""

    of: Blocks

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[Plan, Tensor, Tensor]]:
        mine = self.of.axis.rank
        coming = self._gather(k, v)
        yield self.of.plan(mine), k, v
        all_keys = coming.wait()
        del coming
        for owner, block in self._others(all_keys, k):
            yield self.of.plan(owner), *_unpack(block, k)

    def gradients(
        self, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor
    ) -> Iterator[tuple[Plan, Tensor, Tensor, Tensor, Tensor]]:
        mine = self.of.axis.rank
        coming = self._gather(k, v)
        yield self.of.plan(mine), k, v, dk, dv
        all_keys = coming.wait()
        del coming  # what has been sent is let go before gradients are made room for
        shares = torch.zeros_like(all_keys, dtype=dk.dtype)
        for (owner, block), (_, share) in zip(
            self._others(all_keys, k), self._others(shares, k), strict=True
        ):
            yield self.of.plan(owner), *_unpack(block, k), *_unpack(share, k)
        received, _ = self.of.axis.scatter_rows(shares.to(k.dtype))
        for whole, part in zip((dk, dv), _unpack(received, k), strict=True):
            whole += part[:, : k.shape[1]]

    def _gather(self, k: Tensor, v: Tensor) -> "Coming":
        """[c * B, S, kv heads, dim + value dim], S the most positions that a rank has."""
        kv, longest = _pack(k, v), max(self.of.sizes)
        if kv.shape[1] < longest:
            padding = kv.new_zeros(kv.shape[0], longest - kv.shape[1], *kv.shape[2:])
            kv = torch.cat((kv, padding), 1)
        out, handle = self.of.axis.gather_rows(kv, wait=False)
        return Coming(handle, kv, out)

    def _others(self, x: Tensor, k: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The other ranks' blocks of what was gathered."""
        for owner, size in enumerate(self.of.sizes):
            if owner != self.of.axis.rank:
                yield owner, x[owner * k.shape[0] : (owner + 1) * k.shape[0], :size]


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """[B, S, kv heads, dim] twice -> [B, S, kv heads, dim + value dim]."""
    return torch.cat((k, v), -1)


def _unpack(kv: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The other way round, as views."""
    dim = k.shape[-1]
    return kv[..., :dim], kv[..., dim:]


# ------------------------------------------------------------------------------------------
# Ulysses


class _ToHeads(torch.autograd.Function):
    """Own positions of all heads -> the group's positions of some heads, one all-to-all for q, k
    and v. Query heads i * heads / ulysses onwards, and their KV heads, go to rank i."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, sizes: Sequence[int]
    ) -> tuple[Tensor, ...]:
        ranks, kv_heads = axis.size, k.shape[2]
        assert q.shape[2] % ranks == 0, (q.shape, axis)
        assert kv_heads % ranks == 0 or ranks % kv_heads == 0, (k.shape, axis)
        copies = max(1, ranks // kv_heads)
        ctx.axis, ctx.sizes, ctx.copies = axis, sizes, copies
        if copies > 1:
            k, v = k.repeat_interleave(copies, 2), v.repeat_interleave(copies, 2)
        parts = [t.unflatten(2, (ranks, -1)) for t in (q, k, v)]
        ctx.shapes = [p.shape[3:] for p in parts]
        x = torch.cat([p.flatten(3) for p in parts], -1).movedim(2, 0)
        return _apart(_gather_positions(x, axis, sizes), ctx.shapes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x = torch.cat([g.flatten(2) for g in grads], -1)
        x = _scatter_positions(x, ctx.axis, ctx.sizes).movedim(0, 2)
        dq, dk, dv = (g.flatten(2, 3) for g in _apart(x, ctx.shapes))
        if ctx.copies > 1:
            dk, dv = (
                g.unflatten(2, (-1, ctx.copies)).sum(3, dtype=kernels.precise(g.dtype)).to(g.dtype)
                for g in (dk, dv)
            )
        return dq, dk, dv, None, None


class _ToSequence(torch.autograd.Function):
    """The group's positions of some heads -> own positions of all heads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, sizes: Sequence[int]) -> Tensor:
        ctx.axis, ctx.sizes = axis, sizes
        y = _scatter_positions(x.flatten(2), axis, sizes).movedim(0, 2)
        return y.unflatten(3, x.shape[2:]).flatten(2, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x = grad.unflatten(2, (ctx.axis.size, -1))
        y = _gather_positions(x.flatten(3).movedim(2, 0), ctx.axis, ctx.sizes)
        return y.unflatten(2, x.shape[3:]), None, None


def _apart(x: Tensor, shapes: Sequence[torch.Size]) -> tuple[Tensor, ...]:
    """The last dim in pieces of these shapes."""
    pieces = x.split([shape.numel() for shape in shapes], -1)
    return tuple(p.unflatten(-1, shape) for p, shape in zip(pieces, shapes, strict=True))


def _gather_positions(x: Tensor, axis: Axis, sizes: Sequence[int]) -> Tensor:
    """[ranks, B, own positions, width], what each rank is to have -> [B, all positions, width]."""
    ranks, batch, own, width = x.shape
    x = x.reshape(-1, width).contiguous()  # rank after rank
    out = x.new_empty(batch * sum(sizes), width)
    axis.all_to_all(out, x, *_rows(batch, sizes, [own] * ranks))
    pieces = out.split([batch * size for size in sizes])
    return torch.cat([p.view(batch, -1, width) for p in pieces], 1) if batch > 1 else out[None]


def _scatter_positions(x: Tensor, axis: Axis, sizes: Sequence[int]) -> Tensor:
    """The other way round."""
    batch, _, width = x.shape
    own = sizes[axis.rank]
    x = torch.cat([p.reshape(-1, width) for p in x.split(list(sizes), 1)]) if batch > 1 else x[0]
    x = x.contiguous()
    out = x.new_empty(axis.size * batch * own, width)
    axis.all_to_all(out, x, *_rows(batch, [own] * axis.size, sizes))
    return out.view(axis.size, batch, own, width)


def _rows(batch: int, out: Sequence[int], own: Sequence[int]) -> tuple[list[int] | None, ...]:
    """The pieces' rows, where they are not all alike."""
    if len({*out, *own}) == 1:
        return None, None
    return [batch * size for size in out], [batch * size for size in own]
