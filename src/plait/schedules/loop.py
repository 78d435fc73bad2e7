"""Schedules in which chunk c is on rank c mod pp: GPipe, 1F1B, breadth-first, zero bubble H1, H2.

They are one family. On every rank forwards come in one order and backwards in one order; a rank
does some forwards as a warm-up, then one forward and one backward by turns, then the backwards
that are left. With the backward split, the weight gradient of a micro batch follows its input
gradient some backwards later, which is what fills the time of waiting.

Where the micro batches do not fill the last group, the order is that of a full one without the
micro batches that are not there: whoever drops them takes nothing from what the others need, and
holds less. (A last group that counts as smaller can make ranks wait for each other in a circle.)
"""

from collections import deque
from collections.abc import Callable

from plait.schedules.table import Action, Table

#: (chunk, micro batch) of one rank, in the order in which it does them.
Order = list[tuple[int, int]]


def gpipe(pp: int, micro_batches: int) -> Table:
    """Huang et al., arXiv 1811.06965: all forwards, then all backwards."""
    return _table("gpipe", pp, micro_batches, 1, micro_batches, _everything)


def looped_bfs(pp: int, micro_batches: int, vpp: int) -> Table:
    """Breadth-first, arXiv 2211.05953: every chunk all micro batches before the next chunk."""
    return _table("looped-bfs", pp, micro_batches, vpp, micro_batches, _everything)


def one_f_one_b(pp: int, micro_batches: int) -> Table:
    """Narayanan et al., arXiv 2104.04473, section 2.2.1: rank r holds min(m, pp - r)."""
    return _table("1f1b", pp, micro_batches, 1, 1, lambda rank: pp - 1 - rank)


def interleaved(pp: int, micro_batches: int, vpp: int, group: int) -> Table:
    """Narayanan et al., section 2.2.2, in Megatron's order: `group` (at least pp) micro batches of
    a chunk, then the same of the next chunk."""
    group = min(group, max(pp, micro_batches))
    return _table(
        "interleaved-1f1b",
        pp,
        micro_batches,
        vpp,
        group,
        lambda rank: 2 * (pp - 1 - rank) + (vpp - 1) * group,
    )


def zb_h1(pp: int, micro_batches: int, vpp: int) -> Table:
    """Qi et al., arXiv 2401.10241, section 2.3: 1F1B's order and memory, weight gradients put off.

    Rank r puts off r weight gradients: it holds pp - r forwards and r of those, pp in all. With
    more chunks a rank it is what torch calls interleaved zero bubble; there warm-ups differ by one
    forward a rank, not by two as in 1F1B.
    """
    group = 1 if vpp == 1 else pp
    return _table(
        "zb-h1",
        pp,
        micro_batches,
        vpp,
        group,
        lambda rank: pp - 1 - rank + (vpp - 1) * group,
        lambda rank: rank,
    )


def zb_h2(pp: int, micro_batches: int) -> Table:
    """Qi et al., section 2.3: as many more forwards in the warm-up as fill each rank's waiting; at
    most 2 pp - 1 held."""
    return _table(
        "zb-h2",
        pp,
        micro_batches,
        1,
        1,
        lambda rank: 2 * (pp - 1 - rank),
        lambda rank: 2 * rank,
    )


def _everything(rank: int) -> None:
    """The warm-up of schedules that go forward to the end before they go back."""


def _table(
    name: str,
    pp: int,
    micro_batches: int,
    vpp: int,
    group: int,
    warm_up: Callable[[int], int | None],
    lag: Callable[[int], int] | None = None,
) -> Table:
    """`warm_up` and `lag` are functions of the rank: forwards before the first pair (None: all),
    backwards between an input gradient and its weight gradient (no function: not split)."""
    ranks = []
    starts = range(0, micro_batches, group)
    for rank in range(pp):
        chunks = range(rank, pp * vpp, pp)
        forwards = [(c, m) for s in starts for c in chunks for m in range(s, s + group)]
        backwards = [(c, m) for s in starts for c in chunks[::-1] for m in range(s, s + group)]
        warm = warm_up(rank)
        order = _alternate(forwards, backwards, len(forwards) if warm is None else warm)
        order = [a for a in order if a.micro < micro_batches]
        ranks.append(tuple(_split(order, lag(rank)) if lag else order))
    return Table(name, tuple(ranks))


def _alternate(forwards: Order, backwards: Order, warm: int) -> list[Action]:
    """One rank: `warm` forwards, then a forward and a backward by turns, then backwards."""
    actions = [Action("F", *at) for at in forwards[:warm]]
    later = forwards[warm:]
    for k, at in enumerate(backwards):
        if k < len(later):
            actions.append(Action("F", *later[k]))
        actions.append(Action("B", *at))
    return actions


def _split(actions: list[Action], lag: int) -> list[Action]:
    """Every backward as I and W, the W behind the I `lag` backwards later, or at the end."""
    result: list[Action] = []
    put_off: deque[Action] = deque()
    for action in actions:
        if action.kind == "F":
            result.append(action)
            continue
        result.append(action._replace(kind="I"))
        put_off.append(action._replace(kind="W"))
        if len(put_off) > lag:
            result.append(put_off.popleft())
    return [*result, *put_off]
