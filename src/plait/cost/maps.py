"""Linear maps of a chunk, tensor by tensor, and their weight gradients that are put off.

It mirrors the maps of `models/layers.py`, `parallel/tensor.py` and `parallel/deferred.py`. Where
weight gradients are put off (action I), a map leaves its input and its outputs' gradients, and W
works them off in the same order: under sequence parallelism it gathers the input anew, makes a
weight gradient, adds it to its bucket, and lets the pair go.
"""

from collections.abc import Sequence
from typing import NamedTuple

from plait.cost.buffers import Engine
from plait.cost.data import buckets_of
from plait.cost.parts import Part
from plait.cost.shapes import Shapes
from plait.cost.tape import Tape
from plait.spec.chunks import TABLE, chunk_units
from plait.spec.job import Job


class PutOff(NamedTuple):
    """Gradients that W makes.

    Attributes:
        names: parameters, in the order in which their gradients are made.
        held: (class, bytes) of what is kept for them.
        gathered: bytes of the input when it is gathered anew.
        made: they are made there, and were not kept themselves.
        early: what is gathered is let go before they arrive.
    """

    names: tuple[str, ...]
    held: tuple[tuple[str, int], ...] = ()
    gathered: int = 0
    made: bool = True
    early: bool = False


class Maps:
    """Maps and sizes of a chunk on a rank; what they take and drop is told to a tape.

    Args:
        split: the schedule has weight gradients of its own, so that all maps can put them off.

    Attributes:
        s: sizes of a micro batch. numel: parameter -> elements on this rank.
        stream, whole: bytes of this rank's part of the residual stream, and of the stream of all
            tp ranks.
        queue: what was put off in the last I; None where gradients are made at once.
    """

    def __init__(self, job: Job, part: Part, split: bool):
        self.job, self.model, self.layout, self.part = job, job.model, job.layout, part
        self.units = chunk_units(job.model, job.layout, part.chunk)
        buckets = buckets_of(job, part.chunk)
        self.engine = Engine(job, self.units, buckets)
        self.tape = self.engine.tape
        self.numel = {e.parameter.name: e.numel for b in buckets for e in b.entries}
        self.s = s = Shapes.of(job)
        self.stream, self.whole = s.c * s.rows * s.hidden, s.c * s.tokens * s.hidden
        self.tp, self.rows = job.layout.tp > 1, s.rows < s.tokens
        #: Maps are rewritten (`parallel.tensor`), one function for all of one input.
        self.columns, self.split = self.tp or split, split
        self.after = job.model.norm_at in ("output", "both")  # a norm of a branch's result
        self.queue: list[PutOff] | None = None
        self.shared = False  # the gradient of the stream is one that a map keeps

    def on(self, tape: Tape) -> None:
        """From now on another tape is told."""
        self.tape = self.engine.tape = tape

    # -- gradients

    def weight(self, name: str) -> int:
        """Bytes of a parameter's gradient; a tied head's is the embedding's."""
        return self.s.c * self.numel[name if name in self.numel else TABLE]

    def arrive(self, *names: str, weights: bool = False, kind: str = "") -> None:
        """Gradients of parameters, of class `kind`, are added to their buckets and dropped; where
        gradients are put off, small ones are kept, as they are, for later. weights: they are there
        already."""
        tied = "head.output.weight" not in self.numel and not self.part.embed
        names = (TABLE if tied and name == "head.output.weight" else name for name in names)
        found = [(name, self.weight(name)) for name in names if name in self.numel]
        self.tape.take(0 if weights else sum(n for _, n in found), kind)
        for name, n in found:
            if self.queue is not None:
                self.put_off([name], (kind or self.tape.kind, n), made=False)
            else:
                self.engine.arrive(name)
                self.tape.drop(n, kind)

    def put_off(
        self,
        names: Sequence[str],
        *held: tuple[str, int],
        gathered: int = 0,
        made: bool = True,
        early: bool = False,
    ) -> None:
        """The gradients of maps are left for W; what is held for them has been taken before."""
        assert self.queue is not None
        self.queue.append(PutOff(tuple(names), held, gathered, made, early))

    def weight_gradients(self, queue: Sequence[PutOff]) -> None:
        """Action W: works off what was put off."""
        tape = self.tape
        for names, held, gathered, made, early in queue:
            tape.take(gathered, "buffers")
            for name in names:
                tape.take(self.weight(name) if made else 0)
                tape.drop(gathered if early else 0, "buffers")
                self.engine.arrive(name if name in self.numel else TABLE)
                tape.drop(self.weight(name) if made else 0)
            tape.drop(0 if early else gathered, "buffers")
            for kind, n in held:
                tape.drop(n, kind)

    # -- several maps of one input, [t, hidden]

    def fan_out(self, *widths: int, inputs: int = 0, local: bool = False) -> None:
        """Leaves the outputs of maps of one input, which is `inputs` wide if not hidden. local: of
        this rank's rows alone."""
        s = self.s
        whole = s.c * s.tokens * (inputs or s.hidden)
        with self.tape.during(whole if self.rows and not local else 0, "buffers"):
            self.tape.take(s.c * (s.rows if local else s.tokens) * sum(widths))

    def fan_out_backward(
        self,
        widths: dict[str, int],
        kept: int,
        input: str = "activations",
        inputs: int = 0,
        local: bool = False,
        others: bool = False,
    ) -> None:
        """Turns the outputs' gradients into the input's, [t, hidden]; of the kept input, which is
        of class `input`, it drops so many bytes. inputs, local: see `fan_out`. others: somebody
        keeps the input longer than maps that are put off."""
        s, tape, rows = self.s, self.tape, self.rows and not local
        tokens, inputs = s.rows if local else s.tokens, inputs or s.hidden
        stream, whole = s.c * s.rows * inputs, s.c * tokens * inputs
        gradients = s.c * tokens * sum(widths.values())
        if not self.columns:
            for done, (name, width) in enumerate(reversed(widths.items())):
                weight = f"{name}.weight"
                tape.take(stream + self.weight(weight))
                tape.drop(s.c * tokens * width)
                tape.drop(kept if done == len(widths) - 1 else 0, input)
                tape.spike(stream if done else 0)  # the sum with those before
                tape.drop(stream if done else 0)
                self.arrive(f"{name}.bias")
                self.arrive(weight, weights=True)
            return
        gathered = whole if rows else 0
        later = self.queue is not None
        tape.take(0 if later else gathered, "buffers")
        tape.take(whole, "buffers" if rows else "")
        if rows:
            tape.take(stream)
            tape.drop(whole, "buffers")
        if later:
            names = [f"{n}.{kind}" for n in widths for kind in ("weight", "bias")]
            held = (input, 0 if others else stream), (tape.kind, gradients)
            self.put_off([n for n in names if self._has(n)], *held, gathered=gathered)
            return
        made = [n for name in widths for n in (f"{name}.weight", f"{name}.bias") if self._has(n)]
        tape.take(sum(map(self.weight, made)))
        tape.drop(gathered, "buffers")
        tape.drop(gradients)
        tape.drop(kept, input)
        self.arrive(*made, weights=True)

    def _has(self, name: str) -> bool:
        return name in self.numel or name == "head.output.weight"

    # -- the map that ends a region, [T, .] -> [t, hidden]

    def leave(self, biased: bool) -> None:
        """Leaves its output."""
        with self.tape.during(self.whole if self.rows else 0, "buffers"):
            self.tape.take(self.stream)
        if biased and self.columns:
            self.tape.spike(self.stream)

    def leave_or_stop(self, biased: bool, stop: bool) -> None:
        """`leave`; or what is made of it where recomputation stops as soon as it has the map's
        input: torch's own map says what it keeps before it computes, one that can put off its
        weight gradient after."""
        if not stop:
            self.leave(biased)
        elif self.split:
            self.tape.spike(self.whole)

    def leave_backward(
        self, name: str, width: int, kept: int, own: int | None = None, holds: int | None = None
    ) -> None:
        """Leaves the gradient of the map's input; of that input, which backward of the region
        needs no more, it drops `kept` bytes. The output's gradient is dropped too, unless it is
        the stream's and goes on past the branch. own: bytes of it that are let go, if not so.
        holds: bytes that live as long as the input, if it is a part of more."""
        s, tape, weight = self.s, self.tape, f"{name}.weight"
        if self.columns:  # the bias is added for itself; otherwise it is the map's
            self.arrive(f"{name}.bias")
        if own is None:
            own = self.stream if self.after or self.model.dropout else 0
        input = s.c * s.tokens * width
        gathered = self.whole if self.rows else 0
        if self.queue is not None:
            with tape.during(gathered, "buffers"):
                tape.drop(own if self.rows else 0)
                tape.take(input + (self.stream if self.rows else 0))
            held = (tape.kind, input if holds is None else holds), (tape.kind, self.stream)
            self.put_off([weight], *held, gathered=gathered)
            self.shared = not self.rows and not own
            return
        with tape.during(gathered, "buffers"):
            tape.drop(own if self.rows else 0)
            tape.take(input + self.weight(weight))
            tape.drop(kept + (0 if self.rows else own))
        if not self.columns:
            self.arrive(f"{name}.bias")
        self.arrive(weight, weights=True)

    # -- what is between the maps of an MLP

    def product_backward(self, n: int) -> None:
        """Turns the gradient of an MLP's inner product, n bytes, into those of its factors."""
        if self.model.gated:
            self.tape.take(3 * n)  # both gradients and a factor of one
            self.tape.drop(4 * n)  # the factor, the product's gradient, gate, up
        else:
            self.tape.take(n)
            self.tape.drop(2 * n)
