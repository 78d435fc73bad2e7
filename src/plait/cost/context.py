"""What context parallelism sends, and what its attention holds. It mirrors `parallel/context.py`.

With T tokens of a micro batch on a rank, q the width of its query heads and k, v those of its KV
heads (under tensor parallelism this rank's; KV heads copied where Ulysses has more ranks than
there are), a layer sends for each micro batch, in the compute dtype,

                  forward                                backward
    ring          s - 1 messages of T (k + v)            2 (s - 1): gradients follow what they are of
    all-gather    an all-gather of n T (k + v)           the same, and a reduce-scatter
    Ulysses       all-to-alls of T (q + k + v) and T q   the same

of a ring of n = cp / ulysses ranks, of which a query sees s blocks (n, or fewer under a window).
Ring: Liu et al. 2310.01889 section 3. All-gather: Llama 3, 2407.21783, section 3.3.2. Ulysses: Jacobs et al.
2309.14509 section 3.1; inside of one of the others (2405.07719) as written: a group of `ulysses`
ranks holds as many times the positions and as many times fewer heads.
"""

from dataclasses import dataclass
from functools import lru_cache

from plait.cost.dtypes import dtypes_of, size_of
from plait.cost.ledger import TrafficLedger
from plait.cost.parts import Part
from plait.cost.shapes import Shapes
from plait.spec.job import Job
from plait.spec.layout import Layout
from plait.spec.sequence import ring_steps, sample_split


@dataclass(frozen=True)
class Widths:
    """What a rank's attention works on.

    Attributes:
        copies: times that KV heads are copied before Ulysses deals them out.
        q, kv: widths of all that a rank gives away: its query heads, its KV heads (keys, or as much
            again for values) with their copies.
        ring, ulysses: ranks of the two axes.
    """

    copies: int
    q: int
    kv: int
    ring: int
    ulysses: int

    @staticmethod
    def of(job: Job) -> "Widths":
        s, ulysses = Shapes.of(job), job.layout.ulysses
        copies = max(1, ulysses // s.kv_heads)
        return Widths(copies, s.q, copies * s.kv, job.layout.cp // ulysses, ulysses)


def steps(job: Job, layer: int) -> int:
    """Blocks that a rank of the ring looks at in a layer, its own included."""
    window = None if job.model.is_full_attention(layer) else job.model.window
    return _steps(job.layout, job.train.seq_len, window)


@lru_cache(maxsize=64)
def _steps(layout: Layout, seq: int, window: int | None) -> int:
    return ring_steps(sample_split(layout, seq).joined(layout.ulysses), window)


def context_traffic(job: Job, ledger: TrafficLedger, stage: int, part: Part) -> None:
    """Enters what the ring ("cp") and Ulysses send in one step for a part of the model on a
    stage."""
    layout = job.layout
    if layout.cp == 1:
        return
    w, dtype = Widths.of(job), dtypes_of(job).compute
    tokens = Shapes.of(job).tokens
    kv = size_of(dtype, tokens, 2 * w.kv)
    heads = (size_of(dtype, tokens, w.q + 2 * w.kv), size_of(dtype, tokens, w.q))
    again = layout.recompute == "full" or "attention" in layout.recomputed
    # Attention keeps its output, so nothing of it can be left out when it is repeated.
    passes = ["forward", "backward"] + ["recompute"] * again

    for layer in part.layers:
        messages = steps(job, layer) - 1
        for phase in passes:
            back = phase == "backward"

            def add(
                axis: str, collective: str, bytes: int, size: int, count: int = 1, phase: str = phase
            ) -> None:
                count *= part.micro_batches
                ledger.add(stage, axis, collective, phase, dtype, bytes, size, count)

            for bytes in heads:
                add("ulysses", "all-to-all", bytes, w.ulysses)
            if layout.cp_method == "ring":
                add("cp", "send", kv, w.ring, messages * (2 if back else 1))
                continue
            add("cp", "all-gather", w.ring * kv, w.ring)
            if back:
                add("cp", "reduce-scatter", w.ring * kv, w.ring)
