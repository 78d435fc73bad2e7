"""A rank's step cut at its actions, so that what repeats need be run once.

What an action does to the ledger depends on little: which chunk it is of, where its input comes
from and its output goes, whether gradients of a micro batch are there already, whether they are
the chunk's last, whether a message waits for an earlier one. So a few micro batches are run, such
that every kind of action of the whole row is among them, and each is cut out as a `Segment`: what
it sent, and what it took, let go and held at most beyond what was there before. The step of all
micro batches is these one after the other.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from torch import Tensor, nn

from plait.cost.ledger import NOTHING, Amount, TrafficLedger
from plait.cost.tape import Tape
from plait.schedules.table import Action, Table
from plait.schedules.transfers import UNDER_WAY
from plait.spec.model import Model
from plait.trace.fake import fake_batch
from plait.trace.memory import MemoryTracker
from plait.trace.recorder import Issue, Recorder
from plait.train.program import Program

#: The kind of an action, or a part of the step that is none.
Key = Hashable
BEFORE = "before the pipeline"
#: What follows the pipeline, as the program notes it.
AFTER = (
    "past its last action of the pipeline",
    "waiting for the sums of gradients",
    "waiting for the gradient norm",
    "in the optimizer, or gathering its weights",
)
WHOLE = "the whole step"


@dataclass
class Segment:
    """A part of a step: what it sent, its memory on a tape that began with nothing, and its
    collectives in their order."""

    traffic: TrafficLedger = field(default_factory=TrafficLedger)
    issued: tuple[Issue, ...] = ()
    tape: Tape = field(default_factory=Tape)

    def same(self, other: "Segment") -> bool:
        """To the byte."""
        mine, its = ((s.traffic, s.issued, s.tape.now, s.tape.peaks) for s in (self, other))
        return mine == its


def joined(segments: Sequence[Segment]) -> Segment:
    """One after the other."""
    whole = Segment(issued=tuple(issue for s in segments for issue in s.issued))
    for s in segments:
        whole.tape.replay(s.tape)
        add_traffic(whole.traffic, s.traffic)
    return whole


def add_traffic(
    ledger: TrafficLedger, more: TrafficLedger, times: int = 1, stage: int | None = None
) -> None:
    """Enters what was sent so many times, as a rank of a stage (of the same one when None)."""
    for entry, amount in more.entries.items():
        entry = entry if stage is None else entry._replace(stage=stage)
        before = ledger.entries.get(entry, NOTHING)
        sums = (a + times * b for a, b in zip(before, amount, strict=True))
        ledger.entries[entry] = Amount(*sums)


@dataclass
class Traced:
    """What was seen of a rank's step.

    Attributes:
        held: class -> bytes when it began.
        parts: kind of action -> it, in pieces: (the layer that they begin with or -1, piece).
        odd: a line for each action that issued something else than one of its kind before.
    """

    held: Mapping[str, int]
    parts: dict[Key, list[tuple[int, Segment]]]
    odd: Sequence[str] = ()

    def __post_init__(self) -> None:
        self._joined: dict[Key, Segment] = {}

    def cut(self, key: Key) -> bool:
        """Whether it was cut at layers."""
        return any(layer >= 0 for layer, _ in self.parts[key])

    def and_(self, other: "Traced") -> "Traced":
        """With the kinds that another rank has moreover."""
        return Traced(self.held, other.parts | self.parts, (*self.odd, *other.odd))

    def __getitem__(self, key: Key) -> Segment:
        if key not in self._joined:
            self._joined[key] = joined([piece for _, piece in self.parts[key]])
        return self._joined[key]


# ------------------------------------------------------------------------------------------
# Kinds


def steady(model: Model) -> int:
    """From which micro batch on actions of a chunk are all alike: the second adds gradients to
    those of the first; mixtures have what was chosen last, and a sum that the second makes."""
    return 1 if model.moe is None else 2


def kinds(actions: Sequence[Action], table: Table, stage: int, steady: int) -> list[Key]:
    """The kind of each action of a stage's row, with transfers; chunks by their place there."""
    place, number = table.place, {c: i for i, c in enumerate(table.held[stage])}
    ends = {a.chunk: i for i, a in enumerate(actions) if a.kind in "WB"}
    begun: Counter = Counter()
    waiting: Counter = Counter()  # messages under way
    found: list[Key] = []
    for i, (kind, chunk, micro) in enumerate(actions):
        key: tuple = kind, number[chunk]
        if kind.startswith("SEND"):
            way = kind, place[chunk + (1 if kind == "SEND_F" else -1), micro]
            key += (waiting[way] == UNDER_WAY,)
            waiting[way] = min(waiting[way] + 1, UNDER_WAY)
        elif kind in "FBIW":
            key += tuple(place.get((chunk + step, micro)) == stage for step in (-1, 1))
            kind = "B" if kind == "W" else kind  # of a chunk's gradients there is one row
            key += (min(begun[kind, chunk], steady), kind == "B" and ends[chunk] == i)
            begun[kind, chunk] += 1
        if i == len(actions) - 1:  # then messages that are under way are waited for
            key += tuple(sorted((kind, n) for (kind, _), n in waiting.items()))
        found.append(key)
    return found


def covering(actions: Sequence[Action], table: Table, stage: int, steady: int) -> set[int]:
    """Micro batches whose actions alone are of every kind that the row has."""
    wanted = kinds(actions, table, stage, steady)
    chosen: set[int] = set()
    while True:
        row = [a for a in actions if a.micro in chosen]
        missing = set(wanted) - set(kinds(row, table, stage, steady))
        more = (a.micro for a, key in zip(actions, wanted, strict=True) if key in missing)
        another = next((m for m in more if m not in chosen), None)
        if another is None:
            return chosen if not missing else {a.micro for a in actions}
        chosen.add(another)


# ------------------------------------------------------------------------------------------
# Running


def trace(program: Program, full: bool, tell: Callable[[str], None]) -> Traced:
    """Runs a step of a rank: actions of every kind, cut at their layers too where there is no
    pipeline; or with `full` all of it, as one piece. tell: told what it is about to do."""
    job, stage = program.job, program.mesh["pp"].rank
    row, table = program.actions, program.table
    if not full:
        chosen = covering(row, table, stage, steady(job.model))
        row = program.actions = tuple(a for a in row if a.micro in chosen)
    coming = (
        [] if full else list(zip(row, kinds(row, table, stage, steady(job.model)), strict=True))
    )
    batches = [fake_batch(job)] * job.train.accumulation  # data is not the program's to count
    with MemoryTracker(program) as tracker, Recorder(program.mesh) as recorder:
        watch = _Watch(tracker, recorder, [(f"in {a}", key) for a, key in coming])
        held = tracker.before

        def note(doing: str) -> None:
            tell(doing)
            if not full:
                watch.note(doing)

        program.mesh.scope.note = note
        hooks = watch.at_layers(program) if job.layout.pp == 1 and not full else []
        program.step(batches, 1)
        watch.end()
    for hook in hooks:
        hook.remove()
    return Traced(held, {WHOLE: watch.pieces} if full else watch.parts, watch.odd)


class _Watch:
    """Cuts where an action begins, or a layer in it: forward, and backward."""

    def __init__(
        self, tracker: MemoryTracker, recorder: Recorder, coming: Iterable[tuple[str, Key]]
    ):
        self.tracker, self.recorder = tracker, recorder
        self.coming = [*coming, *zip(AFTER, AFTER, strict=True)][::-1]
        self.parts: dict[Key, list[tuple[int, Segment]]] = {}
        self.seen: dict[Key, tuple[str, list[str]]] = {}  # what the first of a kind issued
        self.odd: list[str] = []
        self._begin(BEFORE, BEFORE)

    def _begin(self, key: Key, doing: str) -> None:
        self.layer, self.pieces, self.doing = -1, [], doing
        self.key = key
        self.parts[key] = self.pieces  # of several that are alike, the last

    def end(self) -> None:
        """Ends a piece."""
        segment = Segment(*self.recorder.cut(), self.tracker.cut())
        self.pieces.append((self.layer, segment))

    def note(self, doing: str) -> None:
        if self.coming and doing == self.coming[-1][0]:
            self.end()
            self._compare()
            self._begin(self.coming.pop()[1], doing)

    def _compare(self) -> None:
        """Holds what has been issued against what the first action of the kind has."""
        mine = [str(x._replace(peer=-1)) for _, s in self.pieces for x in s.issued]
        before, its = self.seen.setdefault(self.key, (self.doing, mine))
        for i, (a, b) in enumerate(zip_longest(mine, its, fillvalue="nothing more")):
            if a != b:
                where = f"collective {i + 1} {self.doing}"
                self.odd.append(f"{where} is not that {before}: {a}; {b}")
                return

    def at_layers(self, program: Program) -> list:
        def begins(number: int) -> None:
            self.end()
            self.layer = number

        def watched(number: int, layer: nn.Module) -> list:
            def backward(_: nn.Module, __: object, out: Tensor) -> None:
                out.register_hook(lambda _: begins(number))

            return [
                layer.register_forward_pre_hook(lambda *_: begins(number), prepend=True),
                layer.register_forward_hook(backward, prepend=True),
            ]

        modules = program.modules.values()
        layers = ((int(name), layer) for m in modules for name, layer in m.layers.items())
        return [hook for number, layer in layers for hook in watched(number, layer)]
