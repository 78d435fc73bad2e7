"""What is legal and costs more than it need: warnings and notes, with numbers.

Each rule is one function that yields findings; `suggest` holds what would avoid the cost. The
numbers are estimates that say how much is at stake; the exact ones are the ledger's.
"""

from collections.abc import Iterator
from typing import Any

from plait.rules.legality import legal_tp
from plait.rules.numbers import element_bytes, in_bytes, stream_bytes
from plait.spec.cluster import Cluster
from plait.spec.findings import Finding, Level
from plait.spec.job import Job
from plait.spec.layout import Layout, divisors
from plait.spec.parameters import parameter_count


def _finding(
    level: Level, rule: str, where: str, value: Any, message: str, suggest: dict[str, Any]
) -> Finding:
    return Finding(level, rule, message, where, value, suggest)


def leaves_domain(cluster: Cluster | None, inner: int, degree: int, world: int) -> bool:
    """Whether some group of `degree` ranks, `inner` apart, leaves the fast domain."""
    if cluster is None or degree == 1 or world <= cluster.fast_domain:
        return False
    return cluster.fast_domain % (inner * degree) != 0


def slow_links(cluster: Cluster) -> str:
    """The slow link in words, with its speed where it is known."""
    if cluster.nic is None:
        return "the slow links"
    return f"links of {cluster.nic / 1e9:.0f} GB/s instead of {cluster.link / 1e9:.0f} GB/s"


def tensor_beyond_fast_domain(job: Job) -> Iterator[Finding]:
    """Tensor parallelism sends in every layer, and waits for it: it belongs on fast links."""
    layout, cluster = job.layout, job.cluster
    if not leaves_domain(cluster, 1, layout.tp, layout.world):
        return
    # In units of an all-gather or reduce-scatter of the stream, forward and backward of a
    # layer: 2 all-reduces each way are 8; under sequence parallelism backward gathers both
    # inputs once more, which makes 10.
    passes = 10 if layout.sequence_parallel else 8
    sent = passes * stream_bytes(job) * (layout.tp - 1) / layout.tp
    domain = cluster.fast_domain
    best = max(t for t in legal_tp(job.model) if t < layout.tp and domain % t == 0)
    message = (
        f"tp {layout.tp} leaves the fast domain of {domain} devices: each layer sends "
        f"{in_bytes(sent)} per rank and micro batch over {slow_links(cluster)}"
    )
    if cluster.nic:
        fast, slow = sent / cluster.link * 1e3, sent / cluster.nic * 1e3
        message += f" ({slow:.3g} ms instead of {fast:.3g} ms)"
    where = "layout.tp"
    yield _finding("warning", "tp-beyond-fast-domain", where, layout.tp, message, {where: best})


def zero_3_over_slow_links(job: Job) -> Iterator[Finding]:
    """ZeRO-3 gathers every parameter twice a micro batch: over slow links that is felt."""
    layout, cluster = job.layout, job.cluster
    if layout.zero != 3 or not leaves_domain(cluster, layout.tp, layout.fsdp, layout.world):
        return
    local = parameter_count(job.model) / (layout.tp * layout.pp) * element_bytes(job)
    gathered = 2 * job.train.accumulation * local * (layout.fsdp - 1) / layout.fsdp
    suggest: dict[str, Any] = {"layout.zero": 2}
    inside = [
        d for d in divisors(layout.dp) if cluster.fast_domain % (layout.tp * layout.cp * d) == 0
    ]
    hint = "zero 2 gathers once a step"
    if inside and inside[-1] > 1:
        shard = inside[-1]
        suggest |= {"layout.dp_shard": shard, "layout.dp_replicate": layout.dp // shard}
        hint += f"; HSDP (dp_shard {shard}) gathers inside the fast domain"
    message = (
        f"zero 3 gathers {in_bytes(gathered)} per rank and step over {slow_links(cluster)}, since "
        f"{layout.fsdp} shards leave the fast domain of {cluster.fast_domain} devices; {hint}"
    )
    yield _finding("warning", "zero-3-over-slow-links", "layout.zero", 3, message, suggest)


def kv_replication(job: Job) -> Iterator[Finding]:
    """More tp ranks than KV heads: each head is held and computed several times."""
    tp, kv = job.layout.tp, job.model.kv_heads
    if job.model.mla is None and tp > kv and tp % kv == 0:
        message = f"{kv} KV heads on {tp} tp ranks: each is held and computed {tp // kv} times"
        where = "layout.tp"
        # Fewer tp ranks are more dp ranks, and these must share the global batch.
        dp, batch = job.layout.dp * tp // kv, job.train.global_batch
        suggest = {where: kv}
        if batch % dp:
            suggest["train.global_batch"] = -(-batch // dp) * dp
        yield _finding("note", "kv-replication", where, tp, message, suggest)


def accumulation_traffic(job: Job) -> Iterator[Finding]:
    """ZeRO-2 and 3 reduce gradients, and ZeRO-3 gathers parameters, in every micro batch."""
    layout, m = job.layout, job.train.accumulation
    if layout.zero < 2 or m == 1 or layout.fsdp == 1:
        return
    once = "1 all-gather and 1 reduce-scatter"
    if layout.zero == 2:
        message = f"zero 2 sends 1 all-gather and {m} reduce-scatters of the model a step"
    else:
        message = f"zero 3 sends {2 * m} all-gathers and {m} reduce-scatters of the model a step"
    message += f" (accumulation {m}); zero 1 sends {once}, and larger micro batches less"
    suggest = {
        "layout.zero": 1,
        "layout.micro_batch": layout.micro_batch * m,
        "train.accumulation": 1,
    }
    if layout.pp > 1:  # whose micro batches these are
        passes = m if layout.zero == 2 else 3 * m
        sent = passes * parameter_count(job.model) / (layout.tp * layout.pp) * element_bytes(job)
        once += f" ({in_bytes(2 * sent / passes)} instead of {in_bytes(sent)} a rank)"
        message = message.partition(" (acc")[0] + f" ({m} micro batches); zero 1 sends {once}"
        suggest = {"layout.zero": 1}
    where = "train.accumulation"
    yield _finding("warning", "accumulation-traffic", where, m, message, suggest)


def tensor_without_sequence(job: Job) -> Iterator[Finding]:
    """Without sequence parallelism every tp rank keeps the inputs of norms and maps whole."""
    layout = job.layout
    if layout.tp == 1 or layout.sequence_parallel:
        return
    # Kept for backward: the inputs of the two norms and of the two fans of linear maps.
    kept = 4 * stream_bytes(job)
    where = "layout.sequence_parallel"
    message = (
        f"without it each of the {layout.tp} tp ranks keeps about {in_bytes(kept)} per layer and "
        f"micro batch that could be cut to {in_bytes(kept / layout.tp)}"
    )
    divides = layout.micro_batch * job.train.seq_len // layout.cp % layout.tp == 0
    suggest = {where: True} if divides else {}
    yield _finding("warning", "tp-without-sequence-parallel", where, False, message, suggest)


def option_without_axis(job: Job) -> Iterator[Finding]:
    """An option whose axis has one rank does nothing; it is not switched off, only named."""
    layout, default = job.layout, Layout()
    needs = {
        "sequence_parallel": ("tp", layout.tp),
        "ulysses": ("cp", layout.cp),
        "cp_method": ("cp / ulysses", layout.cp // layout.ulysses),
        "vpp": ("pp", layout.pp),
        "schedule": ("pp", layout.pp),
        "stages": ("pp", layout.pp),
        "zero": ("dp_shard x cp", layout.fsdp),
    }
    for name, (axis, degree) in needs.items():
        value = getattr(layout, name)
        # zero 1 is what everybody gets without asking.
        idle = value == getattr(default, name) or (name == "zero" and value == 0)
        if degree == 1 and not idle:
            shown = str(value).lower() if isinstance(value, bool) else value
            message = f"{name} {shown} does nothing: {axis} is 1"
            where = f"layout.{name}"
            suggest = {} if name == "stages" else {where: getattr(default, name)}
            yield _finding("warning", "option-without-axis", where, value, message, suggest)


RULES = (
    tensor_beyond_fast_domain,
    zero_3_over_slow_links,
    kv_replication,
    accumulation_traffic,
    tensor_without_sequence,
    option_without_axis,
)
