"""Which part of a model each chunk of a pipeline is.

A chunk (a virtual stage) is a run of layers; chunks are numbered in the order of the model. Chunk
0 also has the embedding, the last one the head.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, groupby

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
    starts = accumulate(counts[:-1], initial=0)
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
    units, table = chunk_units(model, layout, chunk), _by_unit(model)
    for unit in units:
        yield from table.get(unit, ())
    if model.tied and "head" in units and "embed" not in units:
        yield replace(next(p for p in table["embed"] if p.name == TABLE), unit="head")


@lru_cache(maxsize=4)
def _by_unit(model: Model) -> dict[str, tuple[Parameter, ...]]:
    """The table of parameters, made once for all chunks of a model."""
    groups = groupby(parameters(model), key=lambda p: p.unit)
    return {unit: tuple(members) for unit, members in groups}


#: The token table, which a tied head shares.
TABLE = "embed.tokens.weight"
