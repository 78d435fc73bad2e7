"""Context parallelism: what is illegal, and what costs more than it need."""

from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from plait.cost.memory import memory
from plait.rules.numbers import element_bytes, in_bytes
from plait.rules.pitfalls import leaves_domain, slow_links
from plait.spec.findings import Finding, error
from plait.spec.job import Job
from plait.spec.layout import divisors, nearest
from plait.spec.parameters import kv_copies


def heads_of_rank(job: Job) -> tuple[int, int]:
    """Query heads and KV heads of a tp rank; latent attention has as many of both."""
    model, tp = job.model, job.layout.tp
    heads = max(1, model.heads // tp)
    kv = heads if model.mla else max(1, model.kv_heads * kv_copies(model, job.layout) // tp)
    return heads, kv


def legal_ulysses(job: Job) -> list[int]:
    """Every part of cp that heads can be dealt out over, ascending."""
    heads, kv = heads_of_rank(job)
    parts = [u for u in divisors(job.layout.cp) if heads % u == 0]
    return [u for u in parts if kv % u == 0 or u % kv == 0]


def ulysses_heads(job: Job) -> Iterator[Finding]:
    """Ulysses deals out the heads of a tp rank; a KV head may go to several of its ranks."""
    layout = job.layout
    if job.model.heads % layout.tp or layout.ulysses == 1:
        return
    heads, kv = heads_of_rank(job)
    legal = legal_ulysses(job)
    if layout.ulysses in legal:
        return
    what = f"{heads} attention heads and {kv} KV heads"
    what += f" of each of {layout.tp} tp ranks" if layout.tp > 1 else ""
    message = f"{what} do not divide over ulysses {layout.ulysses}; legal: "
    message += ", ".join(map(str, legal))
    best = nearest(layout.ulysses, legal)
    yield error("layout.ulysses", layout.ulysses, message, best, "ulysses-divides-heads")


def sequence_over_ranks(job: Job) -> Iterator[Finding]:
    """Every cp rank has as many positions of a sample as any other."""
    layout, seq_len = job.layout, job.train.seq_len
    if seq_len % layout.cp == 0:
        return
    step = layout.cp
    if layout.sequence_parallel:
        step *= layout.tp // gcd(layout.micro_batch, layout.tp)
    legal = max(step, seq_len // step * step)
    message = f"{seq_len} tokens do not make {layout.cp} equal parts, one for each cp rank"
    yield error("train.seq_len", seq_len, message, legal, "cp-divides-sequence")


RULES = (ulysses_heads, sequence_over_ranks)


# ------------------------------------------------------------------------------------------
# Pitfalls


def _tokens_bytes(job: Job) -> int:
    """Bytes of one number for each token of a micro batch that a rank has."""
    layout = job.layout
    return layout.micro_batch * job.train.seq_len // layout.cp * element_bytes(job)


def _dealt(job: Job, ulysses: int) -> float:
    """Bytes that a rank sends for Ulysses of a layer and micro batch, forward and backward."""
    heads, kv = heads_of_rank(job)
    copied = kv * max(1, ulysses // kv)
    width = (2 * heads + 2 * copied) * job.model.head_dim
    return 2 * width * _tokens_bytes(job) * (ulysses - 1) / ulysses


def ulysses_beyond_fast_domain(job: Job) -> Iterator[Finding]:
    """Nothing of attention can begin before an all-to-all has ended: it belongs on fast links."""
    layout, cluster, where = job.layout, job.cluster, "layout.ulysses"
    u = layout.ulysses
    if u not in legal_ulysses(job):
        return
    if not leaves_domain(cluster, layout.tp, u, layout.world):
        return
    sent, domain = _dealt(job, u), cluster.fast_domain
    inside = [v for v in legal_ulysses(job) if v < u and domain % (layout.tp * v) == 0]
    best = max(inside, default=1)
    message = (
        f"tp {layout.tp} x ulysses {u} leaves the fast domain of {domain} devices: each layer "
        f"waits for {in_bytes(sent)} per rank and micro batch over {slow_links(cluster)}"
    )
    if cluster.nic:
        fast, slow = sent / cluster.link * 1e3, sent / cluster.nic * 1e3
        message += f" ({slow:.3g} ms instead of {fast:.3g} ms)"
    message += f"; with ulysses {best} a ring goes between the domains, while attention is computed"
    yield Finding("warning", "ulysses-beyond-fast-domain", message, where, u, {where: best})


def ulysses_copies_heads(job: Job) -> Iterator[Finding]:
    """More Ulysses ranks than KV heads: each head is sent and held several times."""
    u, (_, kv), where = job.layout.ulysses, heads_of_rank(job), "layout.ulysses"
    if u <= kv or u not in legal_ulysses(job):
        return
    best = max(v for v in legal_ulysses(job) if v <= kv)
    copies, held = u // kv, 2 * kv * job.model.head_dim * _tokens_bytes(job)
    message = (
        f"{kv} KV heads on {u} ulysses ranks: each is copied {copies} times, and a rank keeps "
        f"{in_bytes(held * copies)} of keys and values per layer and micro batch instead of "
        f"{in_bytes(held)}, which ulysses {best} keeps"
    )
    yield Finding("warning", "ulysses-copies-heads", message, where, u, {where: best})


def ring_not_hidden(job: Job) -> Iterator[Finding]:
    """A ring is hidden where a block takes longer to compute with than to pass on.

    A step computes 2 S^2 q operations of a sample's S positions here (half of all pairs is
    masked), and passes on 2 S kv elements (2310.01889, section 3, without its factor of whole
    blocks).
    """
    layout, model, cluster = job.layout, job.model, job.cluster
    ring = layout.cp // layout.ulysses
    if layout.cp % layout.ulysses or job.train.seq_len < layout.cp:  # what other rules refuse
        return
    if cluster is None or ring == 1 or layout.cp_method != "ring" or model.mla is not None:
        return
    dtype = "bfloat16" if job.train.dtype == "auto" else job.train.dtype
    flops = cluster.peak_flops.get(dtype)
    far = leaves_domain(cluster, layout.tp * layout.ulysses, ring, layout.world)
    link = cluster.nic if far else cluster.link
    if not flops or not link:
        return
    local = job.train.seq_len * layout.ulysses // layout.cp
    needed = model.kv_heads / model.heads * element_bytes(job) * flops / link
    if local >= needed:
        return
    message = (
        f"a ring's rank has {local} positions of a sample; below about {needed:.0f} a block of "
        f"keys takes longer to send over {link / 1e9:.0f} GB/s than to compute with, and shows"
    )
    whole = -(-int(needed) // local) * job.train.seq_len
    message += f" (at cp {layout.cp} from {whole} tokens on it is hidden)"
    yield Finding("note", "ring-not-hidden", message, "layout.cp", layout.cp)


PITFALLS = (ulysses_beyond_fast_domain, ulysses_copies_heads, ring_not_hidden)


def context_without_need(job: Job) -> Iterator[Finding]:
    """Where whole samples fit and are many enough, data parallelism sends no keys."""
    layout, m, where = job.layout, job.train.accumulation, "layout.cp"
    if job.cluster is None or layout.cp == 1 or layout.pp > 1 or m % layout.cp:
        return
    if layout.ep * layout.etp > 1:
        return
    axis = "dp_shard" if layout.zero else "dp_replicate"
    degree = getattr(layout, axis) * layout.cp
    changed = {"cp": 1, "ulysses": 1, "cp_method": "ring", axis: degree}
    dtype = "bfloat16" if job.train.dtype == "auto" else job.train.dtype
    train = replace(job.train, accumulation=m // layout.cp, dtype=dtype)
    plain = replace(job, layout=replace(layout, **changed), train=train)
    room = job.cluster.memory
    held = max(row.total for row in memory(plain))
    if held > 0.8 * room:  # what the allocator and the communicators take is not counted
        return
    message = (
        f"cp {layout.cp} sends keys in every layer, and whole samples fit: with cp 1 and "
        f"{axis} {degree} a rank holds {in_bytes(held)} of {in_bytes(room)}"
    )
    suggest = {
        where: 1,
        "layout.ulysses": 1,
        "layout.cp_method": "ring",
        f"layout.{axis}": degree,
        "train.accumulation": m // layout.cp,
    }
    yield Finding("warning", "cp-without-need", message, where, layout.cp, suggest)


LEDGER_RULES = (context_without_need,)
