"""What is illegal about a serving layout, and what is legal and a pity: true of every engine.

What an engine checks itself, and when, is in its dialect. Each rule is a function of the job and
of how the engine uses its ranks.
"""

from collections.abc import Iterator
from math import ceil
from typing import Any

from plait.cost.serving import Serving, longest, stage_layers
from plait.cost.serving_memory import (
    kv_copies,
    kv_heads,
    pool_bytes,
    request_bytes,
    stage_weights,
    token_bytes,
    whole_blocks,
)
from plait.rules.legality import experts_chosen, head_counts
from plait.rules.numbers import in_bytes
from plait.spec.findings import LEVELS, Finding, error
from plait.spec.job import Job
from plait.spec.layout import divisors, nearest
from plait.spec.model import Model


def check(job: Job, serving: Serving) -> list[Finding]:
    """Every finding of every rule: errors first, then warnings and notes."""
    found = [f for rule in (head_counts, experts_chosen) for f in rule(job)]
    found += [f for rule in ERRORS for f in rule(job, serving)]
    if all(f.level != "error" for f in found):
        found += [f for rule in PITFALLS for f in rule(job, serving)]
    return sorted(found, key=lambda f: LEVELS.index(f.level))


def _cuts(model: Model, tp: int) -> bool:
    """Whether heads, KV heads and MLP columns suit a degree."""
    kv, moe = model.kv_heads, model.moe
    heads = model.heads % tp == 0 and (model.mla is not None or kv % tp == 0 or tp % kv == 0)
    dense = moe is None or moe.first_dense or moe.every > 1
    return heads and (not dense or model.ffn % tp == 0)


def legal_tp(job: Job) -> list[int]:
    """Tensor parallel degrees that suit the model, of which the ranks that are there have room
    for one; ascending."""
    fitting = [t for t in divisors(job.model.heads) if _cuts(job.model, t)]
    rest = job.layout.pp * job.layout.cp * job.layout.dp_shard * job.layout.dp_replicate
    room = job.cluster.devices // max(1, rest // job.layout.dp_replicate) if job.cluster else None
    return [t for t in fitting if room is None or room % t == 0] or [1]


def heads(job: Job, serving: Serving) -> Iterator[Finding]:
    """Heads, KV heads and columns of dense MLPs divide over the ranks that cut them."""
    model, tp = job.model, serving.attn_tp
    kv = model.kv_heads
    wrong = []
    if model.heads % tp:
        wrong.append(("heads-divide-tp", f"{model.heads} attention heads"))
    if model.mla is None and kv % serving.kv_tp and serving.kv_tp % kv:
        wrong.append(("kv-heads-divide-tp", f"{kv} KV heads"))
    dense = any(not model.is_moe(layer) for layer in range(model.layers))
    if dense and model.ffn % serving.dense_tp:
        wrong.append(("ffn-divides-tp", f"{model.ffn} MLP columns"))
    legal = legal_tp(job)
    for rule, what in wrong:
        message = f"{what} do not divide over tp {tp}; legal: {', '.join(map(str, legal))}"
        yield error("layout.tp", tp, message, nearest(tp, legal), rule)


def experts(job: Job, serving: Serving) -> Iterator[Finding]:
    """Experts and their columns divide over the ranks that share them."""
    moe = job.model.moe
    if moe is None:
        return
    slots = moe.experts + serving.redundant
    ep, tp = serving.moe_ep, serving.moe_tp
    if slots % ep and (serving.balanced or not serving.kind.any_experts):
        short = -moe.experts % ep
        more = f"{short} redundant experts make {moe.experts + short}"
        message = f"{slots} experts do not divide over {ep} ranks; {more}"
        suggest = {} if serving.balanced else {"layout.ep": nearest(ep, divisors(moe.experts))}
        yield Finding("error", "experts-divide-ep", message, "layout.ep", ep, suggest)
    if ep > slots:
        message = f"{slots} experts are fewer than the {ep} ranks that share them"
        yield error("layout.ep", ep, message, max(divisors(moe.experts)), "experts-divide-ep")
    if moe.ffn % tp:
        legal = divisors(moe.ffn)
        message = (
            f"{moe.ffn} columns of an expert do not divide over {tp} ranks; legal: "
            f"{', '.join(map(str, (n for n in legal if n <= 64)))}"
        )
        message += _WHOLE if serving.engine == "vllm" else ""
        suggest = _other_degrees(job, serving, legal)
        yield Finding("error", "expert-ffn-divides", message, "layout.etp", tp, suggest)


_WHOLE = "; with expert parallelism they stay whole (--enable-expert-parallel)"


def _other_degrees(job: Job, serving: Serving, legal: list[int]) -> dict[str, Any]:
    """Expert degrees of the same ranks, or of fewer, under which an expert is cut as is legal.

    Args:
        legal: tensor parallel degrees inside experts.
    """
    moe, ep = job.model.moe, serving.moe_ep
    assert moe is not None
    group = ep * serving.moe_tp
    if serving.engine == "vllm":  # whole or cut over all ranks, nothing between
        return {"layout.ep": group, "layout.etp": 1}
    fitting = [n for n in divisors(group) if moe.experts % n == 0 and group // n in legal]
    if fitting:
        best = nearest(ep, fitting)
        return {"layout.ep": best, "layout.etp": group // best}
    axis = "layout.dp_shard" if serving.attn_dp > 1 else "layout.tp"
    ranks = serving.attn_dp if serving.attn_dp > 1 else serving.attn_tp
    return {axis: 1 << (ranks.bit_length() - 1), "layout.ep": 1}


def stages(job: Job, serving: Serving) -> Iterator[Finding]:
    """Each stage has a layer."""
    model, pp = job.model, serving.stages
    if pp > model.layers:
        message = f"{model.layers} layers are fewer than pp {pp}"
        yield error("layout.pp", pp, message, model.layers, "stages")
    elif serving.layers and sum(serving.layers) != model.layers:
        shown = ",".join(map(str, serving.layers))
        message = f"layers of the stages, {shown}, make {sum(serving.layers)}, not {model.layers}"
        yield Finding("error", "stages", message, "layout.stages", shown)


def decode_context(job: Job, serving: Serving) -> Iterator[Finding]:
    """Ranks that share a request's cache hold the same KV heads of different tokens.

    With G heads over t ranks each head lies on t / G of them, one after the other, and a group
    of c ranks has only one head if c divides t / G. vLLM 0.33 asks for less: t % c = 0,
    c <= t / G and (H / G) % c = 0 (config/model.py verify_with_parallel_config).
    """
    model, tp, c = job.model, serving.attn_tp, serving.kv_cp
    if c == 1 or model.mla is not None or serving.engine != "vllm" or serving.q_cp > 1:
        return
    kv = model.kv_heads
    copies = tp // kv
    if tp % kv or tp % c or copies < c or copies % c == 0:
        return  # fine, or refused by the engine itself
    legal = [n for n in divisors(copies) if (model.heads // kv) % n == 0]
    # The first group whose ranks have different heads.
    group = next(g for g in range(tp // c) if len({r // copies for r in _ranks(g, c)}) > 1)
    held = ", ".join(str(r // copies) for r in _ranks(group, c))
    message = (
        f"(tp / KV heads) % dcp = ({tp} / {kv}) % {c} is not 0: ranks "
        f"{group * c}-{group * c + c - 1} share one cache and hold KV heads {held}, so their "
        "outputs would be merged over different heads; vLLM does not check this"
    )
    yield error("layout.dcp", c, message, nearest(c, legal), "dcp-splits-kv-heads")


def _ranks(group: int, size: int) -> range:
    return range(group * size, (group + 1) * size)


def blocks_of_scales(job: Job, serving: Serving) -> Iterator[Finding]:
    """A rank holds whole blocks of quantised weights."""
    model = job.model
    for what, size, cut, block in whole_blocks(model, serving):
        legal = [n for n in divisors(size) if size // n % block == 0]
        message = (
            f"{size} columns of {what} over {cut} ranks are {size // cut}, no multiple of the "
            f"{block} that share a scale ({serving.weights}); legal: {', '.join(map(str, legal))}"
        )
        if what == "experts":
            where, suggest = "layout.etp", _other_degrees(job, serving, legal)
            message += _WHOLE if serving.engine == "vllm" else ""
        else:
            where, suggest = _fewer(job, serving, legal, cut)
        yield Finding("error", "quantisation-blocks", message, where, cut, suggest)


def _fewer(job: Job, serving: Serving, legal: list[int], cut: int) -> tuple[str, dict[str, Any]]:
    """The degree, and its value, under which a matrix is cut over a legal number of ranks: tp, or
    where tp is but a part of these ranks, what multiplies it."""
    tp, fitting = serving.attn_tp, legal_tp(job)
    if cut == tp:
        return "layout.tp", {"layout.tp": nearest(cut, [t for t in legal if t in fitting] or [1])}
    for axis, value in (("layout.tp", tp), ("layout.cp", serving.q_cp),
                        ("layout.dp_shard", serving.attn_dp)):  # fmt: skip
        rest = cut // value
        smaller = [n for n in divisors(value) if n < value and n * rest in legal]
        if smaller:
            return axis, {axis: smaller[-1]}
    return "layout.tp", {"layout.tp": 1, "layout.cp": 1}


# ------------------------------------------------------------------------------------------
# Pitfalls


def copied_cache(job: Job, serving: Serving) -> Iterator[Finding]:
    """Beyond the KV heads, tensor parallelism copies the cache."""
    model, copies = job.model, kv_copies(job.model, serving)
    if copies <= 1:
        return
    tp, each = serving.attn_tp, max(token_bytes(model, serving))
    what = "the one latent of MLA" if model.mla else f"{model.kv_heads} KV heads"
    message = (
        f"{what} over tp {tp}"
        + (f" and prefill context parallelism {serving.q_cp}" if serving.q_cp > 1 else "")
        + f": the cache is kept {copies:g} times, {each:,.0f} bytes a token on every rank"
    )
    best = _decode_degree(model, serving)
    suggest = {}
    if best > serving.kv_cp and serving.engine != "trtllm" and serving.q_cp == 1:
        suggest = {"layout.dcp": best}
        less = each * serving.kv_cp / best
        message += f"; decode context parallelism {best} leaves {less:,.0f}"
    message += ", and so does attention data parallelism" if model.moe and suggest else ""
    yield Finding("warning", "kv-cache-copied", message, "layout.tp", tp, suggest)


def _decode_degree(model: Model, serving: Serving) -> int:
    """The largest decode context degree that a group of one head allows."""
    tp = serving.attn_tp
    if model.mla:
        return tp
    if tp % model.kv_heads:
        return 1
    per_head = model.heads // model.kv_heads
    return max(n for n in divisors(tp // model.kv_heads) if per_head % n == 0)


def idle_stages(job: Job, serving: Serving) -> Iterator[Finding]:
    """A request is in one stage at a time."""
    pp = serving.stages
    if pp == 1:
        return
    message = f"with fewer than {pp} requests under way some of the {pp} stages idle"
    most = serving.max_requests
    if most is not None and most < pp:
        message = f"at most {most} requests at once leave {pp - most} of {pp} stages idle, always"
        yield Finding("warning", "stages-idle", message, "layout.pp", pp, {"layout.pp": most})
    else:
        yield Finding("note", "stages-idle", message, "layout.pp", pp)


def slow_links(job: Job, serving: Serving) -> Iterator[Finding]:
    """Tensor parallelism waits for a message twice in every layer: it belongs on fast links."""
    cluster, tp, model = job.cluster, serving.attn_tp, job.model
    if cluster is None or tp == 1:
        return
    if not any(cluster.crosses(group) for group in _tensor_groups(serving)):
        return
    each = 4 * model.layers * model.hidden * 2 * (tp - 1) // tp
    domain = cluster.fast_domain
    message = (
        f"tp {tp} leaves the {domain} devices that fast links join: each token sends "
        f"{in_bytes(each)} over slow ones, and waits {2 * model.layers} times"
    )
    inside = [t for t in legal_tp(job) if tp % t == 0 and domain % t == 0 and t < tp]
    suggest = {}
    if inside:
        pp = serving.stages * tp // inside[-1]
        suggest = {"layout.tp": inside[-1], "layout.pp": pp} if pp <= model.layers else {}
        message += f"; tp {inside[-1]} with pp {pp} keeps to fast ones" if suggest else ""
    yield Finding("warning", "tp-beyond-fast-domain", message, "layout.tp", tp, suggest)


def _tensor_groups(serving: Serving) -> list[tuple[int, ...]]:
    grid = serving.grid()
    return grid.groups("tp") if serving.world <= 4096 else [grid.group(0, "tp")]


def longest_request(job: Job, serving: Serving) -> Iterator[Finding]:
    """The cache holds at least one request of the greatest length."""
    if job.cluster is None:
        return
    model, device = job.model, job.cluster.memory
    length = longest(serving, model)
    pools = pool_bytes(model, serving, device)
    needed = request_bytes(model, serving, length)
    short = [s for s, pool in enumerate(pools) if pool < needed[s]]
    if not short:
        return
    stage = min(short, key=lambda s: pools[s] - needed[s])
    pool, where = pools[stage], f"stage {stage}" if len(pools) > 1 else "a rank"
    weights = sum(stage_weights(model, serving)[stage].values())
    if pool <= 0:
        message = (
            f"{in_bytes(weights)} of weights on {where} leave no room for a cache in "
            f"{in_bytes(device)}"
        )
        yield Finding("warning", "weights-do-not-fit", message, "layout.tp", serving.attn_tp)
        return
    fits = int(length * pool / needed[stage])
    fits -= fits % (serving.tokens_of_block * serving.kv_cp)
    message = (
        f"a request of {length:,} tokens takes {in_bytes(needed[stage])} of cache on {where}, and "
        f"{in_bytes(pool)} are left; {fits:,} tokens fit"
    )
    suggest = {"train.seq_len": fits} if fits > 0 else {}
    yield Finding("warning", "request-beyond-cache", message, "train.seq_len", length, suggest)


def uneven_stages(job: Job, serving: Serving) -> Iterator[Finding]:
    """The stage with least room decides how many tokens all of them hold."""
    if job.cluster is None or serving.stages == 1:
        return
    model = job.model
    pools = pool_bytes(model, serving, job.cluster.memory)
    each = token_bytes(model, serving)
    room = [p / e if e else float("inf") for p, e in zip(pools, each, strict=True)]
    least, most = min(room), max(r for r in room if r != float("inf"))
    if least <= 0 or most < 1.25 * least:
        return
    stage, layers = room.index(least), stage_layers(serving, model)
    message = (
        f"stage {stage} has room for {least:,.0f} tokens, the roomiest for {most:,.0f}: the least "
        f"counts; layers of the stages are {', '.join(map(str, layers))}"
    )
    yield Finding("note", "stages-uneven", message, "layout.stages")


def uneven_experts(job: Job, serving: Serving) -> Iterator[Finding]:
    """Where experts do not divide, some ranks hold one more."""
    moe, ep = job.model.moe, serving.moe_ep
    if moe is None or moe.experts % ep == 0 or serving.balanced:
        return
    message = (
        f"{moe.experts} experts over {ep} ranks: some hold {ceil(moe.experts / ep)}, "
        f"others {moe.experts // ep}"
    )
    yield Finding("note", "experts-uneven", message, "layout.ep", ep)


def heads_of_rank(job: Job, serving: Serving) -> Iterator[Finding]:
    """Which KV heads a rank has, where it is not obvious."""
    model, tp = job.model, serving.kv_tp
    if model.mla is not None or tp <= model.kv_heads:
        return
    each = tp // model.kv_heads
    message = (
        f"{model.kv_heads} KV heads on {tp} ranks: rank r has head r // {each}, "
        f"{kv_heads(model, serving)} each"
    )
    yield Finding("note", "kv-heads-of-ranks", message, "layout.tp", tp)


ERRORS = (heads, experts, stages, decode_context, blocks_of_scales)
PITFALLS = (
    copied_cache,
    heads_of_rank,
    idle_stages,
    slow_links,
    longest_request,
    uneven_stages,
    uneven_experts,
)
