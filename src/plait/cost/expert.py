"""What experts send. It mirrors `parallel/expert.py`.

How many rows go where is decided by the router, so formulas take it as given. C choices of a rank's
tokens go to the ranks of ep that have their experts, h rows come from all of these, and with etp
each of its ranks computes the a rows of all. With H hidden, a mixture sends for each micro batch,
in the compute dtype, forward and once more the same backward,

    over ep     all-to-alls of C H there and of h H back
    over etp    all-to-alls of etp h H there and of a H back

and before that the counts: an all-to-all of E over ep, an all-gather of etp E (int64). GShard
2006.16668 section 3.2; an all-to-all counts what a rank puts in. Under tensor parallelism without
sequence parallelism each rank routes its own rows of the stream, so a mixture ends with an
all-gather, and its backward too. What the balance and a capacity want to know of other ranks'
tokens is a few small messages more.

Without a run, choices are taken to be spread evenly, or as the job says: `spread`.
"""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, prod
from typing import NamedTuple

from plait.cost.dtypes import dtypes_of, size_of
from plait.cost.ledger import TrafficLedger
from plait.cost.parts import Part
from plait.cost.shapes import Shapes, local_seq
from plait.spec.job import Job


class Rows(NamedTuple):
    """Rows that a mixture moves for a micro batch on one rank.

    Attributes:
        chosen: choices of this rank's tokens that go to an expert.
        come: those of all ranks of ep that come to this one.
        all: those that come to all ranks of etp; this rank's experts compute them.
    """

    chosen: int
    come: int
    all: int


#: Layer -> the rows of each micro batch of a step on a rank.
Routed = Mapping[int, Sequence[Rows]]


def own_tokens(job: Job) -> int:
    """Tokens of a micro batch that a rank routes."""
    return job.layout.micro_batch * local_seq(job) // job.layout.tp


def spread(job: Job) -> tuple[int, ...]:
    """How often a rank's tokens choose each expert, where no run says.

    Evenly (the first ones get the rest), or by `train.expert_shares`. The ranks of ep are counted
    from the one whose experts are chosen most: so the first rank of a stage, of which ledgers are,
    is the fullest.
    """
    moe, tokens = job.model.moe, own_tokens(job)
    choices = tokens * moe.topk
    counts = _shared(choices, tokens, _fullest_first(job))
    if moe.capacity is None:
        return counts
    most = ceil(moe.capacity * choices / moe.experts)
    return tuple(min(most, n) for n in counts)


def _fullest_first(job: Job) -> list[float]:
    """Shares of the experts, those of the rank of ep with most first."""
    shares, experts = job.train.expert_shares, job.model.moe.experts
    if shares is None:
        return [1.0] * experts
    each = experts // job.layout.ep
    start = max(range(0, experts, each), key=lambda i: sum(shares[i : i + each]))
    return [*shares[start:], *shares[:start]]


def _shared(choices: int, tokens: int, shares: Sequence[float]) -> tuple[int, ...]:
    """So many choices by shares, in whole numbers, the largest remainders rounded up; a token
    chooses an expert once, and what would be more than all tokens goes to the others."""
    exact = [choices * share / sum(shares) for share in shares]
    counts = [min(tokens, int(n)) for n in exact]
    order = sorted(range(len(shares)), key=lambda e: int(exact[e]) - exact[e])
    while left := choices - sum(counts):
        room = [e for e in order if counts[e] < tokens]
        each = max(1, left // len(room))
        for e in room[:left]:
            counts[e] += min(each, tokens - counts[e])
    return tuple(counts)


def first_rows(job: Job) -> Rows:
    """Of the first rank of a stage, which nobody has more than."""
    counts, layout = spread(job), job.layout
    come = layout.ep * sum(counts[: len(counts) // layout.ep])
    return Rows(sum(counts), come, layout.etp * come)


def told(job: Job) -> int:
    """Numbers that the ranks add up of a step's routing: for each mixture two of every expert and
    two losses."""
    model = job.model
    if model.moe is None:
        return 0
    return (2 * model.moe.experts + 2) * sum(map(model.is_moe, range(model.layers)))


def tallied(job: Job, micro_batches: int) -> int:
    """Bytes that a mixture remembers beside those of the micro batches under way: what the last one
    chose, and what all that have passed backward did; none: at the end of a step."""
    moe, tables = job.model.moe, 1 if job.model.moe.capacity is None else 2
    chosen, losses = 8 * moe.experts, 2 * size_of(dtypes_of(job).wide)
    # The first one's are in the tally as they are; then sums are made of them.
    return (tables * chosen, 0, tables * chosen + losses, 2 * chosen + losses)[micro_batches]


def expert_traffic(
    job: Job, ledger: TrafficLedger, stage: int, part: Part, routed: Routed | None = None
) -> None:
    """Enters what mixtures send in one step for a part of the model on a stage.

    routed: what was routed there in a step (even shares where it says nothing of a layer).
    """
    layout, routed = job.layout, routed or {}
    layers = [i for i in part.layers if job.model.is_moe(i)]
    if not layers:
        return
    ahead = ["forward"]
    if layout.recompute == "full" or "mlp" in layout.recomputed:
        ahead.append("recompute")

    def add(
        phase: str, axis: str, collective: str, dtype: str, bytes: int, size: int, count: int = 1
    ) -> None:
        ledger.add(stage, axis, collective, phase, dtype, bytes, size, count)

    times = len(layers) * part.micro_batches
    for phase in ahead:
        _small(job, phase, times, add)
    _own_rows(job, ahead, times, add)
    shares = [(first_rows(job), part.micro_batches)]
    for layer in layers:
        for rows, count in [(r, 1) for r in routed[layer]] if layer in routed else shares:
            for phase in (*ahead, "backward"):
                _exchanges(job, phase, rows, count, add)


def _exchanges(job: Job, phase: str, rows: Rows, count: int, add: Callable) -> None:
    """There and back, in either direction."""
    layout, dtype = job.layout, dtypes_of(job).compute
    for axis, size, n in (
        ("ep", layout.ep, rows.chosen),
        ("etp", layout.etp, layout.etp * rows.come),
        ("etp", layout.etp, rows.all),
        ("ep", layout.ep, rows.come),
    ):
        add(phase, axis, "all-to-all", dtype, size_of(dtype, n, job.model.hidden), size, count)


def _small(job: Job, phase: str, times: int, add: Callable) -> None:
    """Counts of all kinds, and what a capacity wants to know."""
    layout, moe = job.layout, job.model.moe
    number = size_of("int64")
    add(phase, "ep", "all-to-all", "int64", number * moe.experts, layout.ep, times)
    add(phase, "etp", "all-gather", "int64", number * moe.experts * layout.etp, layout.etp, times)
    sharers = [("tp", layout.tp), ("cp", layout.cp)]
    if moe.aux_loss:
        tables, axes = layout.micro_batch, sharers
        if moe.aux_form != "sequence":
            tables = 1
        if moe.aux_form == "global":
            axes = [("tp", layout.tp), ("fsdp", layout.fsdp), ("dp_replicate", layout.dp_replicate)]
        for axis, size in axes:
            bytes = number * moe.experts * tables
            add(phase, axis, "all-reduce", "int64", bytes, size, times)
    if moe.capacity is not None:
        gathered = [("int64", moe.topk), ("int64", 1), ("int64", 1)]
        if moe.drop == "probability":
            gathered.append((dtypes_of(job).wide, moe.topk))
        for dtype, width in gathered:
            for i, (axis, size) in enumerate(sharers):
                rows = own_tokens(job) * prod(n for _, n in sharers[: i + 1])
                add(phase, axis, "all-gather", dtype, size_of(dtype, rows, width), size, times)


def _own_rows(job: Job, ahead: Sequence[str], times: int, add: Callable) -> None:
    """Results of all ranks' rows, and gradients of them, where tp ranks have the same stream."""
    layout, model, dtype = job.layout, job.model, dtypes_of(job).compute
    if layout.sequence_parallel:
        return
    stream = size_of(dtype, Shapes.of(job).tokens, model.hidden)
    for phase in (*ahead, "backward"):
        # A repetition ends with what is kept last: gathering keeps nothing.
        last = layout.recompute != "full" or not _kept_after(job)
        if phase == "recompute" and not model.moe.shared and last:
            continue
        add(phase, "tp", "all-gather", dtype, stream, layout.tp, times)


def _kept_after(job: Job) -> bool:
    """Whether a layer keeps something after its MLP."""
    return job.model.norm_at in ("output", "both") or job.model.dropout > 0
