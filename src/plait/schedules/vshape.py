"""Schedules on a V: rank r has chunks r and 2 pp - 1 - r, so that the last one has both ends.

Every micro batch thus turns on the last rank and comes home to the first. What they hold is equal
on all ranks, and how much depends on how soon the way back begins.
"""

from collections.abc import Callable

from plait.schedules.table import Action, Table


def zbv(pp: int, micro_batches: int) -> Table:
    """Qi et al., arXiv 2401.10241, section 6: at most pp held, no bubble where F = I = W.

    The order is that of at least 2 pp - 1 micro batches, without those that are not there.
    """
    full = max(micro_batches, 2 * pp - 1)
    ranks = []
    for rank in range(pp):
        order = _zbv_rank(rank, pp, full)
        ranks.append(tuple(a for a in order if a.micro < micro_batches))
    return Table("zbv", tuple(ranks))


def _zbv_rank(rank: int, pp: int, micro_batches: int) -> list[Action]:
    down, up, left = rank, 2 * pp - 1 - rank, pp - rank
    word = ["F0"] * (2 * left - 1)
    word += ["F1", "F0"] * rank
    word += ["F1", "I1", "W1"] * left
    started, turned = 2 * left - 1 + rank, pp  # forwards of the chunk down, of the chunk up
    rounds = micro_batches - turned
    for i in range(rounds):
        word += ["F0"] * (started + i < micro_batches)
        word += ["I0", "W0", "F1", "I1", "W1"]
    word += ["I0", "I1"] * rank
    word += ["I0", "W0"] * left
    word += ["W1"] * rank + ["W0"] * rank
    count = dict.fromkeys(word, 0)
    actions = []
    for kind in word:
        actions.append(Action(kind[0], up if kind[1] == "1" else down, count[kind]))
        count[kind] += 1
    return actions


def v_half(pp: int, micro_batches: int) -> Table:
    """Qi et al., arXiv 2405.15362: (pp + 2) // 2 held, half of what 1F1B holds."""
    gap = 3 if pp % 2 == 0 else 0

    def block(rank: int) -> tuple[int, int, int, int]:
        turn = 3 * pp + gap - 1 + 2 * rank
        return 2 * rank, 3 * pp - rank - 2, turn, 6 * pp + gap - rank - 2

    return _repeated("v-half", pp, micro_batches, block, 2 * ((pp + 2) // 2))


def v_min(pp: int, micro_batches: int) -> Table:
    """Qi et al., arXiv 2405.15362: (pp + 4) // 3 held, a third of what 1F1B holds."""
    gap = 2 if pp % 3 == 0 else 0

    def block(rank: int) -> tuple[int, int, int, int]:
        return rank, 2 * pp - rank - 1, 2 * pp + gap + rank, 4 * pp + gap - rank - 1

    return _repeated("v-min", pp, micro_batches, block, 2 * ((pp + 4) // 3))


def _repeated(
    name: str,
    pp: int,
    micro_batches: int,
    block: Callable[[int], tuple[int, int, int, int]],
    cap: int,
) -> Table:
    """A building block repeated every six ticks, squeezed, with W in the ticks left.

    `block(rank)` is when one micro batch has F of the chunk down, F of the chunk up, I up, I down.
    These keep their order; each is done as soon as it can be and the rank holds less than `cap`
    chunks, and where none can be, a weight gradient. A tick is the time of any one action.
    """
    last = 2 * pp - 1
    orders = []
    for rank in range(pp):
        steps = zip(block(rank), "FFII", (rank, last - rank, last - rank, rank), strict=True)
        steps = [(start, kind, chunk) for start, kind, chunk in steps]
        orders.append(
            [
                Action(kind, chunk, micro)
                for _, kind, chunk, micro in sorted(
                    (start + 6 * micro, kind, chunk, micro)
                    for start, kind, chunk in steps
                    for micro in range(micro_batches)
                )
            ]
        )
    return Table(name, _squeezed(orders, last, cap))


def _squeezed(orders: list[list[Action]], last: int, cap: int) -> tuple[tuple[Action, ...], ...]:
    """Each rank's F and I in the order given, in lock step, W where nothing else can be done."""
    ranks = range(len(orders))
    done: dict[Action, int] = {}  # the tick after an action
    next_one, weights, held = ([0 for _ in ranks] for _ in range(3))
    put_off: list[list[Action]] = [[] for _ in ranks]
    out: list[list[Action]] = [[] for _ in ranks]
    tick, left = 0, sum(map(len, orders))
    while left:
        for rank in ranks:
            action = None
            if next_one[rank] < len(orders[rank]):
                action = orders[rank][next_one[rank]]
                kind, chunk, micro = action
                if kind == "F":
                    needs = Action("F", chunk - 1, micro) if chunk else None
                elif chunk < last:
                    needs = Action("I", chunk + 1, micro)
                else:
                    needs = Action("F", chunk, micro)
                waits = needs is not None and done.get(needs, tick + 1) > tick
                if waits or (kind == "F" and held[rank] == cap):
                    action = None
            if action is not None:
                next_one[rank] += 1
                done[action] = tick + 1
                out[rank].append(action)
                left -= 1
                if kind == "F":
                    held[rank] += 1
                else:
                    put_off[rank].append(Action("W", chunk, micro))
            elif weights[rank] < len(put_off[rank]):
                out[rank].append(put_off[rank][weights[rank]])
                weights[rank] += 1
                held[rank] -= 1
        tick += 1
    return tuple((*out[r], *put_off[r][weights[r] :]) for r in ranks)
