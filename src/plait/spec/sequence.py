"""Which positions of a sample each context-parallel rank holds, and how much attention that is.

A causal query at position p sees p + 1 keys, so ranks that hold equal pieces have unequal work.
Three ways to cut a sample, all of which give each rank S // cp of its S positions, or one more:

    contiguous   rank r has the r-th piece of cp
    head-tail    2 cp pieces, rank r has the r-th from the front and the r-th from the back: equal
                 causal work ("zig-zag", Brandon et al. 2311.09431 name the problem; Llama 3,
                 2407.21783, section 3.3.2)
    documents    head-tail within every document of a packed sample, for there a query sees no
                 further back than the start of its document
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

from plait.spec.layout import Layout

Run = tuple[int, int]  # positions from the first up to, but without, the second
Shard = tuple[Run, ...]  # what one rank holds, in the order in which it holds them

BALANCES = ("contiguous", "head-tail", "documents")


@dataclass(frozen=True)
class Split:
    """A sample cut over the cp ranks.

    Attributes:
        documents: lengths of the documents that are packed into the sample, in order.
        shards: what each rank holds.
    """

    documents: tuple[int, ...]
    shards: tuple[Shard, ...]

    @property
    def seq(self) -> int:
        return sum(self.documents)

    @property
    def cp(self) -> int:
        return len(self.shards)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of positions on each rank."""
        return tuple(sum(b - a for a, b in shard) for shard in self.shards)

    def positions(self, rank: int) -> list[int]:
        """The positions of a rank, in the order in which it holds them."""
        return [p for a, b in self.shards[rank] for p in range(a, b)]

    @cached_property
    def order(self) -> list[int]:
        """The sample's position at each place of the ranks' shards laid end to end."""
        return [p for rank in range(self.cp) for p in self.positions(rank)]

    @cached_property
    def places(self) -> list[int]:
        """The other way round: the place of each position among the shards laid end to end."""
        places = [0] * self.seq
        for place, position in enumerate(self.order):
            places[position] = place
        return places

    def joined(self, ulysses: int) -> "Split":
        """What `ulysses` neighbouring ranks hold together, the shards of the first rank first."""
        assert self.cp % ulysses == 0, (self.cp, ulysses)
        groups = (self.shards[i : i + ulysses] for i in range(0, self.cp, ulysses))
        return Split(self.documents, tuple(_coalesced(r for s in g for r in s) for g in groups))


@lru_cache(maxsize=1024)
def split(
    documents: tuple[int, ...], cp: int, balance: str = "head-tail", ulysses: int = 1
) -> Split:
    """Cuts a sample over cp ranks.

    Args:
        documents: lengths of its documents; (S,) where it is one text.
        balance: one of BALANCES.
        ulysses: so many neighbouring ranks exchange positions for heads, each of their groups is
            a rank of the ring. Balance is between the groups; within, each has a contiguous part
            of the group's positions, so that together they are in order.
    """
    assert balance in BALANCES, balance
    assert cp % ulysses == 0, (cp, ulysses)
    ring, seq = cp // ulysses, sum(documents)
    if balance == "contiguous":
        ends = accumulate(((seq + r) // ring for r in range(ring)), initial=0)
        whole = [_coalesced([run]) for run in pairwise(ends)]
    else:
        whole = _head_tail(documents if balance == "documents" else (seq,), ring)
    # A group has (S + g) // ring positions, its part i (those + i) // ulysses: altogether
    # (S + g + ring * i) // cp, where g + ring * i takes every value below cp once.
    return Split(documents, tuple(p for shard in whole for p in _parts(shard, ulysses)))


def sample_split(layout: Layout, documents: tuple[int, ...]) -> Split:
    """How a sample lies on the cp ranks: balanced, document by document, where there is a ring;
    documents as in `split`."""
    balance = "contiguous" if layout.ulysses == layout.cp else "documents"
    return split(documents, layout.cp, balance, layout.ulysses)


def _head_tail(documents: Sequence[int], ranks: int) -> list[Shard]:
    """Each document in 2 * ranks pieces; no padding. What one document leaves over is made up for
    in the next: after every document rank r has had (positions so far + r) // ranks."""
    shards: list[list[Run]] = [[] for _ in range(ranks)]
    start = 0
    for length in documents:
        stop = start + length
        shares = [(stop + r) // ranks - (start + r) // ranks for r in range(ranks)]
        heads = [share // 2 for share in shares]
        pieces = heads + [s - h for s, h in zip(shares, heads, strict=True)][::-1]
        ends = list(accumulate(pieces, initial=start))
        for r in range(ranks):
            mirror = 2 * ranks - 1 - r
            shards[r] += [(ends[r], ends[r + 1]), (ends[mirror], ends[mirror + 1])]
        start = stop
    return [_coalesced(shard) for shard in shards]


def _coalesced(runs: Sequence[Run] | Iterator[Run]) -> Shard:
    """Without empty runs, and with those that follow on each other made one."""
    result: list[Run] = []
    for a, b in runs:
        if a == b:
            continue
        if result and result[-1][1] == a:
            result[-1] = result[-1][0], b
        else:
            result.append((a, b))
    return tuple(result)


def _parts(shard: Shard, parts: int) -> list[Shard]:
    """A shard in consecutive parts whose sizes differ by one at most."""
    if parts == 1:
        return [shard]
    total = sum(b - a for a, b in shard)
    cuts = accumulate(((total + i) // parts for i in range(parts)), initial=0)
    offsets = list(accumulate((b - a for a, b in shard), initial=0))
    result = []
    for low, high in pairwise(cuts):
        result.append(
            _coalesced(
                (a + max(low - at, 0), a + min(high - at, b - a))
                for (a, b), at in zip(shard, offsets, strict=False)
                if low < at + b - a and at < high
            )
        )
    return result


# ------------------------------------------------------------------------------------------
# How much it is


def pairs(queries: Shard, keys: Shard, documents: Sequence[int], window: int | None = None) -> int:
    """Number of (query, key) pairs that causal attention within documents looks at.

    window: a query sees itself and the window - 1 positions before it; None: all before it.
    """
    ends = list(accumulate(documents, initial=0))
    apart = pieces(keys, ends)
    total = 0
    for a, b in (run for runs in pieces(queries, ends).values() for run in runs):
        for c, d in apart.get(bisect_right(ends, a) - 1, ()):
            total += _at_least(a, b, c, d, 0)
            total -= 0 if window is None else _at_least(a, b, c, d, window)
    return total


def pieces(shard: Shard, ends: Sequence[int]) -> dict[int, list[Run]]:
    """A shard's runs, cut where documents end, by number of the document; ends: 0, then each
    document's end."""
    result: dict[int, list[Run]] = {}
    for a, b in shard:
        while a < b:
            document = bisect_right(ends, a) - 1
            stop = min(b, ends[document + 1])
            result.setdefault(document, []).append((a, stop))
            a = stop
    return result


def _at_least(a: int, b: int, c: int, d: int, back: int) -> int:
    """Pairs of a query in [a, b) and a key in [c, d) that is at least `back` before it."""

    def below(n: int) -> int:
        return n * (n + 1) // 2 if n > 0 else 0

    return below(b - back - c) - below(a - back - c) - below(b - back - d) + below(a - back - d)


@lru_cache(maxsize=1024)
def work(split: Split, window: int | None = None) -> list[list[int]]:
    """work[rank][owner]: the pairs of that rank's queries with the keys of that owner."""
    return [[pairs(q, k, split.documents, window) for k in split.shards] for q in split.shards]


def ring_steps(split: Split, window: int | None = None) -> int:
    """How many blocks a rank of a ring looks at, its own included: KV travels one rank less far.

    In step s rank r has the block of rank r - s; the ring ends after the last step in which any
    rank sees anything.
    """
    table = work(split, window)
    return 1 + max(s for s in range(split.cp) if s == 0 or any(_of_step(table, s)))


@lru_cache(maxsize=64)
def sample_steps(layout: Layout, seq: int, window: int | None) -> int:
    """`ring_steps` of a sample of one text. However many documents a sample holds, the ring goes as
    far: what is sent does not depend on the data."""
    return ring_steps(sample_split(layout, (seq,)).joined(layout.ulysses), window)


def imbalance(split: Split, window: int | None = None) -> float:
    """Most work of a rank over the mean; 1 is perfect balance."""
    return _over_mean(split, window, lambda w: max(map(sum, w)))


def ring_imbalance(split: Split, window: int | None = None) -> float:
    """The same for a ring whose ranks go in step: the most work of each step, summed, over the
    mean. Contiguous pieces of a long sample: (2 cp - 1) / cp."""
    return _over_mean(split, window, lambda w: sum(max(_of_step(w, s)) for s in range(len(w))))


def _over_mean(split: Split, window: int | None, most: Callable[[list[list[int]]], int]) -> float:
    table = work(split, window)
    total = sum(map(sum, table))
    return most(table) * split.cp / total if total else 1.0


def _of_step(table: list[list[int]], step: int) -> list[int]:
    return [row[rank - step] for rank, row in enumerate(table)]
