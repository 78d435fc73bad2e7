"""Routing, its losses, capacity, and the products of experts, each against plain arithmetic."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from plait.models import layers as L
from plait.models.grouped import bias_gradient, counts, grouped, product, weight_gradient
from plait.models.moe import Alone, correct, mixtures
from plait.models.permute import Way, combine, permute
from plait.models.routing import choose, within_capacity
from plait.models.transformer import Transformer
from plait.spec.model import Model, MoE

SIZES = {
    "layers": 2,
    "hidden": 24,
    "heads": 2,
    "kv_heads": 2,
    "head_dim": 12,
    "ffn": 40,
    "vocab": 31,
    "seq": 32,
}
BATCH, SEQ = 3, 15
TOKENS = torch.randint(31, (BATCH, SEQ), generator=torch.Generator().manual_seed(3))


def built(moe: MoE, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(Model(name="small", **SIZES, moe=moe)).double()
    with torch.no_grad():
        for mixture in mixtures(model):  # far from balanced
            mixture.router.weight.normal_(std=0.5)
    return model


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in model.named_parameters()}


def assert_equal(ours, theirs, tolerance=1e-10):
    assert ours.keys() == theirs.keys()
    largest = max(g.abs().max() for g in theirs.values())
    for name, grad in ours.items():
        assert (grad - theirs[name]).abs().max() <= tolerance * largest, name


# ------------------------------------------------------------------------------------------
# The rule


def routing_by_hand(moe: MoE, logits: list[float], bias: list[float]) -> dict[int, float]:
    """Expert -> weight of one token, in plain Python."""
    exps = [math.exp(x) for x in logits]
    if moe.score == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    else:
        scores = [e / sum(exps) for e in exps]
    rank = [s + b for s, b in zip(logits if moe.topk_first else scores, bias, strict=True)]
    size = moe.experts // moe.groups
    groups = [rank[g * size : (g + 1) * size] for g in range(moe.groups)]
    worth = [max(g) if moe.group_score == "max" else sum(sorted(g)[-2:]) for g in groups]
    best = sorted(range(moe.groups), key=lambda g: -worth[g])[: moe.topk_groups]
    allowed = [e for e in range(moe.experts) if e // size in best]
    chosen = sorted(allowed, key=lambda e: -rank[e])[: moe.topk]
    weights = {e: scores[e] for e in chosen}
    if moe.normalize or (moe.topk_first and moe.score == "softmax"):
        weights = {e: w / sum(weights.values()) for e, w in weights.items()}
    return {e: w * moe.scaling for e, w in weights.items()}


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["softmax", "sigmoid"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([(1, 1), (2, 1), (3, 2), (6, 3)]),
    st.sampled_from(["max", "top2"]),
    st.integers(1, 4),
    st.integers(0, 10**6),
)
def test_routing_is_the_rule(score, first, normalize, groups, group_score, topk, seed):
    moe = MoE(
        12, topk, 8, score=score, topk_first=first, normalize=normalize, scaling=1.7,
        groups=groups[0], topk_groups=groups[1], group_score=group_score,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 12, generator=generator, dtype=torch.float64)
    bias = 0.3 * torch.randn(12, generator=generator, dtype=torch.float64)
    index, weight, every = choose(moe, logits, bias)
    assert torch.allclose(every.sum(1), torch.ones(5, dtype=torch.float64), atol=1e-14)
    for t in range(5):
        expected = routing_by_hand(moe, logits[t].tolist(), bias.tolist())
        ours = dict(zip(index[t].tolist(), weight[t].tolist(), strict=True))
        assert ours == pytest.approx(expected, rel=1e-12)


def test_the_correction_does_not_enter_the_weights():
    logits = torch.zeros(1, 4, dtype=torch.float64)
    moe = MoE(4, 2, 8, score="sigmoid", correction=True)
    index, weight, _ = choose(moe, logits, torch.tensor([0.0, 3.0, -1.0, 2.0]))
    assert sorted(index[0].tolist()) == [1, 3]
    assert weight[0].tolist() == [0.5, 0.5]


# ------------------------------------------------------------------------------------------
# Losses


def aux_by_hand(moe: MoE, scores, index, groups) -> torch.Tensor:
    """sum over groups of tokens: T E / (k T) sum_i c_i (1/T) sum_t p_ti, as published."""
    total = 0.0
    for tokens in groups:
        size = len(tokens)
        f = torch.bincount(index[tokens].flatten(), minlength=moe.experts).double()
        f = f * moe.experts / (moe.topk * size)
        total = total + size * (f * scores[tokens].mean(0)).sum()
    return total


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("form", ["sequence", "batch"])
def test_losses_enter_the_gradient_once(form, score):
    moe = MoE(6, 2, 16, score=score, aux_loss=0.3, aux_form=form, z_loss=0.2)
    ours = built(moe)
    ours(TOKENS, TOKENS).backward()

    plain = built(replace(moe, aux_loss=0.0, z_loss=0.0))
    seen = []
    for mixture in mixtures(plain):
        mixture.router.register_forward_hook(lambda _, __, logits: seen.append(logits))
    loss = plain(TOKENS, TOKENS)
    rows = torch.arange(BATCH * SEQ)
    groups = rows.view(BATCH, SEQ) if form == "sequence" else [rows]
    for logits in seen:
        index, _, scores = choose(moe, logits, None)
        loss = loss + 0.3 * aux_by_hand(moe, scores, index, groups)
        loss = loss + 0.2 * torch.logsumexp(logits, 1).square().sum()
    loss.backward()
    assert_equal(gradients(ours), gradients(plain))


def test_the_loss_over_a_batch_is_the_librarys():
    """Which leaves out the 1 / k."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    moe = MoE(6, 2, 16, aux_loss=1.0, aux_form="batch", every=2)
    model = built(moe)
    (mixture,) = mixtures(model)
    seen = []
    mixture.router.register_forward_hook(lambda _, __, logits: seen.append(logits))
    model(TOKENS, TOKENS).backward()
    _, _, losses = mixture.take()
    theirs = load_balancing_loss_func((seen[0],), 6, 2)
    assert losses[0].item() == pytest.approx(BATCH * SEQ * theirs.item() / 2, rel=1e-6)
    assert losses[1] == 0


def test_balanced_experts_have_an_even_share():
    moe = MoE(4, 1, 8, aux_loss=1.0)
    index = torch.arange(8)[:, None] % 4
    scores = torch.full((8, 4), 0.25, dtype=torch.float64)
    assert aux_by_hand(moe, scores, index, [torch.arange(8)]) == pytest.approx(8.0)


def test_losses_add_up_over_micro_batches_and_scale():
    moe = MoE(6, 2, 16, aux_loss=0.3, z_loss=0.2, correction=True)
    whole, parts, scaled = built(moe), built(moe), built(moe)
    whole(TOKENS, TOKENS).backward()
    for one in TOKENS.split(1):
        parts(one, one).backward()
    assert_equal(gradients(parts), gradients(whole))
    for a, b in zip(mixtures(parts), mixtures(whole), strict=True):
        (load, _, losses), (other, _, same) = a.take(), b.take()
        assert torch.equal(load, other)
        assert torch.allclose(losses, same, rtol=1e-12)
        assert load.sum() == BATCH * SEQ * 2
        assert a.take() is None
    for mixture in mixtures(scaled):
        mixture.scale = torch.tensor(0.125)
    (scaled(TOKENS, TOKENS) * 0.125).backward()
    expected = {
        n: g if n.endswith("correction") else g * 0.125 for n, g in gradients(whole).items()
    }
    assert_equal(gradients(scaled), expected)


def test_recompute_counts_once():
    moe = MoE(6, 2, 16, aux_loss=0.3, z_loss=0.2, correction=True, aux_form="global")
    once, twice = built(moe), built(moe)
    once(TOKENS, TOKENS).backward()
    ctx = twice.context(BATCH, SEQ)
    x = twice.embed(TOKENS.flatten(), ctx)
    for layer in twice.layers.values():
        x = checkpoint(layer, x, ctx, use_reentrant=False)
    twice.head(x, ctx, TOKENS.flatten()).backward()
    assert_equal(gradients(twice), gradients(once))
    for a, b in zip(mixtures(once), mixtures(twice), strict=True):
        assert torch.equal(a.take()[0], b.take()[0])


def test_the_global_form_knows_what_has_passed():
    moe = MoE(6, 2, 16, aux_loss=0.3, aux_form="global", every=2)
    model = built(moe)
    (mixture,) = mixtures(model)
    seen = []
    mixture.router.register_forward_hook(lambda _, __, logits: seen.append(logits.detach()))
    taken = []
    for one in TOKENS.split(1):
        model(one, one).backward()
        taken.append(mixture.tally[2][0].item())
    expected, passed = 0.0, torch.zeros(6, dtype=torch.float64)
    for logits in seen:
        index, _, scores = choose(moe, logits, None)
        passed = passed + torch.bincount(index.flatten(), minlength=6)
        expected += 0.3 * (passed * 6 / passed.sum() * scores).sum().item()
    assert taken[-1] == pytest.approx(expected, rel=1e-12)


def test_recompute_after_others_have_passed_sees_what_the_first_forward_saw():
    """As in a pipeline: all micro batches go forward, then all go backward."""
    moe = MoE(6, 2, 16, aux_loss=0.3, aux_form="global")
    kept, again = built(moe), built(moe)
    for model in (kept, again):
        ends = []
        for one in TOKENS.split(1):
            ctx = model.context(1, SEQ)
            x = model.embed(one.flatten(), ctx)
            for layer in model.layers.values():
                x = (
                    layer(x, ctx)
                    if model is kept
                    else checkpoint(layer, x, ctx, use_reentrant=False)
                )
            ends.append(model.head(x, ctx, one.flatten()))
        for end in ends:
            end.backward()
    assert_equal(gradients(again), gradients(kept))


@pytest.mark.parametrize("topk_first", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("logit", [-200.0, 200.0])
def test_logits_beyond_what_scores_can_tell_are_no_nan(score, topk_first, logit):
    logits = torch.full((3, 4), logit, requires_grad=True)
    _, weight, scores = choose(MoE(4, 2, 8, score=score, topk_first=topk_first), logits, None)
    (weight.sum() + (scores * torch.arange(4)).sum()).backward()
    for found in (weight, scores, logits.grad):
        assert found.isfinite().all()


def test_evaluation_has_no_losses_and_leaves_no_trace():
    moe = MoE(6, 2, 16, aux_loss=0.3, z_loss=0.2)
    model = built(moe).eval()
    with torch.no_grad():
        model(TOKENS, TOKENS)
    for mixture in mixtures(model):
        assert mixture.take() is None
        assert mixture.load.sum() == BATCH * SEQ * 2


def test_ranks_that_share_sequences_add_up():
    """Five ranks with nine rows each of three sequences of fifteen, who tell each other counts."""
    moe = MoE(6, 2, 16, aux_loss=0.3, z_loss=0.2, correction=True, every=2, capacity=0.5)
    whole = built(moe)
    (mixture,) = mixtures(whole)
    x = torch.randn(BATCH * SEQ, 24, dtype=torch.float64)
    grad = torch.randn(BATCH * SEQ, 24, dtype=torch.float64)
    mixture(x, whole.context(BATCH, SEQ)).backward(grad)
    expected = {n: p.grad for n, p in mixture.named_parameters()}

    part = built(moe)
    (mixture,) = mixtures(part)
    ctx = part.context(BATCH, SEQ)
    rows = torch.arange(BATCH * SEQ).view(5, -1)
    index, _, _ = choose(moe, mixture.router(x), mixture.router.correction)
    table = torch.zeros(BATCH, 6, dtype=torch.int64)
    for t, experts in enumerate(index.tolist()):
        for e in experts:
            table[t // SEQ, e] += 1

    class Part(Alone):
        def __init__(self, rank):
            self.rank = rank

        def total(self, counts, form):
            assert form == "sequence"
            return table

        def own(self, what):
            return what[rows[self.rank]]

        def gather(self, what):
            mine = rows[self.rank]
            whole = (index, ctx.rows, torch.arange(BATCH * SEQ) // SEQ)
            return next(w for w in whole if torch.equal(w[mine], what))

        def part(self, what):
            return what[rows[self.rank]]

    for rank in range(5):
        mixture.ranks = Part(rank)
        mixture(x[rows[rank]], ctx).backward(grad[rows[rank]])
    assert_equal({n: p.grad for n, p in mixture.named_parameters()}, expected)


# ------------------------------------------------------------------------------------------
# The correction


def test_the_corrections_gradient_is_the_load_beyond_an_even_share():
    moe = MoE(6, 2, 16, score="sigmoid", correction=True, every=2)
    model = built(moe)
    (mixture,) = mixtures(model)
    model(TOKENS, TOKENS).backward()
    load, _, _ = mixture.take()
    assert torch.equal(load, mixture.load)
    excess = mixture.router.correction.grad
    assert excess.tolist() == [6 * n - load.sum().item() for n in load.tolist()]
    correct(mixture.router.correction, excess, 0.001)
    mean = load.double().mean()
    expected = [0.001 * math.copysign(n != mean, mean - n) for n in load.tolist()]
    assert mixture.router.correction.tolist() == pytest.approx(expected)


def test_the_correction_balances():
    moe = MoE(6, 2, 16, score="sigmoid", correction=True, every=2)
    model = built(moe)
    (mixture,) = mixtures(model)
    peaks = []
    for _ in range(60):
        mixture.router.correction.grad = None
        model(TOKENS, TOKENS).backward()
        load, _, _ = mixture.take()
        peaks.append(load.max().item() / load.double().mean().item())
        correct(mixture.router.correction, mixture.router.correction.grad, 0.02)
    assert sum(peaks[-10:]) / 10 - 1 < (peaks[0] - 1) / 2


# ------------------------------------------------------------------------------------------
# Capacity


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), st.integers(1, 12), st.integers(1, 3), st.booleans(), st.integers(0, 999))
def test_capacity_keeps_the_first_or_the_heaviest(batch, seq, topk, by_weight, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens, experts, most = batch * seq, 4, 1 + seed % 3
    index = torch.stack(
        [torch.randperm(experts, generator=generator)[:topk] for _ in range(tokens)]
    )
    weight = torch.randint(5, (tokens, topk), generator=generator) / 4  # with equals
    order = torch.randperm(tokens, generator=generator)  # tokens may come in any order
    rows = 100 + torch.arange(tokens)
    keep = within_capacity(
        index[order], rows[order], order // seq, experts, most, weight[order] if by_weight else None
    )
    for sequence in range(batch):
        for expert in range(experts):
            found = [
                (-weight[t, j].item() if by_weight else 0, t, j)
                for t in range(sequence * seq, (sequence + 1) * seq)
                for j in range(topk)
                if index[t, j] == expert
            ]
            stay = {(t, j) for _, t, j in sorted(found)[:most]}
            for _, t, j in found:
                assert keep[(order == t).nonzero().item(), j].item() == ((t, j) in stay)


@pytest.mark.parametrize("drop", ["position", "probability"])
def test_dropped_choices_add_nothing(drop):
    moe = MoE(6, 2, 16, capacity=0.6, drop=drop, every=2)
    model = built(moe)
    (mixture,) = mixtures(model)
    x = torch.randn(BATCH * SEQ, 24, dtype=torch.float64, requires_grad=True)
    ctx = model.context(BATCH, SEQ)
    index, weight = mixture.route(x, ctx)
    most = math.ceil(0.6 * SEQ * 2 / 6)
    kept = index.view(BATCH, -1)
    assert max((kept[b] == e).sum().item() for b in range(BATCH) for e in range(6)) == most
    assert (index == 6).any()
    ours = mixture(x, ctx)
    experts = mixture.experts
    expected = torch.zeros_like(ours)
    for t in range(BATCH * SEQ):
        for e, w in zip(index[t].tolist(), weight[t], strict=True):
            if e < 6:
                h = F.silu(x[t] @ experts.gate.weight[e].t()) * (x[t] @ experts.up.weight[e].t())
                expected[t] = expected[t] + w * (h @ experts.down.weight[e].t())
    assert torch.allclose(ours, expected, rtol=1e-12, atol=1e-14)
    grad = torch.randn_like(ours)
    wanted = [x, *mixture.parameters()]
    for a, b in zip(
        torch.autograd.grad(ours, wanted, grad),
        torch.autograd.grad(expected, wanted, grad),
        strict=True,
    ):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_samples_drop_the_same_whoever_shares_their_batch():
    moe = MoE(6, 2, 16, capacity=0.6, drop="probability")
    model = built(moe)
    both = model(TOKENS)
    alone = torch.cat([model(one) for one in TOKENS.split(1)])
    assert torch.allclose(both, alone, rtol=1e-12, atol=1e-14)


# ------------------------------------------------------------------------------------------
# Products


class Bank(nn.Module):
    def __init__(self, *shape, bias, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(*shape[:2], dtype=dtype)) if bias else None
        self.adds = True


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(3, 0, 5, 1), (0, 0, 4, 0), (0, 0, 0, 0)])
@pytest.mark.parametrize("width", [16, 10])
def test_grouped_products_are_those_of_each_group(dtype, bias, sizes, width):
    torch.manual_seed(0)
    bank = Bank(4, width, 8, bias=bias, dtype=dtype)
    x = torch.randn(sum(sizes), 8, dtype=dtype, requires_grad=True)
    grad = torch.randn(sum(sizes), width, dtype=dtype)
    y = grouped(x, bank, list(sizes))
    y.backward(grad)
    ours = [y.detach(), x.grad, *(p.grad for p in bank.parameters())]
    wide = [t.detach().double().requires_grad_() for t in (x, *bank.parameters())]
    parts = []
    for e, rows in enumerate(wide[0].split(sizes)):
        parts.append(rows @ wide[1][e].t() + (wide[2][e] if bias else 0))
    whole = torch.cat(parts)
    whole.backward(grad.double())
    zeros = [torch.zeros_like(t) if t.grad is None else t.grad for t in wide]
    epsilon = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for a, b in zip(ours, [whole.detach(), *zeros], strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a.double(), b, rtol=epsilon, atol=10 * epsilon)


class _Later(torch.autograd.Function):
    """Expert products whose weight gradients are put off, from the pieces of `models.grouped`."""

    @staticmethod
    def forward(ctx, x, weight, bank, sizes, queue):
        ctx.save_for_backward(x, weight)
        ctx.rest = bank, sizes, queue
        return product(x, weight.transpose(1, 2), sizes, bank.bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        bank, sizes, queue = ctx.rest
        x = x.detach()

        def make():
            bank.weight.grad = weight_gradient(grad, x, sizes)
            if bank.bias is not None:
                bank.bias.grad = bias_gradient(grad, sizes)

        queue.append(make)
        return product(grad, weight, sizes), None, None, None, None


@pytest.mark.parametrize("bias", [False, True])
def test_weight_gradients_can_be_put_off(bias):
    moe = MoE(6, 2, 16, aux_loss=0.1, bias=bias, shared=1)
    at_once, later, queue = built(moe), built(moe), []
    at_once(TOKENS, TOKENS).backward()
    for mixture in mixtures(later):
        mixture.experts.grouped = lambda x, bank, sizes: _Later.apply(
            x, bank.weight, bank, sizes, queue
        )
    later(TOKENS, TOKENS).backward()
    assert all((p.grad is None) == ("experts" in n) for n, p in later.named_parameters())
    for make in queue:
        make()
    assert_equal(gradients(later), gradients(at_once))


def test_counts_leave_out_those_without_an_expert():
    assert counts(torch.tensor([[0, 3], [2, 4], [0, 4]]), 4) == [2, 0, 1, 1]


@pytest.mark.parametrize("index", [
    [[2, 0], [1, 3], [3, 0], [0, 1]],  # 3: no expert
    [[2, 0], [1, 2], [1, 0], [0, 1]],
    [[3, 3], [3, 3], [3, 3], [3, 3]],
])  # fmt: skip
def test_there_and_back_have_their_gradients(index):
    torch.manual_seed(0)
    index = torch.tensor(index)
    rows = int((index < 3).sum())
    way = Way(index, rows)
    assert index[index < 3].sort().values.tolist() == index.flatten()[way.order].tolist()
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(rows, 3, dtype=torch.float64, requires_grad=True)
    if rows:
        assert torch.autograd.gradcheck(lambda x: permute(x, way), x)
        assert torch.autograd.gradcheck(lambda y, w: combine(y, w, way), (y, weight))
    weights = torch.where(index < 3, weight, 0.0)
    expected = weights.sum(1, keepdim=True) * x
    back = combine(permute(x, way), weight, way)
    assert torch.allclose(back, expected)
    back.sum().backward()
    assert torch.allclose(x.grad, weights.sum(1, keepdim=True).expand(4, 3))


def test_the_clamped_gate_has_its_gradient():
    torch.manual_seed(0)
    gate, up = (12 * torch.randn(40, dtype=torch.float64, requires_grad=True) for _ in range(2))
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    assert (gate > 7).any()
    assert (up.abs() > 7).any()
    assert torch.autograd.gradcheck(lambda g, u: L.gated("swiglu-clamped", g, u), (gate, up))
