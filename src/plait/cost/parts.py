"""Which part of a step is which stage's."""

from typing import NamedTuple

from plait.schedules.job import table_of
from plait.spec.chunks import chunk_layers
from plait.spec.job import Job


class Part(NamedTuple):
    """A chunk on a stage: its layers, whether it embeds, whether it has the head, and how many
    micro batches pass through it there in a step."""

    chunk: int
    layers: range
    embed: bool
    head: bool
    micro_batches: int


def parts_of(job: Job) -> list[list[Part]]:
    """For each stage the chunks that it holds; without a pipeline the whole model."""
    layers, m = chunk_layers(job.model, job.layout), job.train.accumulation
    last = len(layers) - 1
    if job.layout.pp == 1:
        return [[Part(0, layers[0], True, True, m)]]
    passing: list[dict[int, int]] = [dict.fromkeys(held, 0) for held in table_of(job).held]
    for (chunk, _), rank in table_of(job).place.items():
        passing[rank][chunk] += 1
    return [
        [Part(c, layers[c], c == 0, c == last, n) for c, n in counts.items()] for counts in passing
    ]
