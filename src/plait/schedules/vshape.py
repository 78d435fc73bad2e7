"""Schedules on a V: rank r has chunks r and 2 pp - 1 - r, so that the last one has both ends.

Every micro batch thus turns on the last rank and comes home to the first. What they hold is equal
on all ranks, and how much depends on how soon the way back begins.
"""

from collections.abc import Callable

from plait.schedules.squeeze import squeeze
from plait.schedules.table import Action, Table


def zbv(pp: int, micro_batches: int) -> Table:
    """Qi et al., arXiv 2401.10241, section 6: at most pp held, no bubble where F = I = W.

    Fewer than 2 pp - 1 micro batches come in the order that so many have, with weight gradients
    where the others have left time.
    """
    full = max(micro_batches, 2 * pp - 1)
    ranks = []
    for rank in range(pp):
        order = _zbv_rank(rank, pp, full)
        ranks.append(tuple(a for a in order if a.micro < micro_batches))
    if micro_batches < full:
        ranks = squeeze([[a for a in order if a.kind != "W"] for order in ranks], 2 * pp)
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
    """
    orders = []
    for rank in range(pp):
        up = 2 * pp - 1 - rank
        steps = list(zip(block(rank), "FFII", (rank, up, up, rank), strict=True))
        times = [(at + 6 * m, kind, c, m) for m in range(micro_batches) for at, kind, c in steps]
        orders.append([Action(*what) for _, *what in sorted(times)])
    return Table(name, squeeze(orders, cap))
