"""What experts and their mixtures ask of a layout, and what they cost more than they need."""

from collections.abc import Iterator
from math import inf

from plait.rules.legality import legal_tp
from plait.spec.findings import Finding, error
from plait.spec.job import Job
from plait.spec.layout import divisors, nearest

# ------------------------------------------------------------------------------------------
# Legality


def experts_to_spread(job: Job) -> Iterator[Finding]:
    """ep and etp are ranks of experts: a dense model has none."""
    for axis in ("ep", "etp"):
        degree = getattr(job.layout, axis)
        if job.model.moe is None and degree > 1:
            message = f"{job.model.name} has no experts to spread over {axis} {degree}"
            yield error(f"layout.{axis}", degree, message, 1, "no-experts")


def expert_counts(job: Job) -> Iterator[Finding]:
    """Experts divide over ep, their widths over etp, shared experts over tp like an MLP."""
    moe, layout = job.model.moe, job.layout
    if moe is None:
        return
    shared = (moe.shared_ffn or moe.shared * moe.ffn) if moe.shared else 0
    # The ranks that ep and etp may have together, and those that tp and dp share.
    ranks = layout.tp * layout.cp * (layout.dp_shard if layout.zero else layout.dp)
    dense = [t for t in legal_tp(job.model) if layout.tp * layout.dp % t == 0]
    for rule, axis, n, what, suits in (
        ("experts-divide-ep", "ep", moe.experts, "experts", divisors(ranks // layout.etp or 1)),
        (
            "expert-ffn-divides-etp",
            "etp",
            moe.ffn,
            "columns of an expert",
            divisors(ranks // layout.ep or 1),
        ),
        ("shared-ffn-divides-tp", "tp", shared, "columns of the shared experts", dense),
    ):
        degree = getattr(layout, axis)
        if n % degree:
            legal = [d for d in suits if n % d == 0]
            message = f"{n} {what} do not divide over {axis} {degree}"
            yield error(f"layout.{axis}", degree, message, nearest(degree, legal), rule)


def routed_tokens(job: Job) -> Iterator[Finding]:
    """Each tp rank routes its own part of a micro batch's tokens, of the same size."""
    layout, seq_len = job.layout, job.train.seq_len
    if job.model.moe is None or layout.tp == 1 or layout.sequence_parallel:
        return  # which cuts them anyway
    tokens = layout.micro_batch * seq_len // layout.cp
    if tokens % layout.tp:
        message = (
            f"the {tokens} tokens of a micro batch do not divide over tp {layout.tp}: each rank "
            "routes a part of them"
        )
        step = layout.tp * layout.cp
        legal = max(step, seq_len // step * step)
        yield error("train.seq_len", seq_len, message, legal, "routed-tokens")


# ------------------------------------------------------------------------------------------
# Costs


def unbalanced(job: Job) -> Iterator[Finding]:
    """Left alone, a router sends most tokens to few experts, and all ranks wait for theirs."""
    moe, layout = job.model.moe, job.layout
    if moe is None or moe.aux_loss > 0 or moe.correction:
        return
    message = "nothing balances the experts: neither aux_loss nor correction"
    if layout.ep > 1:
        share = moe.experts // layout.ep
        # A token goes to an expert once, so to no more of a rank than the rank has.
        worst = layout.ep * min(share, moe.topk) / moe.topk
        experts = "1 expert" if share == 1 else f"{share} experts"
        message += (
            f"; at worst one of {layout.ep} ranks of ep, with {experts}, gets "
            f"{worst:.3g} times an even share of rows"
        )
    suggest = {"model.moe.aux_loss": 0.01}
    yield Finding("warning", "experts-unbalanced", message, "model.moe.aux_loss", 0.0, suggest)


def balance_by_layout(job: Job) -> Iterator[Finding]:
    """What a share is taken over decides the loss; some choices of it follow the layout."""
    moe, layout = job.model.moe, job.layout
    if moe is None or moe.aux_loss == 0 or moe.aux_form == "sequence":
        return
    tokens = layout.micro_batch * job.train.seq_len
    over = f"the {tokens} tokens of a micro batch"
    if moe.aux_form == "global":
        over = f"the tokens of the step so far, of {layout.dp} x {tokens} a micro batch"
    message = (
        f'aux_form "{moe.aux_form}" takes shares of experts over {over}: another micro batch or '
        'dp is another loss; "sequence" is the same under every layout'
    )
    where = "model.moe.aux_form"
    yield Finding("note", "balance-by-layout", message, where, moe.aux_form, {where: "sequence"})


def dropped_tokens(job: Job) -> Iterator[Finding]:
    """A capacity drops choices; nothing here needs one."""
    moe = job.model.moe
    if moe is None or moe.capacity is None:
        return
    most = -(-moe.capacity * job.train.seq_len * moe.topk // moe.experts)
    message = (
        f"capacity {moe.capacity:g}: an expert takes {most:.0f} tokens of a sequence at most, and "
        f"drops others by {moe.drop}; without one no choice is dropped, nor is anything padded"
    )
    where = "model.moe.capacity"
    yield Finding("note", "tokens-dropped", message, where, moe.capacity, {})


def expert_shares(job: Job) -> Iterator[Finding]:
    """How often experts are chosen is said of each of them."""
    shares, moe, where = job.train.expert_shares, job.model.moe, "train.expert_shares"
    if shares is None:
        return
    if moe is None:
        yield error(where, shares, "the model has no experts", "none", "expert-shares")
    elif len(shares) != moe.experts:
        message = f"{len(shares)} shares are given, the model has {moe.experts} experts"
        yield error(where, len(shares), message, moe.experts, "expert-shares")
    elif not all(0 <= share < inf for share in shares) or not sum(shares):
        yield error(where, shares, "shares are from 0 on, not all 0", rule="expert-shares")


RULES = (experts_to_spread, expert_counts, routed_tokens, expert_shares)
PITFALLS = (
    unbalanced,
    balance_by_layout,
    dropped_tokens,
)
