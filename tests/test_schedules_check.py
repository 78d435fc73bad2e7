"""The checker names what is wrong, and only that."""

from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.schedules.check import check
from plait.schedules.simulate import peak_activations
from plait.schedules.table import Action, Table
from plait.schedules.transfers import with_transfers
from tables import tables


def lines(table, **more) -> str:
    return "; ".join(f.line() for f in check(table, **more))


def parse(cell: str) -> Action:
    chunk = cell[0]
    kind = cell[1:-1]
    return Action(kind, int(chunk), int(cell[-1]))


def table(*ranks: str) -> Table:
    return Table("by hand", tuple(tuple(map(parse, rank.split())) for rank in ranks))


@pytest.mark.parametrize(
    ("ranks", "what"),
    [
        (("0F0 0F0 0B0",), "0F0 is there 2 times"),
        (("0F0 0B0", "1F0 1B0 0F0"), "0F0 is there 2 times (ranks 0, 1)"),
        (("0F0 0B0 0F2 0B2",), "no F of micro batch 1"),
        (("0F0 0B0 0F1",), "no backward (B, or I and W) of micro batch 1"),
        (("0F0 0I0",), "no W of micro batch 0"),
        (("0F0 0B0 0W0",), "0B0 is there and so is its W"),
        (("0F0 0I0", "0W0"), "0W0 is on rank 1, its F on rank 0"),
        (("0F0 0W0 0I0",), "0W0 stands before 0I0"),
        (("0I0 0F0 0W0",), "0I0 stands before 0F0"),
        (("0F0 0X0",), "0X0: no kind of action"),
        (("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"), "waits for 1I0, rank 1 at 1F1 waits for 0F1"),
        ((), "has no actions"),
        # with transfers
        (("0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"), "0RECV_B0 is missing"),
        (("0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"), "0SEND_F0 is missing"),
        (
            ("0F0 0SEND_F0 0B0 0RECV_B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
            "0RECV_B0 stands after 0I0, which needs the message",
        ),
        (
            ("0SEND_F0 0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
            "0SEND_F0 stands before 0F0, which makes the message",
        ),
        (("0F0 1F0 0SEND_F0 1B0 0B0",), "0SEND_F0: nothing crosses"),
        (("0F0 0SEND_B0 0B0",), "0SEND_B0: nothing crosses"),
        (("0F0 0B0 5RECV_F0",), "5RECV_F0: no such message"),
        (
            (
                "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
                "1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
            ),
            "rank 0 at 0SEND_F0 waits for 1RECV_F0, rank 1 at 1RECV_F1 waits for 0SEND_F1",
        ),
        (
            (
                "0F0 0SEND_F0 0F1 0RECV_B0 0B0 0SEND_F1 0RECV_B1 0B1",
                "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1",
            ),
            "rank 0 at 0RECV_B0 waits for 1SEND_B0, rank 1 at 1RECV_F1 waits for 0SEND_F1",
        ),
    ],
)
def test_names_what_is_wrong(ranks, what):
    assert what in lines(table(*ranks) if ranks else Table("empty", ()))


def test_counts_that_are_given():
    whole = table("0F0 0B0", "1F0 1B0")
    assert not check(whole, micro_batches=1, chunks=2)
    assert "chunk 2: no F of micro batch 0" in lines(whole, chunks=3)
    assert "micro batch 1-2" in lines(whole, micro_batches=3)
    assert "1F0: there is no chunk 1" in lines(whole, chunks=1)
    assert "no micro batch 0" in lines(whole, micro_batches=0)


def test_everything_at_once():
    found = check(table("0F0 0F0 0B0 0F2 0B2", "1F0 1B0 1F1 1B1 1F2"))
    assert len(found) == 4  # twice; 0F1, its backward, that of 1F2


@pytest.mark.parametrize("broken", ["diagonal", "numbers", "circle", "again", "apart"])
def test_a_great_many_wrong_things_are_few_lines_at_once(broken):
    """No list, no search and no product grows with how wrong a table is."""
    n = 20_000
    ranks = {
        # Chunk i does micro batch i and nothing else: n^2 things are missing.
        "diagonal": [[Action("F", i, i)] for i in range(n)],
        "numbers": [[Action("F", 0, 2 * i), Action("B", 0, 2 * i)] for i in range(n)],
        # Micro batch i has chunk 0 on rank i and chunk 1, which comes first there, on the next.
        "circle": [
            [Action(kind, chunk, (i - chunk) % n) for kind in "FB" for chunk in (1, 0)]
            for i in range(n)
        ],
        "again": [[Action("F", 0, 0)] for _ in range(n)],
        "apart": [[Action(kind, i, 0) for i in range(n)] for kind in "FB"],
    }[broken]
    start = process_time()
    found = check(Table("wrong", tuple(map(tuple, ranks))))
    assert process_time() - start < 5
    assert 0 < len(found) <= 1001
    assert all(len(f.line()) < 1000 for f in found)


@given(st.data())
def test_right_ones_are_right_with_and_without_transfers(data):
    t = data.draw(tables())
    peak = max(peak_activations(t))
    assert not check(t, cap=peak, chunks=t.chunks, micro_batches=t.micro_batches)
    assert "more than" in lines(t, cap=peak - t.share)
    assert not check(Table("any", with_transfers(t)), cap=peak)


@given(st.data())
def test_an_action_lost_or_twice_is_found(data):
    t = data.draw(tables())
    ranks = [list(r) for r in (with_transfers(t) if data.draw(st.booleans()) else t.ranks)]
    rank = data.draw(st.sampled_from([r for r in ranks if r]))
    i = data.draw(st.integers(0, len(rank) - 1))
    if data.draw(st.booleans()):
        rank.append(rank[i])
    else:
        del rank[i]
    broken = Table("any", tuple(map(tuple, ranks)))
    if any(ranks):
        assert check(broken, chunks=t.chunks, micro_batches=t.micro_batches)
