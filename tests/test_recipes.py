"""Bytes of model states a parameter: published totals, and what the program itself holds."""

from dataclasses import replace

import pytest

from plait.cost.memory import memory
from plait.cost.recipes import RECIPES, recipe_of, states
from plait.report.build import report
from plait.spec import presets
from plait.spec.jobfile import read_job
from plait.spec.layout import Layout
from plait.spec.parameters import parameter_count

#: Bytes a parameter unsharded, and the sharded form, as each source writes it.
PUBLISHED = {
    "zero-fp16-adam": (16, "4 + 12/N"),
    "megatron-bf16": (18, "6 + 12/N"),
    "megatron-precision-aware": (14, "6 + 8/N"),
    "deepspeed-zero2-estimator": (20, "2 + 18/N"),
    "deepspeed-zero3-estimator": (18, "18/N"),
    "primus": (14, "4 + 10/N"),
    "fsdp2": (16, "16/N"),
    "deepseek-v3": (13, "5 + 8/N"),
}


@pytest.mark.parametrize(("name", "said"), PUBLISHED.items())
def test_published_bytes_a_parameter(name, said):
    recipe = RECIPES[name]
    assert (recipe.total, recipe.formula()) == said


def test_every_recipe_says_where_it_is_from():
    assert all(recipe.source and recipe.zero in (1, 2, 3) for recipe in RECIPES.values())


def test_formulas_of_all_stages():
    """ZeRO, 1910.02054, Figure 1: 7.5B parameters on 64 ranks."""
    recipe = RECIPES["zero-fp16-adam"]
    assert [recipe.formula(z) for z in range(4)] == ["16", "4 + 12/N", "2 + 14/N", "16/N"]
    assert recipe.formula(1, "dp") == "4 + 12/dp"
    shares = [recipe.shares(z) for z in range(4)]
    gigabytes = [whole + shared / 64 for whole, shared in shares]
    assert [round(7.5 * n, 1) for n in gigabytes] == [120.0, 31.4, 16.6, 1.9]


def job(model="llama3.1-8b", ranks=16, **given):
    return read_job("plan", model=model, ranks=ranks, overrides={"seq_len": 512} | given)


@pytest.mark.parametrize(
    "given",
    [
        {"zero": 0},
        {"zero": 1, "tp": 2},
        {"zero": 2, "cp": 2},
        {"zero": 3, "pp": 2},
        {"zero": 3, "dp_replicate": 2},
        {"zero": 1, "train.grad_dtype": "bfloat16"},
        {"zero": 3, "dtype": "float32"},
        {"zero": 1, "pp": 4, "vpp": 2},
        {"zero": 1, "pp": 4, "schedule": "dualpipev", "global_batch": 32},
        {"zero": 2, "model": "mixtral-8x7b", "ep": 4},
        {"zero": 1, "model": "deepseek-v2-lite", "ep": 8, "pp": 2},
    ],
)
def test_recipe_of_a_job_is_what_its_ledger_holds(given):
    """Up to padding of buckets: under a thousandth."""
    mine = job(**given)
    said = states(mine.model, mine.layout, recipe_of(mine))
    rows = {row.stage: row for row in memory(mine) if row.moment == "forward"}
    assert len(said) == mine.layout.pp
    for stage, held in enumerate(said):
        for name in ("parameters", "gradients", "optimizer"):
            assert held[name] == pytest.approx(getattr(rows[stage], name), rel=1e-3), (stage, name)


def test_experts_that_nobody_shares_have_a_formula_of_their_own():
    mine = job("mixtral-8x7b", ranks=8, ep=8, zero=3)
    assert recipe_of(mine).formula() == "16/N"
    assert recipe_of(mine, expert=True).formula() == "18"


@pytest.mark.parametrize(
    ("model", "ranks", "given"),
    [
        ("llama3.1-8b", 64, {"pp": 4}),
        ("llama3.1-8b", 64, {"pp": 2, "cp": 4}),
        ("mixtral-8x7b", 64, {"pp": 2, "ep": 4}),
        ("deepseek-v3", 128, {"pp": 4, "ep": 16}),
    ],
)
def test_all_ranks_together_hold_each_optimizer_state_once(model, ranks, given):
    layout = Layout.fill(ranks, zero=1, **given)
    model = presets.model(model)
    stages = states(model, layout, RECIPES["megatron-bf16"])
    total = sum(row["optimizer"] for row in stages) * ranks / layout.pp
    assert total == pytest.approx(12 * parameter_count(model), rel=1e-12)


def test_a_tied_table_is_held_at_both_ends():
    model = presets.model("gpt2")
    layout = Layout.fill(4, pp=4, zero=0)
    recipe = RECIPES["megatron-bf16"]
    tied = states(model, layout, recipe)
    alone = states(replace(model, tied=False), layout, recipe)
    assert [row["parameters"] for row in tied] == [row["parameters"] for row in alone]


def test_units_in_use():
    """FSDP2: bf16 copies of two units of the largest size, on top of the shards."""
    model = presets.model("llama2-7b")
    layout = Layout.fill(8, zero=3)
    held = states(model, layout, RECIPES["fsdp2"])[0]
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert held["gathered"] == 2 * 2 * layer
    assert sum(held.values()) - held["gathered"] == 16 * parameter_count(model) / 8


def test_a_report_prints_its_recipe():
    mine = job("mixtral-8x7b", ranks=8, ep=8, zero=1)
    said = report(mine, [])["memory"]["recipe"]
    dense, experts = said["dense"], said["experts"]
    assert (dense["weights"], dense["gradients"], dense["optimizer"]) == (2, 4, 12)
    assert (dense["total"], dense["formula"], dense["shards"]) == (18, "6 + 12/N", 8)
    assert (experts["formula"], experts["shards"]) == ("18", 1)
    assert report(job(zero=3), [])["memory"]["recipe"]["experts"] is None
