"""Context parallelism: plait's ring beside torch's, and plait's own ways beside each other.

    python benchmarks/context.py [--only NAME] [--pairs N] [--quick] [--json]

A step is causal attention of one sample, forward and backward, of float32. Every ratio is above 1
where the first one named is faster. torch's ring is its private template (context_parallel itself
does not run on CPU) around the same kernel, with its load balance, which is plait's head-tail.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # one thread a rank; and ranks are forked

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs
from torch.nn.functional import scaled_dot_product_attention

from plait.models.attention import attention
from plait.parallel.collectives import Axis
from plait.parallel.context import context_attention
from plait.spec.sequence import split
from sidebyside import Comparison, Step, command, measure

_ATEN = torch.ops.aten


@dataclass(frozen=True)
class Work:
    """A sample's attention, and the ranks that it is spread over."""

    ranks: int
    documents: tuple[int, ...]
    heads: int = 8
    kv_heads: int = 8
    dim: int = 64
    window: int | None = None

    @property
    def seq(self) -> int:
        return sum(self.documents)


def step_of(work: Work, attend: Callable[[Tensor, Tensor, Tensor], Tensor], rows: int) -> Step:
    """Forward and backward over random queries, keys and values, until all ranks are done."""
    shapes = [(1, rows, n, work.dim) for n in (work.heads, work.kv_heads, work.kv_heads)]
    leaves = [torch.randn(s, requires_grad=True) for s in shapes]
    grad = torch.randn(shapes[0])

    def step() -> None:
        torch.autograd.grad(attend(*leaves), leaves, grad)
        dist.barrier()

    return step


def plaits(work: Work, rank: int, balance: str, ulysses: int = 1, method: str = "ring") -> Step:
    cut = split(work.documents, work.ranks, balance, ulysses)
    if ulysses == 1:
        axes = Axis("cp", work.ranks, rank, dist.group.WORLD), Axis("ulysses")
    else:
        assert ulysses == work.ranks
        axes = Axis("cp"), Axis("ulysses", work.ranks, rank, dist.group.WORLD)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context_attention(q, k, v, *axes, [cut], work.window, method=method)

    return step_of(work, attend, cut.sizes[rank])


class _TorchRing(torch.autograd.Function):
    """torch's templates, [1, heads, S, dim], around the kernel that plait's ring uses."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def kernel(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
            return _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)

        y, lse = torchs._templated_ring_attention(
            dist.group.WORLD, 2, kernel, q, k, v, is_causal=True
        )
        ctx.save_for_backward(q, k, v, y, lse)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        def kernel(
            query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
            is_causal: bool, grad_out: Tensor,
        ) -> tuple[Tensor, ...]:  # fmt: skip
            return _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out, query, key, value, out, logsumexp, 0.0, is_causal
            )

        q, k, v, y, lse = ctx.saved_tensors
        return torchs._templated_ring_attention_backward(
            dist.group.WORLD, 2, kernel, grad, "grad_out", q, k, v, y, lse, True
        )


def torch_ring(work: Work, rank: int, rotate: str) -> Step:
    torchs.set_rotate_method(rotate)
    torchs._cp_options.enable_load_balance = True

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _TorchRing.apply(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)

    return step_of(work, attend, work.seq // work.ranks)


def one_device(work: Work, rank: int) -> Step:
    """The dense calls of a window or of documents."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, work.documents, work.window)

    return step_of(work, attend, work.seq)


def masked(work: Work, rank: int) -> Step:
    """torch's kernel with the same as a mask of [S, S]."""
    document = torch.repeat_interleave(torch.tensor(work.documents))
    back = torch.arange(work.seq)[:, None] - torch.arange(work.seq)
    mask = (document[:, None] == document) & (back >= 0) & (back < (work.window or work.seq))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        y = scaled_dot_product_attention(
            *heads_first, attn_mask=mask, enable_gqa=work.heads != work.kv_heads
        )
        return y.transpose(1, 2)

    return step_of(work, attend, work.seq)


def comparisons(quick: bool) -> list[Comparison]:
    found = []

    def add(name: str, what: str, work: Work, ours: Callable, theirs: Callable) -> None:
        sides = (partial(side, work) for side in (ours, theirs))
        found.append(Comparison(name, what, work.ranks, work.seq, *sides, None))

    for ranks in (2,) if quick else (2, 4):
        seq = 128 if quick else 4096
        whole = Work(ranks, (seq,))
        few = Work(ranks, (seq,), kv_heads=2)
        # A long document, and short ones: what lengths look like in a packed sample.
        packed = Work(ranks, (seq // 2, seq // 4, seq // 8, seq // 16, seq // 16))
        ring = partial(plaits, balance="head-tail")
        ulysses = partial(plaits, balance="contiguous", ulysses=ranks)
        gather = partial(plaits, balance="head-tail", method="all-gather")
        contiguous = partial(plaits, balance="contiguous")
        for rotate in ("alltoall", "allgather"):
            theirs = partial(torch_ring, rotate=rotate)
            add(f"ring-{rotate}-{ranks}", f"ring / torch's by {rotate}", whole, ring, theirs)
        theirs = partial(torch_ring, rotate="alltoall")
        add(f"ring-gqa-{ranks}", "the same, 4 query heads to a KV head", few, ring, theirs)
        add(f"gather-{ranks}", "all-gather / ring", whole, gather, ring)
        add(f"ulysses-{ranks}", "Ulysses / ring", whole, ulysses, ring)
        add(f"balance-{ranks}", "head-tail / contiguous", whole, ring, contiguous)
        documents = partial(plaits, balance="documents")
        add(f"packed-{ranks}", "by document / contiguous", packed, documents, contiguous)
    seq, window = (128, 16) if quick else (2048, 256)
    for name, work in {
        "window": Work(1, (seq,), window=window),
        "documents": Work(1, (seq // 4,) * 4),
    }.items():
        add(name, "dense calls / torch's SDPA with a mask", work, one_device, masked)
    return found


def main(arguments: list[str] | None = None) -> int:
    return command(__doc__, comparisons, measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
