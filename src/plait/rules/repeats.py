"""What is sent or held more often than it need be. Asked of legal jobs only."""

from collections.abc import Iterator
from typing import Any

from plait.cost.pipeline import shared
from plait.rules.context import tokens_bytes
from plait.rules.neighbour import better, fits, fitting, needed, neighbour, sent
from plait.rules.numbers import element_bytes, in_bytes, stream_bytes
from plait.schedules.job import table_of
from plait.spec.findings import Finding
from plait.spec.job import Job
from plait.spec.parameters import kv_copies


def accumulation_traffic(job: Job) -> Iterator[Finding]:
    """ZeRO-2 and 3 reduce gradients, and ZeRO-3 gathers parameters, in every micro batch."""
    layout, m = job.layout, job.train.accumulation
    if layout.zero < 2 or m == 1 or layout.fsdp == 1:
        return
    gathers = 1 if layout.zero == 2 else 2 * m
    message = (
        f"zero {layout.zero} sends {gathers} all-gather{'s' if gathers > 1 else ''} and {m} "
        f"reduce-scatters of the model a step ({m} micro batches), {in_bytes(_states(job))} a rank"
    )
    larger = {"layout.micro_batch": layout.micro_batch * m, "train.accumulation": 1}
    whole: dict[str, Any] = {"layout.zero": 1}
    options = [whole] if layout.pp > 1 else [whole, larger, whole | larger]
    found = better(job, options, _states)
    if found:
        other, suggest = found
        said = f"zero {other.layout.zero}"
        if other.layout.micro_batch != layout.micro_batch:
            said += f" with micro batch {other.layout.micro_batch}"
        message += f"; {said} sends {in_bytes(_states(other))} and needs {in_bytes(needed(other))}"
        message += f" where this needs {in_bytes(needed(job))}"
    else:
        suggest = {}
        message += "; whole gradients or larger micro batches do not fit"
    where = "train.accumulation"
    yield Finding("warning", "accumulation-traffic", message, where, m, suggest)


def _states(job: Job) -> int:
    return sent(job, "fsdp", "dp_replicate", "edp")


def kv_replication(job: Job) -> Iterator[Finding]:
    """More tp ranks than KV heads: each head is held and computed several times."""
    layout, model, where = job.layout, job.model, "layout.tp"
    tp, kv = layout.tp, model.kv_heads
    if model.mla is not None or kv_copies(model, layout) == 1:
        return
    weights = 2 * model.hidden * model.head_dim * element_bytes(job)
    held = 2 * model.head_dim * tokens_bytes(job)
    message = (
        f"{kv} KV heads on {tp} tp ranks: each is held and computed {tp // kv} times, in each "
        f"layer {in_bytes(weights)} of weights and {in_bytes(held)} of keys and values on a rank "
        f"instead of {in_bytes(weights * kv / tp)} and {in_bytes(held * kv / tp)}"
    )
    found = fitting(job, [{where: kv}])
    suggest = found[1] if found else {}
    yield Finding("note", "kv-replication", message, where, tp, suggest)


def cut_experts(job: Job) -> Iterator[Finding]:
    """etp sends every row to all its ranks, and each makes a narrower product."""
    layout, moe = job.layout, job.model.moe
    if moe is None or layout.etp == 1:
        return
    more = 4 * moe.topk * stream_bytes(job) / layout.tp * (layout.etp - 1)
    message = (
        f"etp {layout.etp}: each mixture sends about {in_bytes(more)} per rank and micro batch "
        f"more, and its products are {moe.ffn // layout.etp} columns wide instead of {moe.ffn}"
    )
    whole = {"layout.etp": 1}
    options = [whole | {"layout.ep": layout.ep * layout.etp}, whole]
    found = better(job, options, lambda job: sent(job, "ep", "etp"))
    if found:
        other, n = found[0].layout, sent(found[0], "ep", "etp")
        message += f"; etp 1 with ep {other.ep} sends {in_bytes(n)} a step instead of "
        message += in_bytes(sent(job, "ep", "etp"))
    suggest = found[1] if found else {}
    yield Finding("warning", "experts-are-cut", message, "layout.etp", layout.etp, suggest)


def tied_over_stages(job: Job) -> Iterator[Finding]:
    """A table that is embedding and head lies on two stages, and is one parameter."""
    layout, model = job.layout, job.model
    if not model.tied or layout.pp == 1:
        return
    table = table_of(job)
    copies = [
        bucket
        for stage, held in enumerate(table.held)
        for bucket, _ in shared(job, table, stage, held)
    ]
    if not copies:  # first and last chunk are on the same rank
        return
    held = model.vocab * model.hidden // layout.tp * element_bytes(job)
    sends = sent(job, "pp")
    message = (
        f"embedding and head are one table of {model.vocab} x {model.hidden}, on two stages: "
        f"{in_bytes(held)} of weights on both, with gradients and states, whose gradients are "
        f"summed each step (of {in_bytes(sends)} that a stage sends)"
    )
    suggest: dict[str, Any] = {}
    v_shaped = {"layout.schedule": "zbv", "layout.vpp": 2}
    if layout.stages is None and (found := neighbour(job, v_shaped)):
        message += "; under a V schedule (zbv) both ends are on one rank, which holds it once"
        suggest = found[1] if fits(found[0]) or not fits(job) else {}
    yield Finding("note", "tied-over-stages", message, "layout.pp", layout.pp, suggest)


def context_without_need(job: Job) -> Iterator[Finding]:
    """Where whole samples fit and are many enough, data parallelism sends no keys."""
    layout, m, where = job.layout, job.train.accumulation, "layout.cp"
    if job.cluster is None or layout.cp == 1 or layout.pp > 1 or m % layout.cp:
        return
    if layout.ep * layout.etp > 1:
        return
    axis = "dp_shard" if layout.zero else "dp_replicate"
    degree = getattr(layout, axis) * layout.cp
    suggest = {
        where: 1,
        "layout.ulysses": 1,
        "layout.cp_method": "ring",
        "layout.dp_replicate": layout.dp_replicate,
        "layout.dp_shard": layout.dp_shard,
        f"layout.{axis}": degree,
        "train.accumulation": m // layout.cp,
    }
    found = neighbour(job, suggest)
    room = job.cluster.memory
    if not found or (held := needed(found[0])) > 0.9 * room:
        return
    message = (
        f"cp {layout.cp} sends {in_bytes(sent(job, 'cp', 'ulysses'))} of keys, queries and their "
        f"gradients a step, and whole samples fit: with cp 1 and {axis} {degree} a rank needs "
        f"{in_bytes(held)} of {in_bytes(room)}"
    )
    yield Finding("warning", "cp-without-need", message, where, layout.cp, found[1])


RULES = (
    accumulation_traffic,
    kv_replication,
    cut_experts,
    tied_over_stages,
    context_without_need,
)
