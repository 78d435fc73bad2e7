"""What a rank holds, moment by moment, by formula.

States come from the buckets exactly. For the rest the step is gone through tensor by tensor, as
the program makes and drops them: a `Tape` is told what is taken and what is let go, and remembers
when most was held. Sizes follow from the shapes below; what autograd keeps follows from the
functions of `models/layers.py`, `parallel/tensor.py` and torch:

    module       keeps for backward (bytes; c a compute element, a an accurate one)
    -----------  ------------------------------------------------------------------------------
    stream       the input of each branch, c t H (t: this rank's rows of the residual stream)
    RMSNorm      a number a row, a t                        LayerNorm: mean and 1 / deviation
    fan-out      its input, c t H: under sequence parallelism this rank's rows, gathered anew
    attention    q, k, v, the output: c T (2 q + 2 kv); log-sum-exp of each head, a T heads
    MLP          gate, up and their product: c T 3 f (no gate: up and its activation, c T 2 f)
    dropout      the mask, a byte an element
    loss         log probabilities (tp: the softmax), a T V / tp
    put off      from I to W of each map its input and its outputs' gradients (`cost/maps.py`)

T tokens of a micro batch, H hidden, q, kv, f, V this rank's widths. Full recompute keeps the
stream alone; selective recompute keeps a module's input. Not counted: what kernels use inside.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from plait.cost.data import buckets_of
from plait.cost.dtypes import dtypes_of
from plait.cost.ending import Ending
from plait.cost.ledger import StageMemory
from plait.cost.parts import parts_of
from plait.cost.pipeline import shared
from plait.cost.shapes import local_seq
from plait.cost.step import Step, plain
from plait.cost.tape import MOMENTS, Tape
from plait.schedules.job import table_of
from plait.schedules.transfers import with_transfers
from plait.spec.buckets import Bucket, shards_of, zero_stage
from plait.spec.job import DTYPE_BYTES, Job


def memory(job: Job) -> list[StageMemory]:
    """What a rank of each stage holds when each moment of a step is at its fullest.

    A step in the steady state; all ranks of a stage hold the same. `train.dtype` must be resolved.
    """
    return [row for rows in memory_by_stage(job) for row in rows]


def memory_by_stage(job: Job) -> Iterator[list[StageMemory]]:
    """`memory` stage by stage, for whoever may know enough after the first."""
    if job.layout.pp == 1:
        programs, place, split = [plain(job.train.accumulation)], {}, False
    else:
        table = table_of(job)
        programs, place, split = with_transfers(table), table.place, table.split
    for stage, (parts, actions) in enumerate(zip(parts_of(job), programs, strict=True)):
        buckets = [b for part in parts for b in buckets_of(job, part.chunk)]
        ending, held = Ending.of(job, parts, buckets), states(job, buckets)
        tape = Tape(held | {"optimizer": held["optimizer"] + ending.counts - ending.momentless})
        step = Step(job, parts, split, tape)
        step.run(actions, place, _exchanged(job, stage), _own(job), ending)
        yield [
            StageMemory(stage, moment, **tape.peaks[moment], total=tape.most[moment])
            for moment in MOMENTS
        ]


# ------------------------------------------------------------------------------------------
# Sizes


def element_bytes(job: Job) -> tuple[int, int, int]:
    """Bytes of an element of (compute, master, gradient)."""
    dtypes = dtypes_of(job)
    return tuple(DTYPE_BYTES[d] for d in (dtypes.compute, dtypes.master, dtypes.grad))


def states(job: Job, buckets: Iterable[Bucket]) -> dict[str, int]:
    """Bytes that a rank holds all the time, by class, padding included.

    With n elements in a bucket and N ranks to shard over, c, m, g bytes of a compute, master and
    gradient element, Adam's two moments in the master dtype:

        ZeRO    parameters     gradients   optimizer
        0       c n            g n         2 m n        (+ m n of master weights if c < m)
        1       c n            g n         2 m n / N    (+ m n / N)
        2       c n            g n / N     2 m n / N    (+ m n / N)
        3       m n / N, c = m g n / N     2 m n / N    (c < m: + m n / N, and no parameters:
                                                        the weights exist as masters only)
    """
    c, m, g = element_bytes(job)
    split, held = c != m, Counter(dict.fromkeys(("parameters", "gradients", "optimizer"), 0))
    for b in buckets:  # those of experts may be at another stage
        zero, whole, own = zero_stage(job.layout, b.expert), b.size, b.size // _shards(job, b)
        held["parameters"] += c * whole if zero < 3 else (0 if split else m * own)
        held["gradients"] += g * (whole if zero < 2 else own)
        held["optimizer"] += 2 * m * own + (m * own if split else 0)
    return dict(held)


def _exchanged(job: Job, stage: int) -> int:
    """Bytes of what comes from other stages of one bucket's gradients, the most at a time."""
    if job.layout.pp == 1:
        return 0
    table = table_of(job)
    held = shared(job, table, stage, table.held[stage])
    copies = (n * b.size // _shards(job, b) for b, n in held)
    return element_bytes(job)[2] * max(copies, default=0)


def _own(job: Job) -> int:
    """Bytes of tokens and targets (int64) of all micro batches, cut out under context parallelism:
    until then they are the loader's. Cut document by document, samples have positions too."""
    tokens = job.layout.micro_batch * local_seq(job) * job.train.accumulation
    return (24 if job.data.document_mask else 16) * tokens if job.layout.cp > 1 else 0


def _shards(job: Job, bucket: Bucket) -> int:
    sharded = zero_stage(job.layout, bucket.expert) > 0
    return shards_of(job.layout, bucket.expert) if sharded else 1
