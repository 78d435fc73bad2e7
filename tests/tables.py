"""Tables for tests that no builder makes; any order that makes sense, drawn at random."""

from hypothesis import strategies as st

from plait.schedules.simulate import Times
from plait.schedules.table import Action, Table


@st.composite
def tables(draw, split=None, most=5):
    """A valid table: chunks anywhere, each rank with at least one, in any order that keeps the
    dependencies; each backward in one piece or two (`split`: always or never two)."""
    pp = draw(st.integers(1, 4))
    chunks = draw(st.integers(pp, 2 * pp))
    homes = draw(st.permutations([c % pp for c in range(chunks)]))
    micros = draw(st.integers(1, most))
    choose = draw(st.randoms(use_true_random=False))
    ready = [Action("F", 0, j) for j in range(micros)]
    ranks = [[] for _ in range(pp)]
    while ready:
        a = ready.pop(choose.randrange(len(ready)))
        ranks[homes[a.chunk]].append(a)
        two = choose.random() < 0.6 if split is None else split
        backward = "I" if two else "B"
        if a.kind == "F":
            last = a.chunk + 1 == chunks
            ready.append(a._replace(kind=backward) if last else a._replace(chunk=a.chunk + 1))
            continue
        if a.kind == "I":
            ready.append(a._replace(kind="W"))
        if a.kind != "W" and a.chunk:
            ready.append(Action(backward, a.chunk - 1, a.micro))
    return Table("any", tuple(map(tuple, ranks)))


@st.composite
def times_of(draw, chunks, least=0):
    """Times of chunks, in quarters, so that sums are exact."""

    def some():
        quarters = st.lists(st.integers(least, 12), min_size=chunks, max_size=chunks)
        return tuple(q / 4 for q in draw(quarters))

    return Times(some(), some(), some(), draw(st.integers(0, 4)) / 4)


def everywhere(pp: int, micro: int) -> Table:
    """Each rank does the whole model, for its own micro batches: pp copies of everything."""
    chunks = range(2 * pp)
    ranks = [
        [
            Action(kind, c, i)
            for i in range(rank, micro, pp)
            for kind, order in (("F", chunks), ("B", chunks[::-1]))
            for c in order
        ]
        for rank in range(pp)
    ]
    return Table("everywhere", tuple(map(tuple, ranks)))
