"""When everything in a schedule happens, given how long each action takes.

An action starts as soon as its rank is free and what it needs is there: F of a chunk needs F of the
chunk before, I (or B) the I (or B) of the chunk after, that of the last chunk its own F, W its own
I. A message to another rank takes `transfer`, costs neither rank anything and never waits for
another message.

A table of n actions takes O(n): actions are numbered, (kind, chunk, micro batch) -> slot, and kept
in flat lists; a search can call `run` on such lists directly.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from plait.schedules.check import check
from plait.schedules.table import Action, Table
from plait.spec.findings import UserError


@dataclass(frozen=True)
class Times:
    """How long the actions of each chunk take, in any unit of time.

    Attributes:
        forward, input_grad, weight_grad: of one F, I or W, a number a chunk; a B takes
            input_grad + weight_grad.
        transfer: latency of a message between two ranks.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    transfer: float = 0.0

    @classmethod
    def even(
        cls,
        of: Table | tuple[int, int],
        f: float = 1.0,
        b: float = 1.0,
        w: float = 1.0,
        comm: float = 0.0,
    ) -> "Times":
        """Equal chunks, for a table or for (chunks, pp).

        f, b, w are times of one rank's whole share of a micro batch; b without the weight
        gradient.
        """
        chunks, pp = (of.chunks, len(of.ranks)) if isinstance(of, Table) else of
        f, b, w = (((t * pp / chunks),) * chunks for t in (f, b, w))
        return cls(f, b, w, comm)

    def lasting(self, kind: str) -> tuple[float, ...]:
        """How long an action of this kind takes, for each chunk."""
        if kind == "B":
            return tuple(i + w for i, w in zip(self.input_grad, self.weight_grad, strict=True))
        return {"F": self.forward, "I": self.input_grad, "W": self.weight_grad}[kind]


class Span(NamedTuple):
    """An action and when it runs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A table in time, from 0 to `makespan`; the unit of time is that of `times`.

    `ends` has the end of each slot (see `Slots`).
    """

    table: Table
    times: Times
    makespan: float
    ends: list[float]

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """For each rank what it does and when, in its order."""
        slots, ends, transfer = Slots.of(self.table), self.ends, self.times.transfer
        result = []
        for rank, actions in enumerate(self.table.ranks):
            now, spans = 0.0, []
            for action, slot in zip(actions, slots.ranks[rank], strict=True):
                need = slots.needs[slot]
                if need >= 0:
                    far = transfer if slots.owner[need] != rank else 0.0
                    now = max(now, ends[need] + far)
                spans.append(Span(action, now, ends[slot]))
                now = ends[slot]
            result.append(tuple(spans))
        return tuple(result)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes."""
        kinds = {kind: self.times.lasting(kind) for kind in "FIWB"}
        return tuple(sum(kinds[a.kind][a.chunk] for a in actions) for actions in self.table.ranks)

    @cached_property
    def bubble(self) -> dict[str, float]:
        """Idle time over all time (`total`) and over busy time (`ideal`), the mean over ranks.

        "All time" is the makespan (`step`: a step ends when the last rank ends) or a rank's own
        time from its first action to its last (`span`: its next step may begin at once).
        """
        step = [(self.makespan, busy) for busy in self.busy]
        span = [
            (spans[-1].end - spans[0].start if spans else 0.0, busy)
            for spans, busy in zip(self.spans, self.busy, strict=True)
        ]
        return {
            "step_total": _mean((whole - busy, whole) for whole, busy in step),
            "step_ideal": _mean((whole - busy, busy) for whole, busy in step),
            "span_total": _mean((whole - busy, whole) for whole, busy in span),
            "span_ideal": _mean((whole - busy, busy) for whole, busy in span),
        }

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """For each rank the most that it holds at a time, in units of one rank's whole share of a
        micro batch; held from the start of F to the end of W (or B)."""
        return peak_activations(self.table)


def simulate(table: Table, times: Times) -> Timeline:
    """When each action of a valid table runs.

    Raises:
        UserError: the actions wait for each other in a circle, or for one that is missing.
    """
    slots = Slots.of(table)
    lasting = {kind: times.lasting(kind) for kind in "FIWB"}
    lengths = [[lasting[k][c] for k, c, _ in actions] for actions in table.ranks]
    ran = run(slots, lengths, times.transfer)
    if ran is None:
        raise UserError(check(table))
    return Timeline(table, times, *ran)


def peak_activations(table: Table) -> tuple[float, ...]:
    """See `Timeline.peak_activations`: it depends on the order of a rank alone."""
    change = {"F": 1, "W": -1, "B": -1, "I": 0}
    held = (accumulate(change[a.kind] for a in actions) for actions in table.ranks)
    return tuple(max(counts, default=0) * table.share for counts in held)


@dataclass(frozen=True)
class Slots:
    """A table as lists of numbers.

    With n = chunks * micro_batches the slot of F is chunk * micro_batches + micro, of I and of B
    n more, of W 2n more.

    Attributes:
        ranks: the slots of each rank, in its order.
        needs: slot -> the slot that must have ended (the only one: what else an action needs, that
            one needed too), or -1.
        owner: slot -> rank.
    """

    ranks: list[list[int]]
    needs: list[int]
    owner: list[int]

    @classmethod
    def of(cls, table: Table) -> "Slots":
        many, n = table.micro_batches, table.chunks * table.micro_batches
        base = {"F": 0, "I": n, "B": n, "W": 2 * n}
        ranks = [[base[k] + c * many + j for k, c, j in actions] for actions in table.ranks]
        owner = [0] * (3 * n)
        for rank, slots in enumerate(ranks):
            for slot in slots:
                owner[slot] = rank
        return cls(ranks, slot_needs(table.chunks, many), owner)


def slot_needs(chunks: int, micro_batches: int) -> list[int]:
    """`Slots.needs`."""
    n = chunks * micro_batches
    return [
        *([-1] * micro_batches),
        *range(n - micro_batches),
        *range(n + micro_batches, 2 * n),
        *range(n - micro_batches, n),
        *range(n, 2 * n),
    ]


def run(
    slots: Slots, lengths: Sequence[Sequence[float]], transfer: float
) -> tuple[float, list[float]] | None:
    """The makespan and the end of each slot; None if some never run.

    `lengths` has for each rank how long its actions take, in its order. Every rank goes on until
    what it needs is not there, and then again from where that ends.
    """
    ranks, needs, owner = slots.ranks, slots.needs, slots.owner
    ends = [-1.0] * len(needs)
    waiting = [-1] * len(needs)  # the rank that waits for this slot
    next_ = [0] * len(ranks)
    clock = [0.0] * len(ranks)
    ready = list(range(len(ranks)))
    while ready:
        rank = ready.pop()
        mine, lasting = ranks[rank], lengths[rank]
        i, now, last = next_[rank], clock[rank], len(mine)
        while i < last:
            slot = mine[i]
            need = needs[slot]
            if need >= 0:
                there = ends[need]
                if there < 0.0:
                    waiting[need] = rank
                    break
                if owner[need] != rank:
                    there += transfer
                if there > now:  # noqa: PLR1730  max() takes a tenth of all the time
                    now = there
            now += lasting[i]
            ends[slot] = now
            i += 1
            if waiting[slot] >= 0:
                ready.append(waiting[slot])
        next_[rank], clock[rank] = i, now
    if any(i < len(mine) for i, mine in zip(next_, ranks, strict=True)):
        return None
    return max(clock), ends


def _mean(parts: Iterable[tuple[float, float]]) -> float:
    """Of part / whole; a rank that has nothing to do has no bubble of its own."""
    ratios = [max(part, 0.0) / whole if whole else 0.0 for part, whole in parts]
    return sum(ratios) / len(ratios)
