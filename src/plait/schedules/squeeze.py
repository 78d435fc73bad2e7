"""A periodic order, drawn together: nothing waits that need not, and no rank holds more than a cap.

The second half of how schedules are made from a building block (Qi et al., arXiv 2405.15362,
section 3): the block is repeated, and what is left idle at its beginning and its end is squeezed
out. A tick here is the time of any one action.
"""

from plait.schedules.table import Action

Ranks = tuple[tuple[Action, ...], ...]


def squeeze(orders: list[list[Action]], cap: int) -> Ranks:
    """The shorter of two ways to do each rank's F and I in about the order given.

    Either in that very order, or with actions drawn forward into ticks that would be idle: which
    is better depends on whether memory or time is scarce in the block. Weight gradients go where a
    rank can do nothing else.

    Args:
        orders: for each rank its F and I, every micro batch once a chunk; an order that no rank
            has to break for want of memory. Of each chunk micro batches ascend.
        cap: chunks that a rank may hold, F to W.
    """
    ways = [_squeezed([*map(list, orders)], cap, forward) for forward in (False, True)]
    return min(ways, key=lambda way: way[0])[1]


def _squeezed(orders: list[list[Action]], cap: int, draw_forward: bool) -> tuple[int, Ranks]:
    """Ticks until all is done, and what each rank does; in lock step. Uses up `orders`."""
    ranks = range(len(orders))
    last = max(a.chunk for order in orders for a in order)
    left = sum(map(len, orders))
    out: list[list[Action]] = [[] for _ in ranks]
    done: dict[Action, int] = {}  # the tick from which what an action makes is there
    held = [0 for _ in ranks]
    put_off: list[list[Action]] = [[] for _ in ranks]
    for order in orders:
        order.reverse()  # what comes next is at the end
    tick = 0
    while left:
        for rank in ranks:
            order, weights = orders[rank], put_off[rank]
            full = held[rank] == cap
            found = 0
            if order and not _can(order[-1], done, tick, last, full):
                draws = draw_forward and not weights
                found = _drawn(order, done, tick, last, held[rank], cap) if draws else None
            if order and found is not None:
                action = order.pop(-1 - found)
                out[rank].append(action)
                done[action] = tick + 1
                left -= 1
                if action.kind == "F":
                    held[rank] += 1
                else:
                    weights.append(Action("W", action.chunk, action.micro))
            elif weights:
                out[rank].append(weights.pop(0))
                held[rank] -= 1
        tick += 1
    ticks = max(tick + len(weights) for weights in put_off)
    return ticks, tuple((*out[rank], *put_off[rank]) for rank in ranks)


def _can(action: Action, done: dict[Action, int], tick: int, last: int, full: bool) -> bool:
    """Whether what an action needs is there at a tick, and room for what it keeps."""
    kind, chunk, micro = action
    if kind == "F":
        if full:
            return False
        if chunk == 0:
            return True
        needs = Action("F", chunk - 1, micro)
    else:
        needs = Action("I", chunk + 1, micro) if chunk < last else Action("F", chunk, micro)
    return done.get(needs, tick + 1) <= tick


def _drawn(
    order: list[Action], done: dict[Action, int], tick: int, last: int, held: int, cap: int
) -> int | None:
    """How far behind the next action is the first that can be done before it, None where none can.

    `held` has no weight gradients put off. A forward that is done early is held by all that it
    overtakes, so none of those may want the last room.
    """
    peak = balance = held
    passed = set()
    for ahead, action in enumerate(reversed(order)):
        lane = action.kind, action.chunk
        if lane not in passed:
            room = action.kind == "I" or peak < cap
            if ahead and room and _can(action, done, tick, last, held == cap):
                return ahead
            passed.add(lane)
            if len(passed) == 4:  # F and I of two chunks
                return None
        balance += 1 if action.kind == "F" else -1
        peak = max(peak, balance)
    return None
