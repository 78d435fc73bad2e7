"""What context parallelism sends, and what its attention holds. It mirrors `parallel/context.py`.

With T tokens of a micro batch on a rank, q the width of its query heads and k, v those of its KV
heads (under tensor parallelism this rank's; KV heads copied where Ulysses has more ranks than
there are), a layer sends for each micro batch, in the compute dtype,

                  forward                                backward
    ring          s - 1 messages of T (k + v)            2 (s - 1): gradients go where blocks go
    all-gather    an all-gather of n T (k + v)           the same, and a reduce-scatter
    Ulysses       all-to-alls of T (q + k + v) and T q   the same

in a ring of n = cp / ulysses ranks, of which one looks at s blocks (n; fewer under a window).
Ring: Liu et al. 2310.01889, section 3. All-gather: Llama 3, 2407.21783, section 3.3.2. Ulysses:
Jacobs et al. 2309.14509, section 3.1. Inside of one of the others (2405.07719) the same formulas
hold: a group of `ulysses` ranks has as many times the positions, and each the fewer heads.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from plait.cost.dtypes import dtypes_of, size_of
from plait.cost.kernels import Kernels
from plait.cost.ledger import TrafficLedger
from plait.cost.parts import Part
from plait.cost.shapes import Shapes
from plait.cost.tape import Tape
from plait.spec.calls import Call, calls
from plait.spec.job import Job
from plait.spec.layout import Layout
from plait.spec.sequence import pairs, sample_split, sample_steps

#: Of each sample of a micro batch the lengths of its documents.
Documents = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Widths:
    """What a rank's attention works on.

    Attributes:
        copies: times that KV heads are copied before Ulysses deals them out.
        q, k, v, out: widths of all that a rank gives away: its query heads, the keys and values of
            its KV heads with their copies, its part of the output.
        ring, ulysses: ranks of the two axes.
    """

    copies: int
    q: int
    k: int
    v: int
    out: int
    ring: int
    ulysses: int

    @staticmethod
    def of(job: Job) -> "Widths":
        s, mla, ulysses = Shapes.of(job), job.model.mla, job.layout.ulysses
        ring = job.layout.cp // ulysses
        if mla:  # heads all have keys and values of their own, and of two widths
            width, v = s.heads * (mla.nope_dim + mla.rope_dim), s.heads * mla.v_dim
            return Widths(1, width, width, v, v, ring, ulysses)
        copies = max(1, ulysses // s.kv_heads)
        return Widths(copies, s.q, copies * s.kv, copies * s.kv, s.q, ring, ulysses)

    @property
    def block(self) -> int:
        """Keys and values."""
        return self.k + self.v


def window_of(job: Job, layer: int) -> int | None:
    """How far a layer's queries look back (None: to the beginning)."""
    return None if job.model.is_full_attention(layer) else job.model.window


def steps(job: Job, layer: int) -> int:
    """Blocks that a rank of the ring looks at in a layer, its own included."""
    return sample_steps(job.layout, job.train.seq_len, window_of(job, layer))


def context_traffic(job: Job, ledger: TrafficLedger, stage: int, part: Part) -> None:
    """Enters what the ring ("cp") and Ulysses send in one step for a part of the model on a
    stage."""
    layout = job.layout
    if layout.cp == 1:
        return
    w, dtype = Widths.of(job), dtypes_of(job).compute
    tokens = Shapes.of(job).tokens
    heads = (size_of(dtype, tokens, w.q + w.block), size_of(dtype, tokens, w.out))
    block = size_of(dtype, tokens, w.block)
    again = layout.recompute == "full" or "attention" in layout.recomputed
    # Attention keeps its output, so nothing of it can be left out when it is repeated.
    passes = ["forward", "backward"] + ["recompute"] * again

    for layer in part.layers:
        messages = steps(job, layer) - 1
        for phase in passes:
            back = phase == "backward"

            def add(axis: str, collective: str, bytes: int, size: int, count: int = 1) -> None:
                count *= part.micro_batches
                ledger.add(stage, axis, collective, phase, dtype, bytes, size, count)  # noqa: B023

            for bytes in heads:
                add("ulysses", "all-to-all", bytes, w.ulysses)
            if layout.cp_method == "ring":
                add("cp", "send", block, w.ring, messages * (2 if back else 1))
                continue
            add("cp", "all-gather", w.ring * block, w.ring)
            if back:
                add("cp", "reduce-scatter", w.ring * block, w.ring)


def imbalance(job: Job, micro_batches: Iterable[Documents]) -> float:
    """Most attention of a rank of the ring over the mean, in all layers; 1 is perfect.

    micro_batches: of each sample of each the lengths of its documents. Ranks wait for each other in
    each micro batch, so the most of each counts.
    """
    layout, windows = job.layout, Counter(window_of(job, i) for i in range(job.model.layers))
    most = total = 0
    for samples in micro_batches:
        work = [0] * (layout.cp // layout.ulysses)
        for documents in samples:
            cut = sample_split(layout, documents).joined(layout.ulysses)
            whole = ((0, cut.seq),)
            for rank, shard in enumerate(cut.shards):
                for window, layers in windows.items():
                    work[rank] += layers * pairs(shard, whole, documents, window)
        most, total = most + max(work), total + sum(work)
    return most * (layout.cp // layout.ulysses) / total


# ------------------------------------------------------------------------------------------
# Memory


def fullest(layout: Layout) -> int:
    """The position in the ring of the rank that holds most for a moment.

    What a rank keeps is the same for all; what a call of the kernel makes is not. The second one
    looks at a block before its own, with all its queries, and at blocks behind, with half of them.
    """
    return min(1, layout.cp // layout.ulysses - 1)


def needs_calls(job: Job, layer: int) -> bool:
    """Whether torch's attention does not do for a layer (`models.heads.Heads.attend`)."""
    model, window = job.model, window_of(job, layer)
    bent = model.sinks or model.attention_softcap is not None
    short = window is not None and window < job.train.seq_len
    return job.layout.cp > 1 or bent or short or job.data.document_mask


class Core:
    """Attention over the cp ranks, from queries, keys and values to its output, on a tape.

    Of a layer, c bytes of a compute element and a of an accurate one, it keeps for backward

        without Ulysses    c T (q + k + v), the output c T q, log-sum-exps a T heads
        with it            the same for all positions of some heads, and the output once more when
                           it is back, which the next map keeps

    and has in flight two blocks of keys and values, in backward two of their gradients too; or
    all of the ring's at once, gathered.
    """

    def __init__(self, job: Job):
        self.job, self.s, self.w = job, Shapes.of(job), Widths.of(job)
        s, w = self.s, self.w
        self.several = job.layout.micro_batch > 1
        self.coarse = s.c < s.a
        self.q, self.block, self.out = (s.c * s.tokens * n for n in (w.q, w.block, w.out))
        self.wide_q, self.wide_block, self.wide_out = (
            s.a * s.tokens * n for n in (w.q, w.block, w.out)
        )
        self.lse = s.a * s.tokens * s.heads
        self.kernels = Kernels.of(job.model, s, job.layout.micro_batch, w.ulysses, w.q, w.k, w.v)
        #: Before Ulysses: queries, keys and values of all heads.
        self.given = self.q + self.block // w.copies if w.ulysses > 1 else 0

    @property
    def output(self) -> int:
        """Bytes of the output that the next map keeps, beside the one that attention keeps."""
        return self.out if self.w.ulysses > 1 else 0

    @property
    def keeps(self) -> int:
        """What attention keeps, its inputs included."""
        return self.q + self.block + self.out + self.lse

    # -- forward

    def forward(self, tape: Tape, layer: int, keep: bool) -> None:
        """Leaves what is kept, and with Ulysses the output beside it; what it was given is alive
        until the caller lets it go."""
        w, calls = self.w, _calls(self.job, layer)
        if w.ulysses > 1:
            self._to_heads(tape)
        n, block, kind = steps(self.job, layer), self.block, "buffers"
        if w.ring == 1:
            self._own(tape, calls)
        elif self.job.layout.cp_method == "ring":
            kind = "buffers" if n > 1 else ""
            tape.take(block, kind)
            tape.take(block if n > 1 else 0, kind)
            self._own(tape, calls)
            tape.drop(block, kind)
            for step in range(1, n):
                tape.take(0 if step + 1 == n else block, kind)
                self._pieces(tape, calls.others)
                tape.drop(block, kind)
        else:
            with self._gathering(tape):
                self._own(tape, calls)
            self._pieces(tape, calls.others)
            tape.drop(block * w.ring, kind)
        if self.job.model.sinks:  # the output is less by their share
            tape.spike(self.wide_out + self.lse)
        if self.coarse:
            tape.take(self.out)
            tape.drop(self.wide_out)
        if w.ulysses > 1:
            self._to_sequence(tape)
            tape.drop(0 if keep else self.keeps)

    def _own(self, tape: Tape, calls: "_Calls") -> None:
        """Leaves the output over this rank's own keys, accurate."""
        if calls.single:
            with tape.during(self.kernels.forward(calls.own[0])):
                tape.take(self.out + self.lse)
            if self.coarse:
                tape.take(self.wide_out)
                tape.drop(self.out)
            return
        tape.take(self.wide_out + self.lse)
        self._pieces(tape, calls.own)

    def _pieces(self, tape: Tape, calls: Iterable[Call]) -> None:
        """What calls make and what merging makes of it: two outputs weighted, their sum, four
        numbers a row."""
        s, kernels = self.s, self.kernels
        for call in calls:
            rows = (call.q1 - call.q0) * self.job.layout.micro_batch
            piece, turned = kernels.results(call), kernels.turned(call)
            merged = rows * s.a * (3 * kernels.out + 4 * kernels.heads)
            merged += piece if turned else 0
            tape.spike(piece + turned + max(merged, kernels.forward(call)))

    @contextmanager
    def _gathering(self, tape: Tape) -> Iterator[None]:
        """Leaves the blocks of all ranks of the ring; within, its own are still under way."""
        with tape.during(self.block):
            tape.take(self.block * self.w.ring, "buffers")
            yield

    def _to_heads(self, tape: Tape) -> None:
        """Leaves all positions of some heads beside what was given."""
        heads = self.q + self.block
        copies = self.block if self.w.copies > 1 else 0
        with tape.during(copies + heads), tape.during(heads):
            tape.take(heads)
            if self.several:
                tape.spike(heads)

    def _to_sequence(self, tape: Tape) -> None:
        """Leaves own positions of all heads beside the output."""
        with tape.during(self.out):
            tape.spike(self.out if self.several else 0)
            tape.take(self.out)

    # -- backward

    def backward(self, tape: Tape, layer: int, later: bool) -> None:
        """Turns the output's gradient into those of what was given; drops what was kept.

        later: the output map's weight gradient is put off.
        """
        w = self.w
        if w.ulysses > 1:
            with tape.during(self.out), tape.during(self.out if self.several else 0):
                tape.take(self.out)
            tape.drop(self.out)
        calls = _calls(self.job, layer)
        if w.ring == 1 and calls.single:
            with tape.during(self.kernels.backward(calls.own[0])):
                tape.take(self.q + self.block)
        else:
            tape.take(self.wide_q + self.wide_block)
            self._block_gradients(tape, layer, calls)
            if self.coarse:
                tape.take(self.q + self.block)
                tape.drop(self.wide_q + self.wide_block)
        output = self.out if later and not self.output else 0  # which that map keeps
        tape.drop(self.out + self.keeps - output)
        if w.ulysses > 1:
            self._gradients_to_sequence(tape)

    def _block_gradients(self, tape: Tape, layer: int, calls: "_Calls") -> None:
        """Gradients of one block of keys after the other."""
        w, n, block, wide = self.w, steps(self.job, layer), self.block, self.wide_block
        if w.ring == 1:
            self._piece_gradients(tape, calls.own)
        elif self.job.layout.cp_method == "ring":
            kind = "buffers" if n > 1 else ""
            sent = block if self.coarse else 0  # a share in the dtype of messages, if that differs
            tape.take(block, kind)
            tape.take(block if n > 1 else 0, kind)
            self._piece_gradients(tape, calls.own)
            tape.drop(block, kind)
            for step in range(1, n):
                tape.take(0 if step + 1 == n else block, kind)
                tape.take(wide)
                self._piece_gradients(tape, calls.others)
                if step > 1:  # what was sent and what came the step before
                    tape.drop(sent + block, kind)
                    tape.drop(0 if self.coarse else wide)
                tape.take(sent + block, kind)
                tape.drop(block, kind)
                tape.drop(wide if self.coarse else 0)
            if n > 1:
                tape.drop(sent + block, kind)
                tape.drop(0 if self.coarse else wide)
        else:
            with self._gathering(tape):
                self._piece_gradients(tape, calls.own)
            tape.take(wide * w.ring)
            self._piece_gradients(tape, calls.others)
            with tape.during(block * w.ring if self.coarse else 0, "buffers"):
                tape.take(block)
            tape.drop(block * w.ring, "buffers")
            tape.drop(block + wide * w.ring)

    def _piece_gradients(self, tape: Tape, calls: Iterable[Call]) -> None:
        kernels = self.kernels
        for call in calls:
            rows = (call.q1 - call.q0) * self.job.layout.micro_batch
            shares, inside = kernels.gradients(call), kernels.backward(call)
            turned = kernels.turned(call)
            if turned:  # the gradient of the output, the output and its log-sum-exps too
                turned += rows * (self.s.c * 2 * kernels.out + self.s.a * kernels.heads)
                inside = max(inside, shares)
            tape.spike(shares + turned + inside)

    def _gradients_to_sequence(self, tape: Tape) -> None:
        """Turns gradients of all positions of some heads into those of own positions."""
        s, heads = self.s, self.q + self.block
        with tape.during(heads), tape.during(heads if self.several else 0):
            tape.take(heads)
        tape.take(heads)  # of queries, keys and values by themselves
        if self.w.copies > 1:
            own = s.tokens * s.kv
            for _ in ("keys", "values"):
                tape.take(s.a * own)
                if self.coarse:
                    tape.take(s.c * own)
                    tape.drop(s.a * own)
            tape.drop(self.block)
        tape.drop(2 * heads)


class _Calls(NamedTuple):
    """The calls of the fullest rank of a ring: with its own keys, with the others'; whether the
    first is a single one."""

    own: tuple[Call, ...]
    others: tuple[Call, ...]

    @property
    def single(self) -> bool:
        return len(self.own) == 1


def _calls(job: Job, layer: int) -> _Calls:
    return _calls_of(job.layout, job.train.seq_len, window_of(job, layer))


@lru_cache(maxsize=64)
def _calls_of(layout: Layout, seq: int, window: int | None) -> _Calls:
    """Of calls of the same form one."""
    cut, mine = sample_split(layout, (seq,)).joined(layout.ulysses), fullest(layout)
    found = [calls(cut.shards[mine], keys, cut.documents, window) for keys in cut.shards]
    own = found.pop(mine)

    def forms(some: Iterable[Call]) -> tuple[Call, ...]:
        return tuple({(c.kind, c.q1 - c.q0, c.k1 - c.k0): c for c in some}.values())

    return _Calls(own if len(own) == 1 else forms(own), forms(c for f in found for c in f))
