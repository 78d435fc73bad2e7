"""Which layers a chunk gets so that the slowest rank has least to do."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from plait.cost.flops import layer_flops
from plait.spec.chunks import balanced
from plait.spec.layout import Layout
from plait.spec.model import Model
from plait.spec.schedule import SCHEDULES

#: With more chunks than this the search takes too long.
MOST_CHUNKS = 256


def by_cost(model: Model, layout: Layout, seq_len: int) -> tuple[int, ...]:
    """Layers of each of the pp * vpp chunks, by what they cost (`cost.flops`, head included).

    Where a rank has one chunk, or all layers are alike, no partition has a faster slowest rank.
    Otherwise none is that has one layer less in a chunk of the slowest rank and one more in any
    other. A chunk has a layer at least; the first and the last may have none.
    """
    chunks = layout.pp * layout.vpp
    if model.layers < chunks - 2:
        return balanced(model.layers, chunks)  # there is no partition
    layers, head = layer_flops(model, layout, seq_len)
    costs = [sum(flops) for flops in layers]
    ranks = placement(layout)
    best = _one_each(costs, sum(head), chunks)
    if chunks > MOST_CHUNKS:
        return best  # the best of one chunk a rank
    sums = [0, *accumulate(costs)]

    def loads(counts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Costs of the chunks and of the ranks."""
        ends = [0, *accumulate(counts)]
        chunks = [sums[b] - sums[a] for a, b in pairwise(ends)]
        chunks[-1] += sum(head)
        return chunks, [sum(chunks[c] for c in held) for held in ranks]

    def weight(counts: Sequence[int]) -> list[list[int]]:
        """The costs of the ranks, the slowest first, then those of the chunks."""
        return [sorted(costs, reverse=True) for costs in reversed(loads(counts))]

    while True:
        times = loads(best)[1]
        moved = min(_moves(best, ranks[times.index(max(times))]), key=weight, default=best)
        if weight(moved) >= weight(best):
            return best
        best = moved


def placement(layout: Layout) -> list[tuple[int, ...]]:
    """The chunks of each rank; of a table in a file as a loop would place them."""
    p, v = layout.pp, layout.vpp
    schedule = SCHEDULES.get(layout.schedule.partition(":")[0])
    if schedule is not None and schedule.placement == "v" and v == 2:
        return [(r, 2 * p - 1 - r) for r in range(p)]
    if schedule is not None and schedule.placement == "both" and v == 1:
        return [(r, p - 1 - r) for r in range(p)]
    return [tuple(range(r, p * v, p)) for r in range(p)]


def _one_each(costs: Sequence[int], head: int, chunks: int) -> tuple[int, ...]:
    """The partition whose largest chunk is least: the least bound that can be kept, by halving."""
    low, high = 0, sum(costs) + head
    while low < high:
        bound = (low + high) // 2
        if _fill(costs, head, chunks, bound) is None:
            low = bound + 1
        else:
            high = bound
    filled = _fill(costs, head, chunks, low)
    assert filled is not None
    return filled


def _fill(costs: Sequence[int], head: int, chunks: int, bound: int) -> tuple[int, ...] | None:
    """Chunk after chunk as many layers as the bound and the chunks to come allow; None where the
    bound cannot be kept."""
    counts, at = [], 0
    for chunk in range(chunks):
        last = chunk == chunks - 1
        needed = max(chunks - 2 - chunk, 0)  # by the chunks between this one and the last
        load, first = head if last else 0, at
        while at < len(costs) - needed and load + costs[at] <= bound:
            load += costs[at]
            at += 1
        if load > bound or (at == first and 0 < chunk < chunks - 1):
            return None
        counts.append(at - first)
    return tuple(counts) if at == len(costs) else None


def _moves(counts: tuple[int, ...], sources: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every partition with one layer less in one of the sources and one more elsewhere."""
    for source in sources:
        ends = source in (0, len(counts) - 1)
        for target in range(len(counts)) if counts[source] > (0 if ends else 1) else ():
            if target != source:
                moved = list(counts)
                moved[source] -= 1
                moved[target] += 1
                yield tuple(moved)
