"""A step of one rank: the actions of its pipeline one after the other, told to a tape.

It mirrors `parallel/pipeline.py`. Beside what the chunks hold (`cost/activations.py`) there are

    a received input       from RECV_F to the end of the chunk's backward
    a received gradient    from RECV_B to the end of the backward that it is for
    what was made          until it has been used on this rank, or sent: then until UNDER_WAY more
                           went the same way to the same rank, or the end of the pipeline's part

An action of a chunk does the same whenever it comes, but for the first micro batch whose gradients
are reduced; so it is gone through once and then played back. And in the steady state a schedule
does the same few actions again and again: where as much is alive as was before, what has been done
since is not gone through once more.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from plait.cost.activations import Chunk
from plait.cost.ending import Ending
from plait.cost.parts import Part
from plait.cost.tape import Tape
from plait.schedules.table import Action
from plait.schedules.transfers import UNDER_WAY
from plait.spec.job import Job


class Step:
    """A rank's step as `train.program.Program.step` runs it.

    Args:
        parts: the chunks that the rank holds. split: some weight gradients of the schedule are
            actions of their own.
        tape: what is told, states included.
    """

    def __init__(self, job: Job, parts: Iterable[Part], split: bool, tape: Tape):
        self.chunks = {part.chunk: Chunk(job, part, split) for part in parts}
        self.tape = tape
        self.stream = next(iter(self.chunks.values())).stream
        self.recorded: dict[tuple[str, int, bool], Tape] = {}

    def run(
        self,
        actions: Iterable[Action],
        place: Mapping[tuple[int, int], int],
        exchanged: int,
        own: int,
        ending: Ending,
    ) -> None:
        """All actions of the rank, and the optimizer.

        Args:
            actions: with transfers. place: (chunk, micro batch) -> stage.
            exchanged: bytes of the largest gradient that comes from other stages, of all of them.
            own: bytes of what is this rank's of all samples, where that is not all.
            ending: what comes after them.
        """
        tape, sent = self.tape, Counter()
        tape.enter("forward", "activations")
        tape.take(own + 8)  # valid tokens are counted
        tape.enter("loss", "logits")
        tape.enter("forward", "activations")
        tape.take(8 + ending.begin)  # the loss
        program, seen, at, before = self.effects(actions, place), {}, 0, None
        while at < len(program):
            kind, what = program[at]
            if kind == "F":
                # With the chunk before: chunks take turns of several micro batches.
                alive = before, what, *tape.now.values(), *sent.values()
                start, period = at, at - seen.get(alive, at)
                while period and program[at : at + period] == program[at - period : at]:
                    at += period
                seen[alive] = at
                if at > start:
                    continue
                before = what
            if kind.startswith("RECV"):
                tape.enter("forward" if kind == "RECV_F" else "backward", "activations")
                tape.take(self.stream)
            elif kind.startswith("SEND"):
                full = sent[kind, what] == UNDER_WAY
                tape.drop(self.stream if full else 0, "activations")
                sent[kind, what] += not full
            else:
                tape.replay(self.action(kind, *what))
            at += 1
        tape.drop(self.stream * sent.total(), "activations")
        tape.enter("backward", "activations")
        tape.spike(exchanged)
        tape.drop(own)
        ending.run(tape)

    def effects(
        self, actions: Iterable[Action], place: Mapping[tuple[int, int], int]
    ) -> list[tuple[str, Any]]:
        """What each action depends on: two that are equal do the same."""
        found: list[tuple[str, Any]] = []
        accumulated = dict.fromkeys(self.chunks, False)
        for kind, chunk, micro in actions:
            what: Any = None
            if kind.startswith("SEND"):  # the stage that it is sent to
                what = place[chunk + (1 if kind == "SEND_F" else -1), micro]
            elif not kind.startswith("RECV"):
                what = chunk, kind in "BW" and accumulated[chunk]
                accumulated[chunk] |= kind in "BW"
            found.append((kind, what))
        return found

    def action(self, kind: str, chunk: int, accumulated: bool) -> Tape:
        """What an action does."""
        key = kind, chunk, accumulated
        if key not in self.recorded:
            if kind == "W":  # works off what an I of the same chunk has left
                self.chunks[chunk].record("I", accumulated)
            self.recorded[key] = self.chunks[chunk].record(kind, accumulated)
        return self.recorded[key]


def plain(micro_batches: int) -> Iterable[Action]:
    """The actions without a pipeline: forward and backward of one micro batch after the other."""
    pairs = ((Action("F", 0, i), Action("B", 0, i)) for i in range(micro_batches))
    return chain.from_iterable(pairs)
