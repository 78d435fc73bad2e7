"""Which dense pieces of the scores causal attention computes.

What the causal mask, a sliding window and the documents of a packed sample leave of the scores is
cut into rectangles and triangles of [queries, keys]; each is one call of a kernel
(`models/attention.py`).
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from plait.spec.sequence import Run, Shard, pieces


class Call(NamedTuple):
    """One dense piece of the scores: queries [q0, q1) of a shard, keys [k0, k1) of another.

    kind: "full"; "causal", where the i-th query sees keys up to the i-th; "anti", where it sees
        the i-th key and those after it. The triangles are square.
    """

    kind: str
    q0: int
    q1: int
    k0: int
    k1: int


@lru_cache(maxsize=4096)
def calls(
    queries: Shard, keys: Shard, documents: tuple[int, ...], window: int | None = None
) -> tuple[Call, ...]:
    """The dense pieces of causal attention between two shards of positions.

    A call counts from the beginning of its shard. Arguments as in `spec.sequence.pairs`.
    """
    ends = list(accumulate(documents, initial=0))
    held = _placed(keys, ends)
    found = [
        Call(kind, a + to, b + to, c + there, d + there)
        for document, runs in _placed(queries, ends).items()
        for run, to in runs
        for other, there in held.get(document, ())
        for kind, a, b, c, d in _between(run, other, window)
    ]
    return tuple(_joined(found))


def _placed(shard: Shard, ends: list[int]) -> dict[int, list[tuple[Run, int]]]:
    """The runs by document, each with what leads from a position to its place in the shard."""
    result: dict[int, list[tuple[Run, int]]] = {}
    place = 0
    for run in shard:
        for document, parts in pieces((run,), ends).items():
            result.setdefault(document, []).extend((part, place - run[0]) for part in parts)
        place += run[1] - run[0]
    return result


def _between(queries: Run, keys: Run, window: int | None) -> list[Call]:
    """The pieces between two runs of positions of one document, counted in positions."""
    (a, b), (c, d) = queries, keys
    w = b if window is None else window
    # Where the rows of scores change their form: the first key is reached, all are, the window
    # leaves the first one behind, and the last.
    marks = [a, *sorted(m for m in {c, d, c + w, d + w - 1} if a < m < b), b]
    found: list[Call] = []
    for x, y in pairwise(marks):
        if y <= c or x >= d + w - 1:
            continue
        if y <= min(d, c + w):  # up to the diagonal
            found += [Call("full", x, y, c, x), Call("causal", x, y, x, y)]
        elif y <= d:  # a band from the window's edge to the diagonal, w queries at a time
            for i in range(x, y, w):
                j, edge = min(i + w, y), i - w + 1
                n = min(j - i, w - 1)
                found += [
                    Call("anti", i, i + n, edge, edge + n),
                    Call("full", i, j, edge + n, i),
                    Call("causal", i, j, i, j),
                ]
        elif y <= c + w:  # all keys
            found.append(Call("full", x, y, c, d))
        else:  # from the window's edge on
            edge, n = x - w + 1, y - x
            found += [Call("anti", x, y, edge, edge + n), Call("full", x, y, edge + n, d)]
    return [call for call in found if call.q0 < call.q1 and call.k0 < call.k1]


def _joined(found: list[Call]) -> list[Call]:
    """The same pairs in fewer and larger calls."""
    while True:
        before = len(found)
        found = _join_triangles(found)
        # Rectangles: of the same queries and neighbouring keys, then the other way round.
        found = _join_full(
            found, lambda c: (c.q0, c.q1, c.k0, c.k1), lambda c, d: c._replace(k1=d.k1)
        )
        found = _join_full(
            found, lambda c: (c.k0, c.k1, c.q0, c.q1), lambda c, d: c._replace(q1=d.q1)
        )
        if len(found) == before:
            return found


def _join_triangles(found: list[Call]) -> list[Call]:
    """Two triangles along one diagonal, and the square between them: a triangle."""
    left = set(found)
    result: list[Call] = []
    triangles = [c for c in found if c.kind == "causal"]
    for call in sorted(triangles, key=lambda c: (c.k0 - c.q0, c.q0)):
        last = result[-1] if result else None
        if last and last.k0 - last.q0 == call.k0 - call.q0 and last.q1 == call.q0:
            between = Call("full", call.q0, call.q1, last.k0, last.k1)
            if between in left:
                left.remove(between)
                result[-1] = last._replace(q1=call.q1, k1=call.k1)
                continue
        result.append(call)
    return result + [c for c in found if c.kind != "causal" and c in left]


def _join_full(
    found: list[Call], order: Callable[[Call], tuple], join: Callable[[Call, Call], Call]
) -> list[Call]:
    """Rectangles that agree in the first two of `order` and follow on each other in the others."""
    result = [c for c in found if c.kind != "full"]
    others = len(result)
    for call in sorted((c for c in found if c.kind == "full"), key=order):
        if len(result) > others:
            (*same, _, end), (*mine, start, _) = order(result[-1]), order(call)
            if same == mine and end == start:
                result[-1] = join(result[-1], call)
                continue
        result.append(call)
    return result
