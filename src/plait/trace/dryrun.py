"""The dry run: a step of ranks without other ranks, data and memory.

The program is the one that trains, so what it sends and holds can be measured for any layout on
any machine, and held against the formulas. What is repeated need not be run again: see
`trace/actions.py` for micro batches, `trace/layers.py` for layers, and `kind_of` for ranks.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from plait.cost.context import fullest
from plait.cost.expert import Routed, Rows, spread
from plait.cost.ledger import StageMemory, TrafficLedger, differences, memory_differences
from plait.cost.memory import memory
from plait.cost.parts import parts_of
from plait.cost.tape import MOMENTS, Tape
from plait.cost.traffic import traffic
from plait.report.build import report
from plait.schedules.job import table_of
from plait.schedules.loop import one_f_one_b
from plait.schedules.table import Action, Table
from plait.schedules.transfers import with_transfers
from plait.spec.chunks import chunk_layers
from plait.spec.findings import Finding
from plait.spec.grid import dense_grid, expert_grid
from plait.spec.job import Job
from plait.trace.actions import AFTER, BEFORE, WHOLE, Key, Traced, add_traffic, kinds, steady, trace
from plait.trace.fake import fake_program
from plait.trace.groups import At, between_stages, within_stage
from plait.trace.layers import deepened, layer_kind, rhythm, shallow

#: Told what is being done, in a few words.
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Measured:
    """What one rank of each stage sends in a step of the steady state, and holds, a row for each
    stage and moment; and a line for each group whose ranks do not issue the same collectives."""

    traffic: TrafficLedger
    memory: list[StageMemory]
    unlike: list[str]


def dryrun(
    job: Job,
    findings: Sequence[Finding],
    full: bool = False,
    rank: int | None = None,
    tell: Tell = lambda _: None,
) -> dict[str, Any]:
    """The report of a job, with what its program really did beside it.

    Args:
        job: complete and legal; "auto" dtypes have been resolved.
        findings: what the rules said of it.
        full, rank, tell: see `measure`.

    Returns:
        REPORT and moreover "measured": {"traffic", "memory"} with rows as in REPORT, "agree":
        whether traffic is exactly, and each moment's peak of memory nearly (see
        `MEMORY_TOLERANCE`), what was predicted, and whether ranks of a group issue the same
        collectives; "differences": a line each.
    """
    answer, measured = report(job, findings), measure(job, full, rank, tell, opposite=True)
    far = {row["axis"] for row in answer["traffic"] if row["inter_node"]}
    rows = [asdict(row) for row in measured.traffic.rows(inter_node=far)]
    sent, held = traffic(job, _routed(job, rank)), memory(job)
    if rank is not None:
        stage = _place(job, rank)[0]
        sent, held = sent.of_stage(stage), [row for row in held if row.stage == stage]
        if _ring(job, rank) != fullest(job.layout):  # the formulas are of the rank that holds most
            most = {row.moment: row.total for row in measured.memory}
            held = [replace(row, total=min(row.total, most[row.moment])) for row in held]
    found = differences(sent, measured.traffic)
    found += memory_differences(held, measured.memory)
    found += measured.unlike
    return answer | {
        "measured": {"traffic": rows, "memory": [asdict(row) for row in measured.memory]},
        "agree": not found,
        "differences": found,
    }


def measure(
    job: Job,
    full: bool = False,
    rank: int | None = None,
    tell: Tell = lambda _: None,
    opposite: bool = False,
) -> Measured:
    """Runs a step of a rank of each kind of stage dry, and tells from it what a rank of each stage
    sends and holds.

    The ranks of a stage all send the same and keep the same, so one stands for them: the first,
    and of a ring the one that holds most (`cost.context.fullest`). They differ only

        in a ring       in what calls of the kernels make, which is most on that rank
        in experts      where choices cannot be spread evenly: the first ones are chosen most
        tp              the first counts valid tokens, a byte for each
        data            the last shards have what is padded, and fewer or more stretches that the
                        optimizer steps (4 bytes each)

    Stages are of one kind where their chunks are made up alike (`_stage_kind`): what an action
    does is the same there, and only their rows of actions differ.

    Args:
        full: every action of every stage is run; nothing is repeated.
        rank: this rank alone, with all that is different on it.
        tell: told what is being run.
        opposite: of each kind of stage the rank at the opposite corner is run too, to see that it
            issues the same collectives.
    """
    table, (only, inside) = _table(job), _place(job, rank)
    rows, per_stage = with_transfers(table), job.layout.world // job.layout.pp
    # Whoever stands for all has the experts that are chosen most.
    experts = 0 if rank is None else expert_grid(job.layout).coordinate(rank)["ep"]
    ledger, held, lines = TrafficLedger(), [], []
    seen: dict[Hashable, Traced] = {}
    issued: dict[int, list[At]] = {}
    for stage in range(job.layout.pp) if rank is None else [only]:
        row, number = rows[stage], stage * per_stage + inside
        keys = [WHOLE] if full else [BEFORE, *kinds(row, table, stage, steady(job.model)), *AFTER]
        kind = stage if full else _stage_kind(job, table, stage)
        if kind not in seen or not seen[kind].parts.keys() >= set(keys):
            tell(f"running rank {number}, stage {stage + 1} of {job.layout.pp}")
            traced = _traced(job, number, experts, full, tell)
            lines += traced.odd
            seen[kind] = traced if kind not in seen else seen[kind].and_(traced)
            other = (stage + 1) * per_stage - 1 - inside
            if opposite and other != number:
                tell(f"running rank {other}, to see that it issues the same collectives")
                lines += _unlike(job, (number, other), experts, traced, full, tell)
        traced = seen[kind]
        for key, times in Counter(keys).items():
            add_traffic(ledger, traced[key].traffic, times, stage)
        held += _memory(traced, keys, stage)
        issued[stage] = list(_issued(job, table, stage, traced, row, keys))
    ranks = {stage: stage * per_stage + inside for stage in issued}
    return Measured(ledger, held, lines + between_stages(ranks, issued))


# ------------------------------------------------------------------------------------------
# Ranks


def _place(job: Job, rank: int | None) -> tuple[int, int]:
    """The stage of a rank, and its number there; when None of the one that stands for a stage."""
    if rank is not None:
        return divmod(rank, job.layout.world // job.layout.pp)
    return 0, dense_grid(job.layout).rank(cp=fullest(job.layout) * job.layout.ulysses)


def _ring(job: Job, rank: int) -> int:
    """The position of a rank in its ring."""
    return dense_grid(job.layout).coordinate(rank)["cp"] // job.layout.ulysses


def _routed(job: Job, rank: int | None) -> Routed | None:
    """The rows of a rank's mixtures where choices are as even as can be."""
    model, layout = job.model, job.layout
    if rank is None or model.moe is None:
        return None
    counts, at = spread(job), expert_grid(layout).coordinate(rank)["ep"]
    each = len(counts) // layout.ep
    come = layout.ep * sum(counts[at * each : (at + 1) * each])
    rows = Rows(sum(counts), come, layout.etp * come)
    return {
        i: [rows] * part.micro_batches
        for parts in parts_of(job)
        for part in parts
        for i in part.layers
        if model.is_moe(i)
    }


def _table(job: Job) -> Table:
    return table_of(job) if job.layout.pp > 1 else one_f_one_b(1, job.train.accumulation)


def _stage_kind(job: Job, table: Table, stage: int) -> Hashable:
    """What its chunks are made of, what of them other stages hold too, and whether it is the
    first, which counts tokens."""
    layers, last = chunk_layers(job.model, job.layout), table.chunks - 1
    copies = [sum(c in held for held in table.held) for c in table.held[stage]]
    chunks = [
        (tuple(layer_kind(job.model, i) for i in layers[c]), c == 0, c == last)
        for c in table.held[stage]
    ]
    return stage == 0, tuple(chunks), tuple(copies)


def _sharing(job: Job, table: Table, stage: int) -> list[int]:
    """The other stages that hold some of the same parameters."""
    ends = {0, table.chunks - 1} if job.model.tied else set()
    mine = set(table.held[stage])
    mine |= ends if mine & ends else set()
    return [r for r, held in enumerate(table.held) if r != stage and mine & set(held)]


# ------------------------------------------------------------------------------------------
# Running


def _traced(job: Job, rank: int, experts: int, full: bool, tell: Tell) -> Traced:
    """What is seen of a rank's step; of a model without a pipeline that is deep enough, in a few
    of its layers. experts: as in `fake_program`."""
    found = None if full or job.layout.pp > 1 else shallow(job)
    if found is not None:
        short, longer, layers, times = found
        if rhythm(job, layers, times):
            seen = (_run(part, rank, experts, full, tell) for part in (short, longer))
            deep = deepened(*seen, layers, times, job.layout.world)
            if deep is not None:
                return deep
    return _run(job, rank, experts, full, tell)


def _run(job: Job, rank: int, experts: int, full: bool, tell: Tell) -> Traced:
    with fake_program(job, rank, experts) as program:
        return trace(program, full, lambda doing: tell(f"rank {rank} {doing}"))


def _unlike(
    job: Job, ranks: tuple[int, int], experts: int, here: Traced, full: bool, tell: Tell
) -> list[str]:
    """Where the rank at the opposite corner of a stage issues other collectives."""
    there = _traced(job, ranks[1], experts, full, tell)
    both = tuple(
        [At(issue, _said(key)) for key in here.parts for issue in t[key].issued]
        for t in (here, there)
    )
    return within_stage(ranks, both, even=job.train.seq_len % job.layout.cp == 0)


def _said(key: Key) -> str:
    return key if isinstance(key, str) else f"{key[0]} of its chunk number {key[1]}"


# ------------------------------------------------------------------------------------------
# The whole step


def _memory(traced: Traced, keys: Sequence[Key], stage: int) -> Iterator[StageMemory]:
    tape = Tape(traced.held)
    for key in keys:
        tape.replay(traced[key].tape)
    for moment in MOMENTS:
        if moment in tape.peaks:
            yield StageMemory(stage, moment, **tape.peaks[moment], total=tape.most[moment])


def _issued(
    job: Job, table: Table, stage: int, traced: Traced, row: Sequence[Action], keys: Sequence[Key]
) -> Iterator[At]:
    """What a stage issues over all ranks and along the pipeline. A segment may have been seen on
    another stage: the other side of a message is this one's."""
    if keys == [WHOLE]:
        steps = [(WHOLE, None)]
    else:
        steps = [(BEFORE, None), *zip(keys[1:], row, strict=False), *((key, None) for key in AFTER)]
    far = _sharing(job, table, stage)
    for key, action in steps:
        found = [x for x in traced[key].issued if x.axis in ("world", "pp")]
        peers = sorted({x.peer for x in found if x.axis == "pp"})
        if action is not None and peers:
            step = {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1}[action.kind]
            own = [table.place[action.chunk + step, action.micro]]
        else:
            own = peers if key == WHOLE else far
        to = dict(zip(peers, own, strict=False))
        for x in found:
            peer = to.get(x.peer, x.peer) if x.axis == "pp" else x.peer
            yield At(x._replace(peer=peer), f"in {action}" if action else str(key))
