"""Schedules made for given times and a memory cap, one action after the other.

The zero-bubble heuristic (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section
3.1) in the form of a list scheduler: whenever a rank is free it takes an I or an F whose input is
there, as far as the cap allows it, and does a W where it would otherwise wait. Which of them it
takes when there is a choice is for three yes/no tie-breaks; all eight combinations are tried. Of
the Fs of two chunks it takes the later chunk's, of the Is the earlier chunk's: both are nearer to
their end.

A rank that begins every F that it can has no room left for W that wait for an idle moment. So the
micro batches between F and I of a chunk are limited too, to some multiples of what a steady flow
needs (with one chunk a rank, F = I = W and no transfer: the p - r of 1F1B; twice that: ZB-H2).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import product
from math import ceil, inf
from typing import NamedTuple

from plait.schedules.bound import lower_bound
from plait.schedules.simulate import Times, simulate
from plait.schedules.table import Action, Table
from plait.spec.findings import UserError, error

#: In units of what a steady flow needs; see `_in_flight`.
FLOWS = (1.0, 1.5, 2.0, 0.75)


class TieBreaks(NamedTuple):
    """What a rank prefers.

    Attributes:
        backward_first: of an I and an F that are both ready it takes the I.
        patient: it begins no F that would still run when an I is known to be ready.
        fill: it does a W even where the next F or I will have to wait for the end of it.
    """

    backward_first: bool
    patient: bool
    fill: bool


#: All eight, those first that win more often.
TIE_BREAKS = tuple(TieBreaks(not f, p, f2) for p, f, f2 in product((False, True), repeat=3))


def zb_auto(
    pp: int, micro_batches: int, times: Times | None = None, cap: float | None = None
) -> Table:
    """The zero-bubble heuristic: one chunk a rank, the best of the greedy tables.

    Args:
        times: of the chunks; None: F = I = W = 1, messages take no time.
        cap: the most micro batches that a rank may hold; None: pp, what 1F1B holds (the paper's
            ZB-1p; 2 pp - 1 is its ZB-2p).

    Raises:
        UserError: the cap is below 1.
    """
    times = times or Times.even((pp, pp))
    cap = pp if cap is None else cap
    goal = lower_bound({tuple(range(pp)): micro_batches}, times, cap) * (1 + 1e-9)
    best, least = None, inf
    for table in greedy_tables("zb-auto", range(pp), micro_batches, times, cap):
        makespan = simulate(table, times).makespan
        if best is None or makespan < least:
            best, least = table, makespan
        if least <= goal:
            break
    return best


def greedy_tables(
    name: str, homes: Sequence[int], micro_batches: int, times: Times, cap: float
) -> Iterator[Table]:
    """A table for each combination of tie-breaks and limits.

    Args:
        homes: the rank of each chunk; each rank has as many chunks.
        cap: the most that a rank may hold, in units of its share of a micro batch.

    Raises:
        UserError: the cap is below 1: a rank holds all its chunks of a micro batch at once.
    """
    if cap < 1:
        raise UserError([error("cap", cap, "a rank holds at least one micro batch", 1)])
    for flow, tie in product(FLOWS, TIE_BREAKS):
        limit = _in_flight(homes, times, flow)
        yield Table(name, _Greedy(homes, micro_batches, times, cap, limit, tie).ranks())


class _Greedy:
    """The state of one run: time passes from event to event (a rank is free, a message is there).

    That the cap never makes ranks wait in a circle: a rank begins an F only if its micro batches
    can still end one after the other, the oldest first: there is room for what the oldest still has
    to begin, with what it then releases for what the next has to begin, and so on (Dijkstra's
    banker). So the oldest micro batch of all can always go on, on every rank.
    """

    def __init__(
        self, homes: Sequence[int], micro_batches: int, times: Times, cap: float,
        limit: Sequence[int], tie: TieBreaks,
    ):  # fmt: skip
        pp, chunks = 1 + max(homes), len(homes)
        self.homes, self.times, self.tie, self.many = homes, times, tie, micro_batches
        self.mine = [[c for c in range(chunks) if homes[c] == r] for r in range(pp)]
        self.vpp = chunks // pp
        self.room = [min(cap, micro_batches) * self.vpp + 1e-9] * pp  # chunks
        self.free = [0.0] * pp  # when a rank is free
        # arrivals[kind][chunk][micro]: when its input is there, as far as that is known
        self.arrivals = {kind: [[inf] * (micro_batches + 1) for _ in homes] for kind in ("F", "I")}
        self.arrivals["F"][0][:micro_batches] = [0.0] * micro_batches
        self.next = {kind: [0] * chunks for kind in ("F", "I")}
        self.pending = [deque() for _ in range(pp)]  # W of a rank: (chunk, micro)
        self.limit = limit
        self.begun = [[0] * (micro_batches + 1) for _ in range(pp)]  # Fs of a micro batch
        self.ended = [[0] * (micro_batches + 1) for _ in range(pp)]  # Ws
        self.oldest = [0] * pp
        self.events = [(0.0, r) for r in range(pp)]
        self.programs: list[list[Action]] = [[] for _ in range(pp)]

    def ranks(self) -> tuple[tuple[Action, ...], ...]:
        """What each rank does."""
        events, free = self.events, self.free
        while events:
            now, rank = heappop(events)
            if free[rank] <= now:
                choice = self._choose(rank, now)
                if choice is not None:
                    self._do(rank, now, *choice)
        assert all(len(p) == 3 * self.vpp * self.many for p in self.programs), "a greedy deadlock"
        return tuple(map(tuple, self.programs))

    def _choose(self, rank: int, now: float) -> tuple[str, int, int] | None:
        """What a free rank does now; None: it waits for the next event."""
        tie, mine = self.tie, self.mine[rank]
        i_at, i = self._first("I", mine, now)
        f_at, f = self._first("F", mine[::-1], now)
        ready = [("I", i) if i_at <= now else None, ("F", f) if f_at <= now else None]
        if ready[1] and tie.patient and now < i_at < now + self.times.forward[f[0]]:
            ready[1] = None
        first = next((a for a in ready[:: 1 if tie.backward_first else -1] if a), None)
        if first:
            return first[0], *first[1]
        if self.pending[rank]:
            chunk, micro = self.pending[rank][0]
            gap = min(i_at, f_at) - now
            if tie.fill or gap >= self.times.weight_grad[chunk]:
                return "W", chunk, micro
        return None

    def _first(
        self, kind: str, chunks: Sequence[int], now: float
    ) -> tuple[float, tuple[int, int] | None]:
        """The first of the chunks that is ready, else the one that is next known to be."""
        best, choice = inf, None
        arrivals, next_ = self.arrivals[kind], self.next[kind]
        for c in chunks:
            at = arrivals[c][next_[c]]
            if at < best and (kind == "I" or self._fits(c, next_[c])):
                best, choice = at, (c, next_[c])
                if at <= now:
                    break
        return best, choice

    def _fits(self, chunk: int, micro: int) -> bool:
        """Whether there is room for one chunk more; see the class."""
        rank = self.homes[chunk]
        if self.next["F"][chunk] - self.next["I"][chunk] >= self.limit[chunk]:
            return False
        free, begun, ended = self.room[rank] - 1, self.begun[rank], self.ended[rank]
        for old in range(self.oldest[rank], micro + 1):
            if free >= self.vpp:
                break
            mine = begun[old] + (old == micro)
            if free < self.vpp - mine:
                return False
            free += mine - ended[old]
        return free >= 0

    def _do(self, rank: int, now: float, kind: str, chunk: int, micro: int) -> None:
        self.programs[rank].append(Action(kind, chunk, micro))
        if kind == "F":
            end = now + self.times.forward[chunk]
            self.next["F"][chunk] += 1
            self.begun[rank][micro] += 1
            self.room[rank] -= 1
            last = chunk + 1 == len(self.homes)
            self._arrive("I" if last else "F", chunk if last else chunk + 1, micro, rank, end)
        elif kind == "I":
            end = now + self.times.input_grad[chunk]
            self.next["I"][chunk] += 1
            self.pending[rank].append((chunk, micro))
            if chunk:
                self._arrive("I", chunk - 1, micro, rank, end)
        else:
            end = now + self.times.weight_grad[chunk]
            self.pending[rank].popleft()
            self.room[rank] += 1
            self.ended[rank][micro] += 1
            while self.ended[rank][self.oldest[rank]] == self.vpp:
                self.oldest[rank] += 1
        self.free[rank] = end
        heappush(self.events, (end, rank))

    def _arrive(self, kind: str, chunk: int, micro: int, sender: int, end: float) -> None:
        home = self.homes[chunk]
        at = end + (self.times.transfer if home != sender else 0.0)
        self.arrivals[kind][chunk][micro] = at
        if home != sender:
            heappush(self.events, (at, home))


def _in_flight(homes: Sequence[int], times: Times, flow: float) -> list[int]:
    """For each chunk how many micro batches may be between its F and its I.

    `flow` times the work of this chunk and all later ones, with the messages between them, over
    the time between two micro batches (the work of the busiest rank); at least one.
    """
    work = [0.0] * (1 + max(homes))
    trip, result = 0.0, []
    for c in reversed(range(len(homes))):
        own = times.forward[c] + times.input_grad[c] + times.weight_grad[c]
        work[homes[c]] += own
        far = c + 1 < len(homes) and homes[c + 1] != homes[c]
        trip += own + 2 * far * times.transfer
        result.append(trip)
    period = max(work) or 1.0
    return [max(1, ceil(flow * trip / period - 1e-9)) for trip in reversed(result)]
