"""Rules of mixtures and their experts: what does not divide, what it costs, with numbers."""

from dataclasses import replace

import pytest

from plait.rules import check
from plait.spec.cluster import Cluster
from plait.spec.job import Batch, Job, Train
from plait.spec.layout import Layout
from plait.spec.model import Model, MoE

MODEL = Model.of(
    "mix", layers=2, hidden=64, heads=8, vocab=256, ffn=96, moe=MoE(8, 2, 48, aux_loss=0.01)
)


def found(model: Model = MODEL, world: int = 8, seq: int = 64, cluster=None, **layout) -> dict:
    filled = Layout.fill(world, **layout)
    train = Train(seq_len=seq, global_batch=Batch.fill(filled.dp, 1, None, 1).global_)
    job = Job(model, filled, replace(train, accumulation=1, dtype="float32"), cluster=cluster)
    return {f.rule: f for f in check(job, "plan")}


def moe(**given) -> Model:
    return replace(MODEL, moe=replace(MODEL.moe, **given))


@pytest.mark.parametrize(
    ("model", "layout", "rule", "nearest"),
    [
        # The nearest that divides the 8 ranks too.
        (moe(experts=6), {"ep": 4}, "experts-divide-ep", 2),
        (moe(ffn=50), {"tp": 4, "etp": 4}, "expert-ffn-divides-etp", 2),
        (moe(shared=1, shared_ffn=50), {"tp": 4}, "shared-ffn-divides-tp", 2),
        (replace(MODEL, moe=None), {"ep": 2}, "no-experts", 1),
        (replace(MODEL, moe=None), {"tp": 2, "etp": 2}, "no-experts", 1),
    ],
)
def test_what_does_not_divide(model, layout, rule, nearest):
    finding = found(model, **layout)[rule]
    assert (finding.level, finding.nearest) == ("error", nearest)


def test_every_tp_rank_routes_as_many_tokens():
    finding = found(seq=61, world=4, tp=4, sequence_parallel=False)["routed-tokens"]
    assert (finding.where, finding.nearest) == ("train.seq_len", 60)
    assert "routed-tokens" not in found(seq=60, world=4, tp=4, sequence_parallel=False)


@pytest.mark.parametrize(
    "layout",
    [{"ep": 8}, {"tp": 2, "ep": 4}, {"tp": 2, "etp": 2, "ep": 4}, {"cp": 2, "ep": 8}, {"ep": 1}],
)
def test_what_divides_is_legal(layout):
    assert all(f.level != "error" for f in found(**layout).values())


def test_experts_over_nodes_in_numbers():
    cluster = Cluster("c:16", "c", 16, 4, 4, 80 * 10**9, 3e12, {}, link=400e9, nic=50e9)
    finding = found(world=16, ep=8, cluster=cluster)["ep-beyond-fast-domain"]
    # 4 all-to-alls of 64 tokens x 2 choices x 64 float32, 7 of 8 parts of them to others.
    assert f"{4 * 64 * 2 * 64 * 4 * 7 / 8 / 1024:.3g} KiB" in finding.message
    assert finding.suggest == {"layout.ep": 4}
    assert "ep-beyond-fast-domain" not in found(world=16, ep=4, cluster=cluster)


def test_cut_experts_in_numbers():
    finding = found(tp=2, etp=2)["experts-are-cut"]
    # Half of the 64 tokens, twice, 64 float32, to one rank more, 4 times.
    assert f"{4 * 32 * 2 * 64 * 4 / 1024:.3g} KiB" in finding.message
    assert "24 columns wide instead of 48" in finding.message
    assert finding.suggest == {"layout.etp": 1, "layout.ep": 2}


def test_nothing_balances():
    finding = found(moe(aux_loss=0.0), ep=4)["experts-unbalanced"]
    assert "4 times an even share" in finding.message
    assert "experts-unbalanced" not in found(moe(aux_loss=0.0, correction=True), ep=4)
    assert "experts-unbalanced" not in found()


def test_a_rank_of_one_expert_gets_a_token_once():
    # All 64 tokens of each of 8 ranks, of 2 x 64 x 8 rows over 8 ranks: 4 times as many.
    finding = found(moe(aux_loss=0.0), ep=8)["experts-unbalanced"]
    assert "with 1 expert, gets 4 times an even share" in finding.message


@pytest.mark.parametrize("form", ["batch", "global"])
def test_a_balance_that_follows_the_layout(form):
    finding = found(moe(aux_form=form))["balance-by-layout"]
    assert (finding.level, finding.suggest) == ("note", {"model.moe.aux_form": "sequence"})
    assert "balance-by-layout" not in found(moe(aux_form=form, aux_loss=0.0))


def test_dropping_is_named():
    # 64 tokens x 2 choices over 8 experts are 16; half as much again.
    assert "24 tokens of a sequence" in found(moe(capacity=1.5))["tokens-dropped"].message
    assert "tokens-dropped" not in found()
