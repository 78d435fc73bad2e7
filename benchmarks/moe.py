"""Mixtures of experts: grouped experts beside a loop, experts on ranks of their own beside copies.

    python benchmarks/moe.py [--only NAME] [--pairs N] [--quick] [--json]

A step is forward and backward of one mixture (or of a training step, where ranks are more than
one). Every ratio is above 1 where the first one named is faster. The loop is what `transformers`
does: one expert after the other, picking its tokens out by a mask, adding its results in.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

os.environ["OMP_NUM_THREADS"] = "1"  # one thread a rank; and ranks are forked

import torch
import torch.distributed as dist
from torch import Tensor

from plait.models import layers as L
from plait.models.moe import Experts, at_home
from plait.parallel.mesh import make_mesh
from plait.spec.job import Job, Train
from plait.spec.layout import Layout
from plait.spec.model import Model, MoE
from plait.train.program import MicroBatch, Program
from sidebyside import Comparison, Step, command, measure


def mixture(experts: int, topk: int, hidden: int, ffn: int) -> Model:
    """A model with nothing but mixtures in it that is worth measuring."""
    return Model.of(
        "moe",
        layers=2,
        hidden=hidden,
        heads=4,
        vocab=256,
        ffn=ffn,
        moe=MoE(experts, topk, ffn),
    )


def loop(experts: Experts, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """`models.moe.at_home`, expert by expert."""
    y = torch.zeros_like(x)
    for e in range(len(experts.up.weight)):
        token, place = torch.where(index == e)
        rows = x[token]
        inner = L.gated(
            experts.kind, rows @ experts.gate.weight[e].t(), rows @ experts.up.weight[e].t()
        )
        part = inner @ experts.down.weight[e].t()
        y = y.index_add(0, token, part * weight[token, place, None].to(part.dtype))
    return y


def experts_step(model: Model, tokens: int, dtype: torch.dtype, way: Callable, rank: int) -> Step:
    """Forward and backward of the experts of one mixture, on one device."""
    generator = torch.Generator().manual_seed(0)
    experts = Experts(model).to(dtype)
    x = torch.randn(tokens, model.hidden, generator=generator).to(dtype).requires_grad_()
    scores = torch.randn(tokens, model.moe.experts, generator=generator)
    weight, index = scores.softmax(1).topk(model.moe.topk)
    grad = torch.randn(tokens, model.hidden, generator=generator).to(dtype)

    def step() -> None:
        y = way(experts, x, index, weight)
        torch.autograd.grad(y, [x, *experts.parameters()], grad)

    return step


def training_step(model: Model, batch: int, seq: int, fields: dict, ranks: int, rank: int) -> Step:
    """A whole step of training on some ranks."""
    layout = Layout.fill(ranks, **fields)
    layout = replace(layout, micro_batch=batch // layout.dp)
    job = Job(model, layout, Train(seq_len=seq, global_batch=batch, accumulation=1))
    job = replace(job, train=replace(job.train, dtype="float32"))
    program = Program(job, make_mesh(layout, model, rank))
    program.initialize()
    generator = torch.Generator().manual_seed(rank // layout.tp)
    tokens = torch.randint(256, (layout.micro_batch, seq + 1), generator=generator)
    index = torch.arange(layout.micro_batch)
    micro = MicroBatch(tokens[:, :-1], tokens[:, 1:].contiguous(), index)
    number = iter(range(10**6))

    def step() -> None:
        program.step([micro], next(number))
        dist.barrier()

    return step


def comparisons(quick: bool) -> list[Comparison]:
    found = []

    def add(
        name: str, what: str, ranks: int, tokens: int, ours: Callable, theirs: Callable
    ) -> None:
        found.append(Comparison(name, what, ranks, tokens, ours, theirs, None))

    tokens, hidden, ffn = (64, 32, 32) if quick else (2048, 512, 256)
    for experts, topk in ((8, 2), (64, 6)):
        model = mixture(experts, topk, hidden, ffn)
        for dtype in (torch.float32, torch.bfloat16):
            word = str(dtype).removeprefix("torch.")
            sides = (partial(experts_step, model, tokens, dtype, way) for way in (at_home, loop))
            what = f"grouped / a loop, {experts} experts, top {topk}, {word}"
            add(f"grouped-{experts}-{word}", what, 1, tokens, *sides)
    batch, seq = (2, 32) if quick else (4, 256)
    for ranks in (2,) if quick else (2, 4):
        model = mixture(16, 2, hidden, ffn)
        for name, what, ours, theirs in (
            ("ep", "experts on their own ranks / copies, ZeRO-1", {"ep": ranks}, {}),
            ("ep-zero3", "the same, ZeRO-3", {"ep": ranks, "zero": 3}, {"zero": 3}),
            ("etp", "experts whole / cut, under tensor parallelism",
             {"tp": ranks, "ep": ranks}, {"tp": ranks, "etp": ranks}),
        ):  # fmt: skip
            sides = (
                partial(training_step, model, batch, seq, side, ranks) for side in (ours, theirs)
            )
            add(f"{name}-{ranks}", what, ranks, batch * seq, *sides)
    return found


def main(arguments: list[str] | None = None) -> int:
    return command(__doc__, comparisons, measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
