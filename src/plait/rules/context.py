"""Context parallelism: what is illegal, and what costs more than it need."""

from collections.abc import Iterator
from math import gcd

from plait.rules.numbers import element_bytes, in_bytes
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


def tokens_bytes(job: Job) -> int:
    """Bytes of one number for each token of a micro batch that a rank has."""
    layout = job.layout
    return layout.micro_batch * job.train.seq_len // layout.cp * element_bytes(job)


def ulysses_copies_heads(job: Job) -> Iterator[Finding]:
    """More Ulysses ranks than KV heads: each head is sent and held several times."""
    u, (_, kv), where = job.layout.ulysses, heads_of_rank(job), "layout.ulysses"
    if u <= kv or u not in legal_ulysses(job):
        return
    best = max(v for v in legal_ulysses(job) if v <= kv)
    copies, held = u // kv, 2 * kv * job.model.head_dim * tokens_bytes(job)
    message = (
        f"{kv} KV heads on {u} ulysses ranks: each is copied {copies} times, and a rank keeps "
        f"{in_bytes(held * copies)} of keys and values per layer and micro batch instead of "
        f"{in_bytes(held)}, which ulysses {best} keeps"
    )
    yield Finding("warning", "ulysses-copies-heads", message, where, u, {where: best})


PITFALLS = (ulysses_copies_heads,)
