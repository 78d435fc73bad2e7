"""The ledger: what one rank sends in an optimizer step, and what it holds.

The formulas of `cost/` write it without running anything; `trace/` writes the same from the
program as it runs. The two are compared entry by entry, and must be equal.
"""

from collections.abc import Container, Iterable
from dataclasses import astuple, dataclass
from typing import NamedTuple

#: What device memory is used for. parameters: weights that stay; gradients: those kept to the end
#: of a step; optimizer: Adam's states and master weights; activations: kept for backward;
#: logits: what head and loss make; gathered: weights that are there while a unit is in use
#: (ZeRO-3); buffers: what is being sent or has just arrived.
MEMORY_CLASSES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "gathered",
    "buffers",
)


@dataclass(frozen=True)
class StageMemory:
    """Bytes that a rank of a pipeline stage holds at one moment of a step.

    Attributes:
        stage: pipeline stage.
        moment: "forward", "loss", "backward" or "optimizer".
        total: the sum of the classes.
    """

    stage: int
    moment: str
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    gathered: int
    buffers: int
    total: int


@dataclass(frozen=True)
class Traffic:
    """What a rank sends of one kind in an optimizer step.

    Attributes:
        stage: pipeline stage.
        axis: tp, cp, ulysses, fsdp, dp_replicate, ep, etp, edp, pp or world.
        collective: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "send".
        phase: forward, backward, recompute, loss, norm or optimizer.
        dtype: of the elements, "bfloat16".
        count: messages.
        bytes: over all of them; of an all-reduce the tensor, of an all-gather the output, of a
            reduce-scatter the input, of an all-to-all the local buffer, of a send the message.
        wire_bytes: what one rank puts on the wire for them, see `wire_bytes`.
        inter_node: the axis leaves the fast domain of a cluster.
    """

    stage: int
    axis: str
    collective: str
    phase: str
    dtype: str
    count: int
    bytes: int
    wire_bytes: int
    inter_node: bool = False


def wire_bytes(collective: str, bytes: int, size: int) -> int:
    """Bytes that one of `size` ranks sends for one message under the ring algorithm.

    With n ranks a ring cuts the message in n pieces; an all-gather or a reduce-scatter passes on
    n - 1 of them, an all-reduce is the two one after the other, an all-to-all sends all pieces
    but its own (Patarasuk and Yuan, "Bandwidth optimal all-reduce", 2009). Rounded up.
    """
    if collective == "send":
        return bytes
    rounds = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}[collective]
    return -(-rounds * (size - 1) * bytes // size)


class Entry(NamedTuple):
    """What tells one row of a ledger from another."""

    stage: int
    axis: str
    collective: str
    phase: str
    dtype: str

    def __str__(self) -> str:
        return (
            f"stage {self.stage}: {self.collective} over {self.axis} in {self.phase} ({self.dtype})"
        )


class Amount(NamedTuple):
    """What is counted for an entry."""

    count: int
    bytes: int
    wire_bytes: int

    def __str__(self) -> str:
        return f"{self.count} x, {self.bytes} bytes, {self.wire_bytes} on the wire"


NOTHING = Amount(0, 0, 0)


class TrafficLedger:
    """What a rank sends in an optimizer step, gathered into entries."""

    def __init__(self) -> None:
        self.entries: dict[Entry, Amount] = {}

    def add(
        self,
        stage: int,
        axis: str,
        collective: str,
        phase: str,
        dtype: str,
        bytes: int,
        size: int,
        count: int = 1,
    ) -> None:
        """Adds `count` messages of `bytes` each over an axis of `size` ranks.

        An axis of one rank sends nothing.
        """
        if size == 1 or count == 0:
            return
        entry = Entry(stage, axis, collective, phase, dtype)
        before = self.entries.get(entry, NOTHING)
        self.entries[entry] = Amount(
            before.count + count,
            before.bytes + count * bytes,
            before.wire_bytes + count * wire_bytes(collective, bytes, size),
        )

    def of_stage(self, stage: int) -> "TrafficLedger":
        """What a rank of one stage sends."""
        result = TrafficLedger()
        result.entries = {e: a for e, a in self.entries.items() if e.stage == stage}
        return result

    def rows(self, inter_node: Container[str] = ()) -> list[Traffic]:
        """The entries in order; `inter_node` names the axes that leave a fast domain."""
        return [
            Traffic(*entry, *amount, entry.axis in inter_node)
            for entry, amount in sorted(self.entries.items())
        ]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrafficLedger) and self.entries == other.entries

    __hash__ = None  # it changes

    def __repr__(self) -> str:
        return "\n".join(str(astuple(row)) for row in self.rows())


def differences(predicted: TrafficLedger, measured: TrafficLedger) -> list[str]:
    """A line for each entry in which two ledgers are not the same; none when they agree."""
    return [
        f"{entry}: predicted {predicted.entries.get(entry, NOTHING)}; "
        f"measured {measured.entries.get(entry, NOTHING)}"
        for entry in sorted(predicted.entries.keys() | measured.entries.keys())
        if predicted.entries.get(entry) != measured.entries.get(entry)
    ]


#: How far the predicted peak of a moment may be from the measured one: a hundredth of it. Tensors
#: of a few numbers a token and scalars are not counted, which is allowed for in small models.
MEMORY_TOLERANCE = 0.01
MEMORY_SLACK = 2**20


def memory_differences(
    predicted: Iterable[StageMemory], measured: Iterable[StageMemory]
) -> list[str]:
    """A line for each moment whose peak was not predicted within the tolerance."""
    expected = {(row.stage, row.moment): row.total for row in predicted}
    lines = []
    for row in measured:
        total = expected.pop((row.stage, row.moment), 0)
        if abs(total - row.total) > max(MEMORY_TOLERANCE * row.total, MEMORY_SLACK):
            lines.append(_off(row.stage, row.moment, total, row.total))
    return lines + [_off(*key, total, 0) for key, total in expected.items()]


def _off(stage: int, moment: str, predicted: int, measured: int) -> str:
    return (
        f"stage {stage}: peak of {moment}: predicted {predicted} bytes; measured {measured} bytes "
        f"({MEMORY_TOLERANCE:.0%} or {MEMORY_SLACK} bytes are allowed)"
    )
