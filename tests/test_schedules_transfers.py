"""Sends and receives: all there, in an order that cannot deadlock, nothing received long before."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.schedules.build import build
from plait.schedules.table import Action, Table
from plait.schedules.transfers import with_transfers
from plait.spec.schedule import SCHEDULES
from tables import tables

PARTNER = {"SEND_F": ("RECV_F", 1), "RECV_F": ("SEND_F", -1)}
PARTNER |= {"SEND_B": ("RECV_B", -1), "RECV_B": ("SEND_B", 1)}


def partner(a: Action) -> Action:
    kind, step = PARTNER[a.kind]
    return Action(kind, a.chunk + step, a.micro)


def rendezvous(programs, choose) -> list[int]:
    """Runs programs in which each send and each receive blocks until its partner is called, ranks
    in any order; returns how many received messages each rank had lying about at the most."""
    at = [0] * len(programs)
    buffers, most = [set() for _ in programs], [0] * len(programs)
    done = set()

    def front(rank):
        return programs[rank][at[rank]] if at[rank] < len(programs[rank]) else None

    def pass_(rank, a):
        done.add(a)
        at[rank] += 1
        if a.kind.startswith("RECV"):
            buffers[rank].add((a.kind[-1], a.chunk, a.micro))
            most[rank] = max(most[rank], len(buffers[rank]))

    while any(front(r) is not None for r in range(len(programs))):
        fronts = {front(r): r for r in range(len(programs)) if front(r) is not None}
        able = [a for a in fronts if a.kind not in PARTNER or partner(a) in fronts]
        assert able, f"everyone waits: {[str(a) for a in fronts]}"
        a = choose(able)
        rank = fronts[a]
        if a.kind in PARTNER:
            pass_(rank, a)
            pass_(fronts[partner(a)], partner(a))
            continue
        if a.kind != "W":
            kind = "F" if a.kind == "F" else "B"
            buffers[rank].discard((kind, a.chunk, a.micro))
            source = Action("F", a.chunk - 1, a.micro) if kind == "F" else None
            assert source is None or a.chunk == 0 or source in done
        pass_(rank, a)
    return most


@given(st.data())
def test_never_deadlocks(data):
    t = data.draw(tables())
    programs = with_transfers(t)
    choose = data.draw(st.randoms(use_true_random=False)).choice
    rendezvous(programs, choose)
    for rank, program in enumerate(programs):
        assert tuple(a for a in program if a.kind not in PARTNER) == t.ranks[rank]


@given(st.data())
def test_each_message_once_and_only_between_ranks(data):
    t = data.draw(tables())
    got = Counter(a for p in with_transfers(t) for a in p if a.kind in PARTNER)
    expected = Counter()
    for (chunk, micro), rank in t.place.items():
        if t.place.get((chunk + 1, micro), rank) != rank:
            expected += Counter(
                Action(kind, chunk + step, micro)
                for kind, step in (("SEND_F", 0), ("RECV_F", 1), ("SEND_B", 1), ("RECV_B", 0))
            )
    assert got == expected


# With these a rank does all forwards of a chunk first, and their gradients or inputs wait for it.
WHOLE_BATCH = ("gpipe", "looped-bfs")


@pytest.mark.parametrize("name", [n for n in SCHEDULES if n not in ("auto", *WHOLE_BATCH)])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_what_was_received_is_soon_used(name, pp):
    """As many messages lie about for 64 micro batches as for 32: what is received waits for a part
    of the pipeline, never for a part of the step."""
    few, many = (
        rendezvous(with_transfers(build(name, pp, m)), lambda able: able[0]) for m in (32, 64)
    )
    assert few == many


def test_by_hand():
    t = Table(
        "gpipe",
        tuple(tuple(Action(kind, rank, j) for kind in "FB" for j in range(2)) for rank in range(2)),
    )
    first, last = ([str(a) for a in program] for program in with_transfers(t))
    assert first == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1".split()
    assert last == "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1".split()
