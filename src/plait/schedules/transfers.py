"""Where ranks send and receive, in an order that cannot deadlock.

All that happens in a step is put in one order: what is computed by when it ends (in a simulation
in which F, I and W of every chunk take the same time and messages none), and each message right
behind what makes it, a send and its receive as one event. What a rank does is that order without
what others do. So nothing can wait in a circle: of all events that have not happened, the first is
at the front of each rank that takes part in it. That holds even where a send waits until its
receive is called and a receive until its send is, without any buffer, and it does not matter how
long anything really takes.

A receive stands in front of what its rank is busy with when the message is made, so that a receive
that does not wait (a runtime posts it and goes on) is posted in time, and never long before.
"""

from functools import lru_cache

from plait.schedules.simulate import Times, simulate
from plait.schedules.table import Action, Table

#: Messages from one rank to another, in one direction, that may be under way before the sender
#: waits. With one, a rank that is late for a moment holds up those before it; each costs a buffer.
UNDER_WAY = 2


@lru_cache(maxsize=4)
def with_transfers(table: Table) -> tuple[tuple[Action, ...], ...]:
    """The actions of each rank with SEND_F, RECV_F, SEND_B and RECV_B put in.

    `2SEND_F0`: chunk 2 sends its output of micro batch 0, which is `3RECV_F0`, the input of chunk
    3. `3SEND_B0`: chunk 3 sends the gradient of its input, which is `2RECV_B0`. There is none
    where both chunks are on one rank.

    Raises:
        UserError: the actions of the table wait for each other in a circle.
    """
    place = table.place
    events = sorted(
        (end, rank, i, action)
        for rank, spans in enumerate(simulate(table, Times.even(table)).spans)
        for i, (action, _, end) in enumerate(spans)
    )
    programs: list[list[Action]] = [[] for _ in table.ranks]
    for _, rank, _, action in events:
        kind, chunk, micro = action
        programs[rank].append(action)
        if kind == "W":
            continue
        way, step = ("F", 1) if kind == "F" else ("B", -1)
        to = place.get((chunk + step, micro), rank)
        if to != rank:
            programs[rank].append(Action(f"SEND_{way}", chunk, micro))
            programs[to].append(Action(f"RECV_{way}", chunk + step, micro))
    return tuple(map(tuple, programs))
