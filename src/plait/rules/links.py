"""What goes over slow links and need not: by the fast domain of the cluster, never by the node.

Asked of legal jobs only. Numbers of a step are the ledger's; `suggest` is a layout that is legal,
fits where this one does, and for which the ledger says less, or of which more is hidden.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from typing import Any

from plait.cost.links import far_axes
from plait.rules.context import heads_of_rank, legal_ulysses, tokens_bytes
from plait.rules.legality import legal_tp
from plait.rules.neighbour import (
    better,
    computing,
    fits,
    fitting,
    needed,
    neighbour,
    on_the_way,
    sent,
    sent_far,
)
from plait.rules.numbers import (
    beyond,
    element_bytes,
    in_bytes,
    in_time,
    slow_links,
    stream_bytes,
)
from plait.spec.cluster import Cluster
from plait.spec.findings import Finding
from plait.spec.job import Job
from plait.spec.layout import divisors


def _instead(cluster: Cluster, bytes: float) -> str:
    """How long so many bytes take over slow links, and would over fast ones; "" where unknown."""
    if not cluster.nic:
        return ""
    return f" ({in_time(bytes / cluster.nic)} instead of {in_time(bytes / cluster.link)})"


def _of_a_step(job: Job, *axes: str) -> str:
    """What axes send in a step over slow links, with its time, and that of a step's operations."""
    cluster, n = job.cluster, sent(job, *axes)
    if not cluster.nic:
        return f"{in_bytes(n)} a step"
    said = f"{in_bytes(n)} a step, {in_time(n / cluster.nic)}"
    least = computing(job)
    return said + (f" where its operations take {in_time(least)} at least" if least else "")


def tensor_beyond_fast_domain(job: Job) -> Iterator[Finding]:
    """Tensor parallelism sends in every layer, and waits for it: it belongs on fast links."""
    layout, cluster = job.layout, job.cluster
    if not far_axes(layout, cluster, ["tp"]):
        return
    # In units of an all-gather or reduce-scatter of the stream, forward and backward of a
    # layer: 2 all-reduces each way are 8; under sequence parallelism backward gathers both
    # inputs once more, which makes 10.
    passes = 10 if layout.sequence_parallel else 8
    layer = passes * stream_bytes(job) * (layout.tp - 1) / layout.tp
    message = (
        f"tp {layout.tp} {beyond(cluster, layout.tp)}: each layer sends {in_bytes(layer)} per rank "
        f"and micro batch over {slow_links(cluster)}"
    )
    message += f"{_instead(cluster, layer)}; {_of_a_step(job, 'tp')}"
    where, domain = "layout.tp", cluster.fast_domain
    inside = [t for t in legal_tp(job.model) if t < layout.tp and domain % t == 0]
    found = better(job, ({where: t} for t in reversed(inside)), on_the_way)
    if found:
        far = sent_far(found[0])
        message += f"; with tp {found[1][where]} {in_bytes(far)} in all go over slow links"
    suggest = found[1] if found else {}
    yield Finding("warning", "tp-beyond-fast-domain", message, where, layout.tp, suggest)


def zero_3_over_slow_links(job: Job) -> Iterator[Finding]:
    """ZeRO-3 gathers every parameter twice a micro batch: over slow links that is felt."""
    layout, cluster = job.layout, job.cluster
    if layout.zero != 3 or not far_axes(layout, cluster, ["fsdp"]):
        return
    options: dict[str, dict[str, Any]] = {"zero 2": {"layout.zero": 2}}
    inner = layout.tp * layout.cp
    inside = [d for d in divisors(layout.dp) if cluster.fast_domain % (inner * d) == 0]
    if inside and inside[-1] > 1:
        shard, copies = inside[-1], layout.dp // inside[-1]
        hsdp = {"layout.dp_shard": shard, "layout.dp_replicate": copies}
        options[f"HSDP (dp_shard {shard}, dp_replicate {copies})"] = hsdp
    now, roomy, best = sent_far(job), fits(job), None
    message = (
        f"zero 3 over {layout.fsdp} shards {beyond(cluster, layout.tp * layout.fsdp)}: "
        f"{in_bytes(now)} a step and rank over {slow_links(cluster)}{_time(now, cluster)}"
    )
    for name, option in options.items():
        if (found := neighbour(job, option)) is None:
            continue
        other, suggest = found
        n, holds = sent_far(other), needed(other)
        message += f"; {name} {in_bytes(n)}{_time(n, cluster)}, holding {in_bytes(holds)}"
        if n < (best[0] if best else now) and (not roomy or fits(other)):
            best = n, suggest
    message += f" where zero 3 holds {in_bytes(needed(job))}"
    suggest = best[1] if best else {}
    yield Finding("warning", "zero-3-over-slow-links", message, "layout.zero", 3, suggest)


def _time(n: float, cluster: Cluster) -> str:
    return f" ({in_time(n / cluster.nic)})" if cluster.nic else ""


def experts_beyond_fast_domain(job: Job) -> Iterator[Finding]:
    """Every choice of every token travels to its expert and back, forward and backward."""
    layout, cluster, moe = job.layout, job.cluster, job.model.moe
    if moe is None or not far_axes(layout, cluster, ["ep"]):
        return
    layer = 4 * moe.topk * stream_bytes(job) / layout.tp * (layout.ep - 1) / layout.ep
    message = (
        f"ep {layout.ep} {beyond(cluster, layout.etp * layout.ep)}: each mixture sends about "
        f"{in_bytes(layer)} per rank and micro batch over {slow_links(cluster)}, if choices are "
        f"even; {_of_a_step(job, 'ep')}"
    )
    where, domain = "layout.ep", cluster.fast_domain
    inside = [e for e in divisors(layout.ep) if domain % (layout.etp * e) == 0 and e < layout.ep]
    options: list[dict[str, Any]] = [{where: e} for e in reversed(inside)]
    if layout.etp > 1 and domain % layout.ep == 0:  # whole experts, on as many groups
        options.insert(0, {"layout.etp": 1})
    found = better(job, options, on_the_way)
    if found:
        etp, ep, far = found[0].layout.etp, found[0].layout.ep, sent_far(found[0])
        message += f"; with etp {etp}, ep {ep} all that leaves the domain is {in_bytes(far)}"
    else:
        message += "; with fewer ranks the gradients of more experts would take as long, or no room"
    suggest = found[1] if found else {}
    yield Finding("warning", "ep-beyond-fast-domain", message, where, layout.ep, suggest)


def _dealt(job: Job, ulysses: int) -> float:
    """Bytes that a rank sends for Ulysses of a layer and micro batch, forward and backward."""
    heads, kv = heads_of_rank(job)
    copied = kv * max(1, ulysses // kv)
    width = (2 * heads + 2 * copied) * job.model.head_dim
    return 2 * width * tokens_bytes(job) * (ulysses - 1) / ulysses


def ulysses_beyond_fast_domain(job: Job) -> Iterator[Finding]:
    """Nothing of attention can begin before an all-to-all has ended: it belongs on fast links."""
    layout, cluster, where = job.layout, job.cluster, "layout.ulysses"
    u = layout.ulysses
    if not far_axes(layout, cluster, ["ulysses"]):
        return
    layer, domain = _dealt(job, u), cluster.fast_domain
    message = (
        f"tp {layout.tp} x ulysses {u} {beyond(cluster, layout.tp * u)}: each layer "
        f"waits for {in_bytes(layer)} per rank and micro batch over {slow_links(cluster)}"
    )
    message += f"{_instead(cluster, layer)}; {_of_a_step(job, 'ulysses')}"
    inside = [v for v in legal_ulysses(job) if v < u and domain % (layout.tp * v) == 0]
    found = fitting(job, ({where: v} for v in reversed(inside)))
    if found:
        best = found[1][where]
        message += f"; with ulysses {best} a ring goes between the domains, hidden by attention"
    suggest = found[1] if found else {}
    yield Finding("warning", "ulysses-beyond-fast-domain", message, where, u, suggest)


def _ring_link(job: Job) -> float | None:
    """Bytes a second of what joins the neighbours of a ring."""
    layout, cluster = job.layout, job.cluster
    far = far_axes(layout, cluster, ["cp"])
    return cluster.nic if far else cluster.bandwidth(2)


def ring_not_hidden(job: Job) -> Iterator[Finding]:
    """A ring is hidden where a block takes longer to compute with than to pass on.

    A step computes 2 S^2 q operations of a sample's S positions here (half of all pairs is
    masked), and passes on 2 S kv elements (2310.01889, section 3, without its factor of whole
    blocks).
    """
    layout, model, cluster = job.layout, job.model, job.cluster
    if cluster is None or layout.cp == layout.ulysses or model.mla is not None:
        return
    flops, link = cluster.peak_flops.get(job.train.dtype), _ring_link(job)
    if layout.cp_method != "ring" or not flops or not link:
        return
    ring = layout.cp // layout.ulysses
    local = job.train.seq_len // ring
    needs = ceil(model.kv_heads / model.heads * element_bytes(job) * flops / link)
    if local >= needs:
        return
    message = (
        f"a ring's rank has {local} positions of a sample; below about {needs} a block of "
        f"keys takes longer to send over {link / 1e9:.0f} GB/s than to compute with, and shows"
    )
    dealt = f" with ulysses {layout.ulysses}" if layout.ulysses > 1 else ""
    message += f" (at cp {layout.cp}{dealt} from {needs * ring} tokens on it is hidden)"
    # More of the ring dealt out over heads, inside the domain, leaves longer pieces.
    suggest: dict[str, Any] = {}
    for u in legal_ulysses(job):
        near = not far_axes(replace(layout, ulysses=u), cluster, ["ulysses"])
        longer = job.train.seq_len * u // layout.cp
        enough = u > layout.ulysses and near and (u == layout.cp or longer >= needs)
        if enough and (found := fitting(job, [{"layout.ulysses": u}])):
            suggest = found[1]
            break
    yield Finding("note", "ring-not-hidden", message, "layout.cp", layout.cp, suggest)


def keys_gathered_far(job: Job) -> Iterator[Finding]:
    """All keys are there before attention begins: over slow links it waits, where a ring hides."""
    layout, cluster = job.layout, job.cluster
    group = layout.cp // layout.ulysses
    if layout.cp_method != "all-gather" or job.model.mla is not None:
        return
    inner = layout.tp * layout.ulysses
    if not far_axes(layout, cluster, ["cp"]):
        return
    message = (
        f"cp {layout.cp} gathers keys and values over {slow_links(cluster)} "
        f"({beyond(cluster, inner * group)} together with tp and ulysses), and every layer waits: "
        f"{_of_a_step(job, 'cp')}; a ring sends them while attention is computed"
    )
    where = "layout.cp_method"
    found = fitting(job, [{where: "ring"}])
    suggest = found[1] if found else {}
    yield Finding("warning", "keys-gathered-far", message, where, "all-gather", suggest)


def many_messages(job: Job) -> Iterator[Finding]:
    """Each chunk more is a border more that every micro batch crosses, there and back."""
    layout, cluster, m = job.layout, job.cluster, job.train.accumulation
    if layout.pp == 1 or layout.vpp == 1 or cluster is None or cluster.nic is None:
        return
    inner = layout.world // layout.pp
    if cluster.fast_domain % (2 * inner) == 0 or layout.world <= cluster.fast_domain:
        return  # neighbours share a fast domain, most of them
    rows = stream_bytes(job) / (layout.tp if layout.sequence_parallel else 1)
    n = 2 * m * rows * layout.vpp
    message = (
        f"vpp {layout.vpp}: each rank sends about {in_bytes(n)} a step to its neighbours "
        f"over {cluster.nic / 1e9:.0f} GB/s ({in_time(n / cluster.nic)}), "
        f"{layout.vpp} times what one chunk a rank does"
    )
    yield Finding("note", "pipeline-messages", message, "layout.vpp", layout.vpp, {})


def part_of_a_mesh(job: Job) -> Iterator[Finding]:
    """Where devices are joined pairwise, a small group has few of the links."""
    layout, cluster = job.layout, job.cluster
    if cluster is None or cluster.peer is None or layout.tp == 1:
        return
    speed = cluster.bandwidth(layout.tp)
    if far_axes(layout, cluster, ["tp"]) or speed >= cluster.link:
        return
    n = sent(job, "tp")
    message = (
        f"tp {layout.tp} has {speed / 1e9:.0f} of the {cluster.link / 1e9:.0f} GB/s of a device: "
        f"on a mesh each pair has a link of its own ({cluster.peer / 1e9:.3g} GB/s); {in_bytes(n)} "
        f"a step take {in_time(n / speed)} instead of {in_time(n / cluster.link)}"
    )
    where, domain = "layout.tp", min(cluster.fast_domain, layout.world)
    others = [t for t in legal_tp(job.model) if t != layout.tp and domain % t == 0]
    found = better(job, ({where: t} for t in (1, *reversed(others)) if t in others), on_the_way)
    suggest = found[1] if found else {}
    yield Finding("note", "part-of-a-mesh", message, where, layout.tp, suggest)


RULES = (
    tensor_beyond_fast_domain,
    zero_3_over_slow_links,
    experts_beyond_fast_domain,
    ulysses_beyond_fast_domain,
    ring_not_hidden,
    keys_gathered_far,
    many_messages,
    part_of_a_mesh,
)
