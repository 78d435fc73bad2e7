"""Better tables out of given ones, for given times and a memory cap.

What is searched is the order of F and I on each rank. Where the W go follows from it: into the
gaps where a rank waits, and where the cap leaves no room for the next F.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

from plait.schedules.simulate import Times, slot_needs
from plait.schedules.table import Action, Table

#: An order: for each rank the slots (see `simulate.Slots`) of its F and I.
Order = list[list[int]]


@dataclass
class Filled:
    """An order in time, with its W.

    `starts` and `ends` have the F and I by slot; `clocks` when each rank is done; `programs` for
    each rank its slots, those of W too.
    """

    makespan: float
    clocks: list[float]
    starts: list[float]
    ends: list[float]
    programs: list[list[int]]

    @property
    def merit(self) -> tuple[float, float]:
        """What is to be small: the makespan, then how late the ranks are done."""
        return self.makespan, sum(self.clocks)


class Filler:
    """Puts W into orders of one problem; counts the actions that it has simulated (`spent`)."""

    def __init__(self, chunks: int, micro_batches: int, pp: int, times: Times, cap: float):
        self.chunks, self.many, self.times = chunks, micro_batches, times
        self.n = chunks * micro_batches
        self.needs = slot_needs(chunks, micro_batches)
        self.room = int(min(cap * chunks / pp + 1e-9, self.n))
        self.lengths = [
            t for of in (times.forward, times.input_grad) for t in of for _ in range(micro_batches)
        ]
        self.spent = 0

    def fill(self, order: Order, haste: float) -> Filled | None:
        """The order with W; None if it cannot keep the cap or waits in a circle.

        A W goes where a rank would wait; it may make the rank late by `haste` times its length.
        """
        n, many, needs, lengths = self.n, self.many, self.needs, self.lengths
        weight, transfer, room = self.times.weight_grad, self.times.transfer, self.room
        owner = [0] * (2 * n)
        for rank, slots in enumerate(order):
            for slot in slots:
                owner[slot] = rank
        starts, ends = [0.0] * (2 * n), [-1.0] * (2 * n)
        waiting = [-1] * (2 * n)
        ranks = range(len(order))
        at, clocks, held = [0 for _ in ranks], [0.0 for _ in ranks], [0 for _ in ranks]
        pending = [deque() for _ in ranks]
        programs: list[list[int]] = [[] for _ in ranks]
        ready = list(ranks)
        while ready:
            rank = ready.pop()
            slots, later, program = order[rank], pending[rank], programs[rank]
            i, now, mine = at[rank], clocks[rank], held[rank]
            while i < len(slots):
                slot = slots[i]
                need, there = needs[slot], 0.0
                if need >= 0:
                    there = ends[need]
                    if there < 0.0:
                        waiting[need] = rank
                        break
                    if owner[need] != rank:
                        there += transfer
                while later and now < there:
                    w = weight[(later[0] - n) // many]
                    if now + w > there + haste * w:
                        break
                    program.append(later.popleft() + n)
                    mine -= 1
                    now += w
                if slot < n:
                    while mine >= room:
                        if not later:
                            self.spent += n
                            return None
                        now += weight[(later[0] - n) // many]
                        program.append(later.popleft() + n)
                        mine -= 1
                    mine += 1
                else:
                    later.append(slot)
                if there > now:  # noqa: PLR1730  as in `simulate.run`
                    now = there
                starts[slot] = now
                now += lengths[slot]
                ends[slot] = now
                program.append(slot)
                i += 1
                if waiting[slot] >= 0:
                    ready.append(waiting[slot])
            at[rank], clocks[rank], held[rank] = i, now, mine
        self.spent += n * 3
        for rank in ranks:
            if at[rank] < len(order[rank]):
                return None
            clocks[rank] += sum(weight[(slot - n) // many] for slot in pending[rank])
            programs[rank].extend(slot + n for slot in pending[rank])
        return Filled(max(clocks), clocks, starts, ends, programs)

    def table(self, name: str, filled: Filled) -> Table:
        """The actions themselves."""
        many, n = self.many, self.n
        return Table(
            name,
            tuple(
                tuple(Action("FIW"[s // n], s % n // many, s % many) for s in program)
                for program in filled.programs
            ),
        )

    def order(self, table: Table) -> Order:
        """The F and I of a table; B counts as I."""
        base = {"F": 0, "I": self.n, "B": self.n}
        return [
            [base[a.kind] + a.chunk * self.many + a.micro for a in actions if a.kind in base]
            for actions in table.ranks
        ]


#: How late a W may make its rank, see `Filler.fill`.
HASTE = (0.0, 1.0, 0.5)


#: Blocks, see `periodic`.
_SLOWER = (1.0, 1.08, 1.16, 1.25, 1.4)
_TURNS = (0.0, 0.25, 0.5)
_STRETCHES = (1.0, 2.0, 1.5, 3.0)


def periodic(filler: Filler, homes: Sequence[int], effort: int) -> Iterator[Order]:
    """Orders in which every micro batch does the same, one period after the one before it: the
    building blocks of Qi et al., "Pipeline Parallelism with Controllable Memory" (arXiv
    2405.15362).

    A block is said by how much longer than F or I takes the next chunk waits: one number for the
    first and one for the last half of the chunks, for F and for I, and one for the turn; and how
    much longer than the work of the busiest rank the period is. The longer a micro batch takes, the
    more is held, and the longer the period, the less. Stops when `effort` actions have been
    simulated.
    """
    times, chunks, many = filler.times, filler.chunks, filler.many
    work = [0.0] * (1 + max(homes))
    for c, home in enumerate(homes):
        work[home] += times.forward[c] + times.input_grad[c] + times.weight_grad[c]
    stop = filler.spent + effort
    blocks = product(_SLOWER, _TURNS, *[_STRETCHES] * 4)
    for slower, turn, *stretch in sorted(blocks, key=lambda block: 4 * block[0] + sum(block)):
        if filler.spent >= stop:
            return
        period = max(work) * slower
        start, now = [0.0] * (2 * chunks), 0.0
        for k in range(2 * chunks):
            back = k >= chunks
            c = 2 * chunks - 1 - k if back else k
            start[c + back * chunks] = now
            now += (times.input_grad if back else times.forward)[c] * stretch[
                (c >= chunks / 2) + 2 * back
            ]
            after = c - 1 if back else c + 1
            if 0 <= after < chunks and homes[after] != homes[c]:
                now += times.transfer
            if k == chunks - 1:
                now += turn * period
        order: Order = [[] for _ in work]
        keyed = [
            (start[kc] + j * period, kc * many + j, homes[kc % chunks])
            for kc in range(2 * chunks)
            for j in range(many)
        ]
        for _, slot, home in sorted(keyed):
            order[home].append(slot)
        yield order


#: `improve` takes what is better than the order was so many trials ago.
_MEMORY = 100


def improve(
    filler: Filler, order: Order, filled: Filled, haste: float, effort: int, goal: float
) -> Filled:
    """Local search: an F or I changes places with the one before it on its rank, on the path of
    actions of which each waits for the one before it, up to the one that ends last.

    Which of them is drawn (the same draws each time). It stays if that is no worse than what was
    before, or than what was `_MEMORY` trials ago, which leads out of where no single change helps
    (Burke and Bykov, "The late acceptance hill-climbing heuristic", 2017). Ends at `goal`, or when
    `effort` actions have been simulated. Changes `order`; returns the best filling on the way.
    """
    stop, draw = filler.spent + effort, Random(0)
    best, swaps = filled, _swaps(filler, order, filled)
    memory = [filled.merit] * _MEMORY
    trial = 0
    while swaps and filler.spent < stop and best.makespan > goal * (1 + 1e-9):
        rank, i = draw.choice(swaps)
        slots = order[rank]
        slots[i], slots[i + 1] = slots[i + 1], slots[i]
        other = filler.fill(order, haste)
        if other is not None and other.merit <= max(filled.merit, memory[trial % _MEMORY]):
            filled, swaps = other, _swaps(filler, order, other)
            best = min(best, filled, key=lambda f: f.merit)
        else:
            slots[i], slots[i + 1] = slots[i + 1], slots[i]
        memory[trial % _MEMORY] = filled.merit
        trial += 1
    return best


def _swaps(filler: Filler, order: Order, filled: Filled) -> list[tuple[int, int]]:
    """(rank, i): the i-th and the next may change places, and the next is on the path."""
    many, starts, ends = filler.many, filled.starts, filled.ends
    where = {slot: (r, i) for r, slots in enumerate(order) for i, slot in enumerate(slots)}
    rank = max(range(len(order)), key=filled.clocks.__getitem__)
    slot = order[rank][-1]
    result = []
    while True:
        rank, i = where[slot]
        before = order[rank][i - 1] if i else None
        need = filler.needs[slot]
        if before not in (None, need) and before // many != slot // many:
            result.append((rank, i - 1))
        far = filler.times.transfer if need >= 0 and where[need][0] != rank else 0.0
        if need >= 0 and (before is None or ends[need] + far >= starts[slot]):
            slot = need
        elif before is not None:
            slot = before
        else:
            return result
