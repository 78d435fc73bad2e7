"""The order of an evaluation: forward only, over the ranks as a table has placed the chunks."""

from itertools import chain, zip_longest

from plait.schedules.table import Action, Table


def forward_only(table: Table, micro_batches: int) -> Table:
    """Any number of micro batches through the chunks where `table` has them.

    As many micro batches as ranks go through a rank's first chunk, then the same through its
    next: no rank waits longer than for the first, and no more than these are between two chunks.
    Where there are two directions, every other micro batch goes each way. All ranks follow one
    order of everything, so nothing waits in a circle.
    """
    pp, chunks = len(table.ranks), table.chunks
    ways = [[table.place[c, i] for c in range(chunks)] for i in (0, table.micro_batches - 1)]
    half = micro_batches if ways[0] == ways[1] else (micro_batches + 1) // 2
    there, back = range(half), range(half, micro_batches)
    micros = [i for i in chain(*zip_longest(there, back)) if i is not None]
    ranks: list[list[Action]] = [[] for _ in range(pp)]
    for first in range(0, micro_batches, pp):
        for lap in range(0, chunks, pp):
            for i in micros[first : first + pp]:
                for c in range(lap, min(lap + pp, chunks)):
                    ranks[ways[i >= half][c]].append(Action("F", c, i))
    return Table(table.name, tuple(map(tuple, ranks)))
