"""Which part of a step is which stage's."""

from collections import Counter
from typing import NamedTuple

from plait.schedules.job import table_of
from plait.spec.chunks import chunk_layers
from plait.spec.job import Job


class Part(NamedTuple):
    """A chunk on a stage: its layers, whether it embeds, whether it has the head, how many micro
    batches pass through it there in a step, and of how many weight gradients are put off."""

    chunk: int
    layers: range
    embed: bool
    head: bool
    micro_batches: int
    put_off: int = 0


def parts_of(job: Job) -> list[list[Part]]:
    """For each stage the chunks that it holds; without a pipeline the whole model."""
    layers, m = chunk_layers(job.model, job.layout), job.train.accumulation
    last = len(layers) - 1
    if job.layout.pp == 1:
        return [[Part(0, layers[0], True, True, m)]]
    table = table_of(job)
    counts = [Counter((a.kind, a.chunk) for a in actions) for actions in table.ranks]
    return [
        [Part(c, layers[c], c == 0, c == last, n["F", c], n["W", c]) for c in held]
        for held, n in zip(table.held, counts, strict=True)
    ]
