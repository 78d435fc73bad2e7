"""A tape: what is alive while a program makes and drops tensors, and when most of it was."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import inf

from plait.cost.ledger import MEMORY_CLASSES

#: Moments of a step. "loss" is the head: from its forward until backward is down at its input.
MOMENTS = ("forward", "loss", "backward", "optimizer")


class Tape:
    """What is alive, and when most of it was.

    What a program does again and again is recorded once, on a tape that begins with nothing, and
    played from there on: `replay` does to a tape what has been done to the other.

    Attributes:
        now: class -> bytes, beyond what was there at the beginning. total: their sum.
        peaks: moment -> `now` when its sum was largest, for the moments that were entered.
        moment: where in a step we are.
        kind: the class of what is taken unless it says otherwise.
    """

    def __init__(self, held: Mapping[str, int] | None = None):
        self.now = dict.fromkeys(MEMORY_CLASSES, 0) | (held or {})
        self.total = sum(self.now.values())
        self.most = dict.fromkeys(MOMENTS, -inf)
        self.peaks: dict[str, dict[str, int]] = {}
        self.moment, self.kind = "forward", "activations"

    def enter(self, moment: str, kind: str) -> None:
        """Another moment begins, in which tensors are of another class."""
        self.moment, self.kind = moment, kind
        self.take(0)

    def take(self, n: int, kind: str = "") -> None:
        """n bytes more are alive."""
        self.now[kind or self.kind] += n
        self.total += n
        if self.total >= self.most[self.moment]:
            self.most[self.moment] = self.total
            self.peaks[self.moment] = dict(self.now)

    def drop(self, n: int, kind: str = "") -> None:
        """n bytes are let go."""
        self.now[kind or self.kind] -= n
        self.total -= n

    def move(self, n: int, before: str, after: str) -> None:
        """n bytes are of another class."""
        self.now[before] -= n
        self.now[after] += n

    @contextmanager
    def during(self, n: int, kind: str = "") -> Iterator[None]:
        """n bytes are alive within."""
        kind = kind or self.kind
        self.take(n, kind)
        yield
        self.drop(n, kind)

    def spike(self, n: int) -> None:
        """n bytes are alive for a moment."""
        self.take(n)
        self.drop(n)

    def replay(self, other: "Tape") -> None:
        """What happened on another tape, which began with nothing, happens here."""
        now = self.now
        for moment, peak in other.peaks.items():
            total = self.total + other.most[moment]
            if total >= self.most[moment]:
                self.most[moment] = total
                self.peaks[moment] = {kind: n + peak[kind] for kind, n in now.items()}
        for kind, n in other.now.items():
            now[kind] += n
        self.total += other.total
