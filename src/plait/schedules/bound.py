"""What no schedule can be faster than: a lower bound of the makespan.

Written for one rank r; the bound is the largest over all ranks and all of the arguments below. The
route of a micro batch is the rank of each chunk. F, I and W of chunk c take F(c), I(c), W(c), and
n(c) micro batches pass c on this rank; `lag` is the transfer between two chunks on different ranks.

    head(c)   sum of F(k) + lag over the chunks before c: no F of c begins earlier
    tail(c)   sum of lag + I(k) over the chunks k < c, and W(0): what is left of a micro batch after
              its I of c, besides its W of c
    trip(c)   from the start of F of c to the end of I of c with no waiting: F, I and the lags of c
              and all later chunks
    work      sum of n(c) (F(c) + I(c) + W(c))
    K         chunks that the rank may hold: cap / share, or all that pass it if those are fewer

chain: one micro batch alone: trip(0) + W(0).

begin: the rank has been idle for `begin` in all when its first I starts or, at the latest, before
it ends. It is idle until the smallest head(c). Its first I starts at the earliest at
e = head(c) + trip(c) - I(c) (the smallest over c), and what it did before is F alone, at most K of
them, for none is released; so it is also idle for e - (the K longest F).
    makespan >= begin + work

before the end: when the last I of the rank ends, at most K W are left, and what follows
is `tail` of that micro batch.
    makespan >= begin + work - (the K longest W) + the smallest tail(c)

after the last F: when it ends the rank holds at most K chunks, whose I and W are all that it still
has to do, but the I of that last F comes trip(c) - F(c) later, and then its W.
    makespan >= begin + work - (the K longest I + W) + the smallest trip(c) - F(c) + W(c)
(`begin` is over by then if K is less than what passes the rank: then the first I comes before the
last F. Otherwise the smallest head(c) stands in its place.)

area: a chunk is held for trip(c) + W(c) at least, and never more than K are. Nor can K be from the
start: the i-th F starts i times the shortest F after the first, and likewise the last chunks are
released one W (the shortest) apart. These two losses are at different times, for the rank's work is
longer than both together.
    K (makespan - head) >= sum of n(c) (trip(c) + W(c)) + (K (K - 1) / 2) (shortest F + shortest W)
That holds for anything above K too; it is the strongest at K or at all that pass the rank.

slots: what is held never overlaps K times over, so it fits into K slots one after the other, and of
any N chunks some slot has N / K, rounded up. For the N that are held longest, at least h each:
    makespan >= head + ceil(N / K) h
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

from plait.schedules.simulate import Times
from plait.schedules.table import Table


def routes(table: Table) -> dict[tuple[int, ...], int]:
    """The ranks of the chunks that a micro batch passes -> how many micro batches go that way."""
    place, chunks = table.place, range(table.chunks)
    return dict(Counter(tuple(place[c, j] for c in chunks) for j in range(table.micro_batches)))


def lower_bound(ways: Mapping[tuple[int, ...], int], times: Times, cap: float = inf) -> float:
    """The least makespan that any order of the actions can have, in the unit of `times`.

    Args:
        ways: see `routes`.
        cap: the most that a rank may hold, in units of its share of a micro batch.
    """
    visits = [visit for homes, many in ways.items() for visit in _visits(homes, many, times)]
    pp = 1 + max(v.rank for v in visits)
    share = pp / len(times.forward)
    chain = max(v.trip for v in visits) + times.weight_grad[0]
    per_rank = ([v for v in visits if v.rank == rank] for rank in range(pp))
    return max(chain, *(_rank_bound(mine, cap / share) for mine in per_rank if mine))


class _Visit(NamedTuple):
    """Micro batches that pass a chunk on a rank; see the top of the file."""

    rank: int
    many: int
    f: float
    i: float
    w: float
    head: float
    tail: float
    trip: float


def _visits(homes: Sequence[int], many: int, times: Times) -> Iterator[_Visit]:
    chunks = range(len(homes))
    f, i, w = times.forward, times.input_grad, times.weight_grad
    lags = [times.transfer * (homes[c] != homes[c - 1]) for c in chunks[1:]]
    for c in chunks:
        yield _Visit(
            rank=homes[c],
            many=many,
            f=f[c],
            i=i[c],
            w=w[c],
            head=sum(f[:c]) + sum(lags[:c]),
            tail=sum(i[:c]) + sum(lags[:c]) + w[0],
            trip=sum(f[c:]) + sum(i[c:]) + 2 * sum(lags[c:]),
        )


def _rank_bound(mine: list[_Visit], room: float) -> float:
    passes = sum(v.many for v in mine)
    k = int(min(room + 1e-9, passes))
    if k < 1:
        return inf
    work = sum(v.many * (v.f + v.i + v.w) for v in mine)
    head = min(v.head for v in mine)
    first = min(v.head + v.trip - v.i for v in mine)
    begin = max(head, first - _longest(k, ((v.f, v.many) for v in mine)))
    end = min(v.tail for v in mine) - _longest(k, ((v.w, v.many) for v in mine))
    last = min(v.trip - v.f + v.w for v in mine) - _longest(k, ((v.i + v.w, v.many) for v in mine))
    held = sum(v.many * (v.trip + v.w) for v in mine)
    holds = sorted(((v.trip + v.w, v.many) for v in mine), reverse=True)
    longest = zip((hold for hold, _ in holds), accumulate(many for _, many in holds), strict=True)
    ramp = min(v.f for v in mine) + min(v.w for v in mine)
    return max(
        begin + work,
        begin + work + end,
        (begin if k < passes else head) + work + last,
        *(head + held / n + ramp * (n - 1) / 2 for n in (k, passes)),
        *(head + -(-many // k) * hold for hold, many in longest),
    )


def _longest(k: int, lengths: Iterator[tuple[float, int]]) -> float:
    """The sum of the k longest of (length, how many of them)."""
    total = 0.0
    for length, many in sorted(lengths, reverse=True):
        total += length * min(k, many)
        k -= min(k, many)
    return total
