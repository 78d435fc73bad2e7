"""A pipeline schedule as data: for each rank, what it does in which order.

    F  forward              B  the whole backward
    I  input gradient       W  weight gradient, some time after I

of one chunk (a virtual stage: a run of layers, numbered in model order) and one micro batch.
`1F0` is written as torch.distributed.pipelining writes it: forward of chunk 1, micro batch 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Action(NamedTuple):
    """One thing that a rank does: kind F, I, W or B, of a chunk, for a micro batch.

    In a table with transfers (see `schedules.transfers`) also SEND_F (the chunk's output), RECV_F
    (its input), SEND_B (the gradient of its input), RECV_B (the gradient of its output).
    """

    kind: str
    chunk: int
    micro: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.micro}"


@dataclass(frozen=True)
class Table:
    """The actions of every rank, in its order; only what is computed, without transfers.

    A chunk may be on several ranks (in DualPipe on two); a micro batch passes it on one of them, so
    the table itself says where everything happens. Whether it makes sense is for `schedules.check`.
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]

    @cached_property
    def chunks(self) -> int:
        """How many the model is cut into."""
        return 1 + max(a.chunk for actions in self.ranks for a in actions)

    @cached_property
    def micro_batches(self) -> int:
        return 1 + max(a.micro for actions in self.ranks for a in actions)

    @cached_property
    def place(self) -> Mapping[tuple[int, int], int]:
        """(chunk, micro batch) -> the rank where it is."""
        return {(a.chunk, a.micro): r for r, actions in enumerate(self.ranks) for a in actions}

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """For each rank the chunks that it holds, ascending."""
        return tuple(tuple(sorted({a.chunk for a in actions})) for actions in self.ranks)

    @property
    def split(self) -> bool:
        """Whether weight gradients are actions of their own."""
        return any(a.kind == "W" for actions in self.ranks for a in actions)

    @property
    def share(self) -> float:
        """A chunk as a part of one rank's whole share of a micro batch's work."""
        return len(self.ranks) / self.chunks
