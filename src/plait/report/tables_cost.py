"""What each strategy costs, and what it sends when: read off the ledger of a real job of that
strategy."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from plait.cost.data import buckets_of
from plait.cost.memory import memory
from plait.cost.traffic import traffic
from plait.report.tables_strategies import STRATEGIES, Strategy
from plait.rules.neighbour import illegal
from plait.schedules.job import table_of, timeline
from plait.schedules.simulate import Times, simulate
from plait.spec.job import Job
from plait.spec.jobfile import draft_job, read_job
from plait.spec.layout import divisors
from plait.spec.parameters import parameter_count

_STATES = ("parameters", "gradients", "optimizer")

#: How a message relates to the program that sends it. critical: the program waits for it. hidden:
#: it is issued so that something is computed until it is needed; whether that takes long enough
#: depends on the device. partly: an entry of the ledger of which some messages are hidden.
PATHS = ("critical", "partly", "hidden")

#: The model of the strategies for experts where the one that is asked for has none.
MIXTURE = "mixtral-8x7b"


def path_of(job: Job, axis: str, collective: str, phase: str) -> str:
    """Whether an entry of the ledger is on the critical path: one of `PATHS`.

    It follows `parallel/`, where no weight gradients are put off:

        fsdp, edp      a bucket is reduced while backward goes on, gathered while others are used
        dp_replicate   as that for whole replicas; of shards after the last backward
        tp             waited for, but in backward for a column-parallel map's: its input is
                       gathered again while the input gradient is computed, and that is reduced
                       while the weight gradient is; partial gradients and latents are waited for
        cp             blocks travel while attention over another one is computed, gradients of
                       gathered keys are waited for
        pp             stages go on with other micro batches; what these cannot fill is the bubble
        the rest       waited for
    """
    layout = job.layout
    if layout.zero == 0 and axis in ("fsdp", "dp_replicate"):
        # Of the two one after the other, the first is waited for.
        return "critical" if axis == "fsdp" and layout.dp_replicate > 1 else "hidden"
    if axis == "tp" and phase == "backward":
        latent = job.model.mla is not None
        if layout.sequence_parallel:
            reduced = "partly" if latent else "hidden"
            return {"all-gather": "partly", "reduce-scatter": reduced}.get(collective, "critical")
        partial = latent or any(next(b.partial_runs(), None) for b in buckets_of(job))
        return ("partly" if partial else "hidden") if collective == "all-reduce" else "critical"
    if axis == "cp":
        return "critical" if collective == "reduce-scatter" else "hidden"
    return "hidden" if axis in ("fsdp", "edp", "pp") else "critical"


class Trial(NamedTuple):
    """A strategy, its flags with their numbers, the model that it is tried on, and the job; None
    where the rules refuse it, for the reason `why`."""

    strategy: Strategy
    flags: dict[str, Any]
    base: Job
    job: Job | None
    why: str | None


def degree_of(base: Job) -> int:
    """The degree on which strategies are tried: ranks of one fast domain, or of eight, that divide
    the world."""
    fast = base.cluster.fast_domain if base.cluster else 8
    return max(d for d in divisors(base.layout.world) if d <= fast)


def trials(given: Mapping[str, Any], base: Job, degree: int) -> Iterator[Trial]:
    """Each strategy by itself on `degree` ranks, and ZeRO-1 over what it leaves of the world; the
    data-parallel ones on the whole world. Those for experts are tried on `MIXTURE` where the model
    has none.

    Args:
        given: dotted path -> value, as the base job was made of. base: the job without a strategy.
        degree: a divisor of the world.
    """
    world = base.layout.world
    # Where all ranks are one group, two replicas show what HSDP is.
    shards = world // 2 if degree == world and world % 2 == 0 else degree
    degrees = {"N": degree, "S": shards, "R": world // shards}
    mixture = {k: v for k, v in given.items() if not k.startswith("model")} | {"model": MIXTURE}
    for strategy in STRATEGIES:
        flags = {name: degrees.get(value, value) for name, value in strategy.flags.items()}
        dense = strategy.experts and base.model.moe is None
        told, of = (mixture, read_job("plan", None, mixture)) if dense else (given, base)
        layout = {f"layout.{name}": value for name, value in flags.items()}
        job, findings = draft_job("plan", None, {**told, **layout})
        errors = findings or illegal(job)
        why = errors[0].line() if errors else None
        yield Trial(strategy, flags, of, None if errors else job, why)


def cost(given: Mapping[str, Any], base: Job, degree: int) -> list[dict[str, Any]]:
    """A row for each strategy; of the stage that holds or sends most, bytes of a rank and step."""
    return [
        _named(t) | (_costs(t.job) if t.job else dict.fromkeys(_COSTS))
        for t in trials(given, base, degree)
    ]


def comparison(given: Mapping[str, Any], base: Job, degree: int) -> list[dict[str, Any]]:
    """A row for each strategy: what it splits, what it sends when, its limit for this model."""
    return [
        _named(t)
        | {
            "split": t.strategy.split,
            "whole": t.strategy.whole,
            "collectives": _collectives(t.job) if t.job else None,
            "saves": t.strategy.saves,
            "limit": t.strategy.limit(t.base),
            "used": t.strategy.used,
            "frameworks": {
                "training": list(t.strategy.training),
                "serving": list(t.strategy.serving),
            },
        }
        for t in trials(given, base, degree)
    ]


def _named(trial: Trial) -> dict[str, Any]:
    return {
        "strategy": trial.strategy.name,
        "title": trial.strategy.title,
        "layout": trial.flags,
        "model": trial.base.model.name,
        "legal": trial.job is not None,
        "why": trial.why,
    }


def _costs(job: Job) -> dict[str, Any]:
    rows = memory(job)
    fullest = max(rows, key=lambda row: row.total)
    states = max(sum(getattr(row, name) for name in _STATES) for row in rows)
    sent = _sent(job)
    return {
        "state_bytes": states,
        "bytes_per_parameter": states / parameter_count(job.model),
        "activation_bytes": max(row.activations for row in rows),
        "peak_bytes": fullest.total,
        "sent_bytes": sum(sent.values()),
        **{f"{path}_bytes": sent[path] for path in PATHS},
        **_bubbles(job),
    }


def _bubbles(job: Job) -> dict[str, dict[str, float]]:
    """Idle time of the job, and of its schedule where all chunks take as long (F = I = W)."""
    keys = ("step_total", "step_ideal")
    found = {"bubble": dict.fromkeys(keys, 0.0), "bubble_even": dict.fromkeys(keys, 0.0)}
    if job.layout.pp == 1:
        return found
    table = table_of(job)
    even = (1.0,) * table.chunks
    lines = (timeline(job), simulate(table, Times(even, even, even, 0.0)))
    for name, line in zip(found, lines, strict=True):
        found[name] = {key: line.bubble[key] for key in keys}
    return found


_COSTS = (
    "state_bytes",
    "bytes_per_parameter",
    "activation_bytes",
    "peak_bytes",
    "sent_bytes",
    *(f"{path}_bytes" for path in PATHS),
    "bubble",
    "bubble_even",
)


def _sent(job: Job) -> dict[str, int]:
    """Path -> bytes on the wire, of the stage that sends most."""
    by_stage: dict[int, dict[str, int]] = {}
    for row in traffic(job).rows():
        sent = by_stage.setdefault(row.stage, dict.fromkeys(PATHS, 0))
        sent[path_of(job, row.axis, row.collective, row.phase)] += row.wire_bytes
    none = dict.fromkeys(PATHS, 0)
    return max(by_stage.values(), key=lambda sent: sum(sent.values()), default=none)


#: Messages below this share of what a rank sends are scalars and counts.
_SMALL = 1e-3


def _collectives(job: Job) -> list[dict[str, Any]]:
    """What is sent when, an entry for each (axis, collective, phase) of the stage that sends
    most."""
    by_stage: dict[int, dict[tuple[str, str, str], list[int]]] = {}
    for row in traffic(job).rows():
        entries = by_stage.setdefault(row.stage, {})
        entry = entries.setdefault((row.axis, row.collective, row.phase), [0, 0])
        entry[0] += row.count
        entry[1] += row.wire_bytes
    if not by_stage:
        return []
    most = max(by_stage.values(), key=lambda entries: sum(sent for _, sent in entries.values()))
    whole = sum(sent for _, sent in most.values())
    return [
        {
            "axis": axis,
            "collective": collective,
            "phase": phase,
            "count": count,
            "wire_bytes": sent,
            "path": path_of(job, axis, collective, phase),
        }
        for (axis, collective, phase), (count, sent) in most.items()
        if sent > _SMALL * whole
    ]
