"""Whether ranks that share a group issue the same collectives in the same order, and messages meet.

A program whose ranks disagree hangs, or sums what does not belong together, and no formula of bytes
shows it. Compared are, between the stages, what goes over all ranks and along the pipeline; and
within a stage two ranks at opposite corners, which have no position in common on any axis: what
depends on a rank's number (`if rank == 0`) is different there.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from plait.trace.recorder import Issue

#: Axes along which ranks send messages to each other within a stage.
_RING = ("ring",)


class At(NamedTuple):
    """A collective, and where in a step it is issued."""

    issue: Issue
    where: str

    def __str__(self) -> str:
        return f"{self.issue} ({self.where})"


def between_stages(ranks: Mapping[int, int], issued: Mapping[int, Sequence[At]]) -> list[str]:
    """A line for each first difference.

    Args:
        ranks: stage -> the rank that stands for it; all have the same place in their stage.
        issued: stage -> what it issues in a step, over "world" and "pp".
    """
    lines: list[str] = []
    first, *others = issued
    for stage in others:
        a, b = (_over(issued[s], "world") for s in (first, stage))
        lines += _first("world", ranks[first], a, ranks[stage], b)
    messages = {stage: _messages(_over(own, "pp")) for stage, own in issued.items()}
    for source in issued:
        for to in issued:
            sent = messages[source].get(("send", to), [])
            got = messages[to].get(("receive", source), [])
            lines += _first("pp", ranks[source], sent, ranks[to], got, message=True)
    return lines


def within_stage(
    ranks: tuple[int, int], issued: tuple[Sequence[At], Sequence[At]], even: bool
) -> list[str]:
    """A line for each axis over which two ranks of a stage do not issue the same.

    even: all ranks of a ring hold equally much, and messages have one size.
    """
    (one, other), (a, b) = ranks, issued
    lines: list[str] = []
    for axis in dict.fromkeys(at.issue.axis for at in (*a, *b)):
        mine, its = _over(a, axis), _over(b, axis)
        if axis not in _RING:
            lines += _first(axis, one, mine, other, its)
            continue
        for p, x, q, y in ((one, mine, other, its), (other, its, one, mine)):
            sent = [at for at in x if at.issue.collective == "send"]
            got = [at for at in y if at.issue.collective == "receive"]
            lines += _first(axis, p, sent, q, got, message=True, sized=even)
        rest = ([at for at in z if at.issue.peer < 0] for z in (mine, its))
        lines += _first(axis, one, next(rest), other, next(rest))
    return lines


def _over(issued: Iterable[At], axis: str) -> list[At]:
    return [at for at in issued if at.issue.axis == axis]


def _messages(issued: Iterable[At]) -> dict[tuple[str, int], list[At]]:
    """(send or receive, the other side) -> these, in their order."""
    found: dict[tuple[str, int], list[At]] = {}
    for at in issued:
        found.setdefault((at.issue.collective, at.issue.peer), []).append(at)
    return found


def _first(
    axis: str,
    one: int,
    mine: Sequence[At],
    other: int,
    its: Sequence[At],
    message: bool = False,
    sized: bool = True,
) -> Iterator[str]:
    """The first place where two ranks differ. message: one sends what the other receives."""

    def alike(at: At | None) -> tuple | None:
        if at is None or not message:
            return at and at.issue
        return at.issue.dtype, at.issue.bytes if sized else 0

    for i, (x, y) in enumerate(zip_longest(mine, its)):
        if alike(x) != alike(y):
            what = "message" if message else "collective"
            yield (
                f"{what} {i + 1} over {axis} differs: rank {one}: {x or 'nothing more'}; "
                f"rank {other}: {y or 'nothing more'}"
            )
            return
