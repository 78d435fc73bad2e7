"""How fast plait trains, side by side with what people use without it.

    python benchmarks/train.py [--only NAME] [--pairs N] [--quick] [--json]

Each line is a comparison in one run on this machine; see docs/benchmarks.md.
"""

import os
import sys
import warnings
from functools import partial

os.environ["OMP_NUM_THREADS"] = "1"  # one thread a rank; and ranks are forked


import contenders as who
from sidebyside import Comparison, command, measure


def comparisons(quick: bool) -> list[Comparison]:
    """Everything that is compared; `quick`: the same on models of no size."""

    def work(width: int, layers: int, samples: int, seq: int, vocab: int = 4096) -> who.Work:
        return who.work(64, 1, 2, 16, 64) if quick else who.work(width, layers, samples, seq, vocab)

    result = []

    def add(
        name: str, what: str, ranks: int, w: who.Work, ours: partial, theirs: partial,
        goal: float | None, data: int = 1,
    ) -> None:  # fmt: skip
        result.append(
            Comparison(
                name, what, ranks, w.tokens * data, partial(ours, w), partial(theirs, w), goal
            )
        )

    small, wide = work(256, 4, 8, 128), work(1024, 2, 2, 128)
    one = partial(who.plait, zero=0)
    peer = partial(who.hugging_face)
    add("one-256", "one rank / transformers, width 256", 1, small, one, peer, 1.05)
    add("one-1024", "one rank / transformers, width 1024", 1, wide, one, peer, 1.0)

    ddp = partial(who.plain, wrap="ddp")
    peer = partial(who.hugging_face, ddp=True)
    add("dp", "dp 2 / DDP of the same module", 2, small, one, ddp, 1.0, 2)
    add("dp-hf", "dp 2 / DDP of transformers' model", 2, small, one, peer, 1.0, 2)

    blocks = ((64, 2, 32, 2.0), (512, 2, 128, 1.2), (1024, 1, 256, 1.05))
    for rows, mark in ((False, ""), (True, "-sp")):
        for width, samples, seq, goal in blocks:
            block = partial(who.plait_block, sequence_parallel=rows)
            peer = partial(who.dtensor_block, sequence_parallel=rows)
            what = f"a layer, tp 2{', sequence parallel' if rows else ''} / DTensor, width {width}"
            w = work(width, 1, samples, seq)
            add(f"block{mark}-{width}", what, 2, w, block, peer, goal)
    whole = partial(who.plait, tp=2)
    add("tp", "whole step, tp 2 / DTensor, width 256", 2, small, whole, partial(who.dtensor), 1.0)

    zero3, fsdp = partial(who.plait, zero=3), partial(who.plain, wrap="fsdp")
    half = work(256, 4, 4, 128)
    add("zero3", "zero 3 over 2 / fully_shard", 2, small, zero3, fsdp, 0.97, 2)
    add("zero3-4", "zero 3 over 4 / fully_shard", 4, half, zero3, fsdp, 0.97, 4)
    add("zero3-zero0", "zero 3 / zero 0, over 2", 2, small, zero3, one, None, 2)
    return result


def main(arguments: list[str] | None = None) -> int:
    warnings.simplefilter("ignore")
    return command(__doc__, comparisons, measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
