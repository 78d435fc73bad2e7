"""What a rank holds: too much for its device, and recomputation that frees too little.

Asked of legal jobs only; all numbers are the ledger's.
"""

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any

from plait.cost.device import fullest
from plait.cost.ledger import MEMORY_CLASSES, MEMORY_TOLERANCE
from plait.cost.memory import memory
from plait.rules.legality import legal_tp
from plait.rules.neighbour import computing, needed, neighbour, on_the_way, sent, with_reserve
from plait.rules.numbers import in_bytes
from plait.rules.pipeline import recompute_frees
from plait.spec.findings import Finding
from plait.spec.job import Job

#: How many changes are tried on top of each other before a job is called hopeless.
MOST_CHANGES = 3


def memory_over_device(job: Job) -> Iterator[Finding]:
    """Which stage holds too much, when, of what, and what helps most."""
    if job.cluster is None:
        return
    room, peak = job.cluster.memory, fullest(memory(job))
    now = with_reserve(job, peak)
    if now <= room:
        return
    held = {name: getattr(peak, name) for name in MEMORY_CLASSES}
    most = max(held, key=lambda name: held[name])
    message = (
        f"stage {peak.stage} needs {in_bytes(now)} of {in_bytes(room)}, "
        f"{in_bytes(now - room)} too much, when {peak.moment} is at its fullest: {most} are "
        f"{in_bytes(held[most])}"
    )
    tried = _changes(job, now)
    suggest: dict[str, Any] = {}
    said = [f"{_shown(more)} needs {in_bytes(n)}" for n, more, _ in sorted(tried, key=_bytes)[:3]]
    for _ in range(MOST_CHANGES):
        if not tried:
            break
        now, more, other = min(tried, key=_bytes)
        suggest |= more
        # A later change may move what an earlier one said, as tp does dp_shard.
        suggest = {path: attrgetter(path)(other) for path in suggest}
        if now <= room:
            break
        tried = _changes(other, now)
    message += "; " + ", ".join(said) if said else ""
    if now > room:
        message += "; nothing near makes it fit: more devices, or a smaller model or sample"
    where = next(iter(suggest), "gpus")
    value = job.cluster.name if where == "gpus" else attrgetter(where)(job)
    yield Finding("warning", "memory-over-device", message, where, value, suggest)


def _bytes(change: tuple[int, dict[str, Any], Job]) -> int:
    return change[0]


def _shown(suggest: dict[str, Any]) -> str:
    fields = {path.partition(".")[2].replace("_", " "): v for path, v in suggest.items()}
    return " ".join(f"{name} {value}" for name, value in fields.items())


def _changes(job: Job, now: int) -> list[tuple[int, dict[str, Any], Job]]:
    """Single changes by which a job needs less: (bytes needed, fields, job).

    They are tried in the order of the time that their operations and messages take, a longer
    pipeline last; with the first that fits the search ends.
    """
    found = []
    for options in _options(job):
        near = filter(None, (neighbour(job, option) for option in options))
        for other, suggest in sorted(near, key=lambda pair: _seconds(pair[0])):
            if (n := needed(other)) < now:
                found.append((n, suggest, other))
                if n <= job.cluster.memory:
                    return found
    return found


def _seconds(job: Job) -> float:
    return on_the_way(job) + (computing(job) or 0.0)


def _options(job: Job) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Changes that may help, and those that make another pipeline."""
    layout = job.layout
    options: list[dict[str, Any]] = []
    if layout.tp > 1 and not layout.sequence_parallel:
        options.append({"layout.sequence_parallel": True})
    if layout.micro_batch > 1:
        options.append({"layout.micro_batch": 1})
    if layout.zero == 0:
        options.append({"layout.zero": 1, "layout.dp_replicate": 1, "layout.dp_shard": layout.dp})
    elif layout.dp_replicate > 1:
        options.append({"layout.dp_replicate": 1, "layout.dp_shard": layout.dp})
    if layout.fsdp > 1 and layout.zero:
        options += [{"layout.zero": zero} for zero in range(layout.zero + 1, 4)]
    if layout.recompute == "none":
        options.append({"layout.recompute": "selective"})
    if layout.recompute != "full":
        options.append({"layout.recompute": "full"})
    domain = job.cluster.fast_domain
    wider = [t for t in legal_tp(job.model) if t > layout.tp and domain % t == 0]
    options += [{"layout.tp": t} for t in wider[:2]]
    options.append({"layout.cp": 2 * layout.cp})
    if job.model.moe is not None:
        options.append({"layout.ep": 2 * layout.ep})
    stages: list[dict[str, Any]] = []
    if layout.schedule == "dualpipe":
        stages.append({"layout.schedule": "dualpipev", "layout.vpp": 2})
    elif layout.schedule in ("gpipe", "looped-bfs"):
        stages.append({"layout.schedule": "1f1b", "layout.vpp": 1})
    if layout.stages is None:
        stages.append({"layout.pp": 2 * layout.pp})
    return options, stages


# ------------------------------------------------------------------------------------------
# Recomputation


def recompute(job: Job) -> Iterator[Finding]:
    """Recomputation has to free something, and what it frees has to be needed."""
    if job.layout.recompute == "none" or any(True for _ in recompute_frees(job)):
        return
    found = list(_frees_nothing(job))
    yield from found or _needless(job)


def _frees_nothing(job: Job) -> Iterator[Finding]:
    """What is made anew may not be alive at the fullest moment, or may be kept for others."""
    layout, where = job.layout, "layout.recompute"
    kept = replace(job, layout=replace(layout, recompute="none"))
    with_, without = (fullest(memory(j)) for j in (job, kept))
    if with_.total < (1 - MEMORY_TOLERANCE) * without.total:
        return
    message = (
        f"recompute {layout.recompute} frees nothing of the fullest moment ({with_.moment} of "
        f"stage {with_.stage}): {in_bytes(with_.total)} with it, {in_bytes(without.total)} without"
        f"{_repeated(job, kept)}"
    )
    rule = "recompute-frees-nothing"
    yield Finding("warning", rule, message, where, layout.recompute, {where: "none"})


def _repeated(job: Job, kept: Job) -> str:
    """What is done once more: operations, and messages where there are any."""
    again, once = computing(job), computing(kept)
    if not again or not once or again == once:
        return ""
    more = sent(job) - sent(kept)
    said = f", and with it a step has {again / once - 1:.0%} more operations"
    return said + (f" and sends {in_bytes(more)} more a rank" if more else "")


def _needless(job: Job) -> Iterator[Finding]:
    """What would fit without being made twice is made twice for nothing."""
    layout, cluster, where = job.layout, job.cluster, "layout.recompute"
    if cluster is None:
        return
    fewer = ("none",) if layout.recompute != "full" else ("none", "selective")
    for option in fewer:
        found = neighbour(job, {where: option})
        if found and (n := needed(found[0])) <= 0.95 * cluster.memory:
            cost = _repeated(job, found[0])
            if not cost:
                return
            message = (
                f"with recompute {option} a rank needs {in_bytes(n)} of "
                f"{in_bytes(cluster.memory)}: {layout.recompute} is not needed{cost}"
            )
            yield Finding(
                "warning", "recompute-without-need", message, where, layout.recompute, found[1]
            )
            return


RULES = (memory_over_device, recompute_frees, recompute)
