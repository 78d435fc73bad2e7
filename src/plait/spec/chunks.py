"""Which part of a model each chunk of a pipeline is.

A chunk (a virtual stage) is a run of layers; chunks are numbered in the order of the model. Chunk
0 also has the embedding, the last one the head.
"""

from collections.abc import Iterator
from dataclasses import replace

from plait.spec.layout import Layout
from plait.spec.model import Model
from plait.spec.parameters import Parameter, parameters


def balanced(layers: int, chunks: int) -> tuple[int, ...]:
    """Layers of each chunk, as equal as can be: what is left over goes to the middle ones, for the
    first also has the embedding and the last the head."""
    least, more = divmod(layers, chunks)
    first = (chunks - more) // 2
    return tuple(least + (first <= i < first + more) for i in range(chunks))


def chunk_layers(model: Model, layout: Layout) -> tuple[range, ...]:
    """The layers of each of the pp * vpp chunks; without a pipeline there is one."""
    if layout.pp == 1:
        return (range(model.layers),)
    counts = layout.stages or balanced(model.layers, layout.pp * layout.vpp)
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return tuple(range(a, a + n) for a, n in zip(starts, counts, strict=True))


def chunk_units(model: Model, layout: Layout, chunk: int) -> tuple[str, ...]:
    """The units (see `spec.parameters`) of a chunk."""
    layers = chunk_layers(model, layout)
    units = [f"layers.{i}" for i in layers[chunk]]
    first = ["embed"] if chunk == 0 else []
    last = ["head"] if chunk == len(layers) - 1 else []
    return (*first, *units, *last)


def chunk_parameters(model: Model, layout: Layout, chunk: int) -> Iterator[Parameter]:
    """The parameters of a chunk in the order of the forward pass.

    A tied table is in the first chunk and, where that is another one, in the last too: under the
    same name, in its unit "head". The two copies agree on one gradient (`parallel/pipeline.py`).
    """
    units = set(chunk_units(model, layout, chunk))
    for p in parameters(model):
        if p.unit in units:
            yield p
    if model.tied and "head" in units and "embed" not in units:
        table = next(p for p in parameters(model) if p.name == TABLE)
        yield replace(table, unit="head")


#: The token table, which a tied head shares.
TABLE = "embed.tokens.weight"
