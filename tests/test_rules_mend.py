"""What is suggested where a question is illegal: it suits everything that was asked, not only the
rule that found the error."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait import rules
from plait.cli.arguments import load_job
from plait.spec.findings import UserError
from plait.spec.jobfile import draft_job
from plait.spec.schedule import SCHEDULES

MODELS = ("tiny", "tiny-moe", "gpt2", "qwen3-0.6b", "llama3.1-8b", "mixtral-8x7b", "deepseek-v3")
DEGREES = st.sampled_from((1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64))
RANKS = st.sampled_from((1, 4, 6, 8, 24, 48, 72, 96, 100, 512))
OPTIONAL = {
    f"layout.{axis}": DEGREES
    for axis in ("tp", "cp", "ulysses", "pp", "vpp", "ep", "etp", "dp_replicate", "dp_shard")
} | {
    "layout.micro_batch": DEGREES,
    "layout.zero": st.integers(0, 3),
    "layout.schedule": st.sampled_from((*SCHEDULES, "interleaved-1f1b:5")),
    "train.accumulation": DEGREES,
    "train.global_batch": DEGREES,
    "train.seq_len": st.sampled_from((30, 999, 1000, 4096)),
}


def illegal(question):
    """What is illegal about a question, without what is suggested being held against it."""
    job, problems = draft_job("plan", None, question)
    return problems + (rules.errors(job, "plan") if job else [])


def errors(question):
    """The same, as every command says it."""
    try:
        return [f for f in load_job("plan", question, [])[1] if f.level == "error"]
    except UserError as problem:
        return list(problem.findings)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(MODELS), RANKS, st.booleans(), st.fixed_dictionaries({}, optional=OPTIONAL))
def test_what_is_suggested_mends_its_field(model, ranks, cluster, said):
    question = said | {"model": model}
    question |= {"gpus": f"h100:{ranks}"} if cluster else {"ranks": ranks}
    for found in errors(question) if illegal(question) else ():
        assert found.suggest, found.line()
        assert "ranks" not in found.suggest, found.line()
        after = illegal(question | found.suggest)
        left = [f.line() for f in after if f.where == found.where]
        assert not left, f"{question}: {found.line()} leads to {left}"
        if found.rule == "degrees-divide-world":
            assert found.rule not in {f.rule for f in after}, found.line()


@pytest.mark.parametrize(
    ("said", "where", "nearest"),
    [
        # 3 divides the ranks that cp 16 leaves and not 16 heads; 16 divides the heads alone.
        ({"layout.tp": 24, "layout.cp": 16}, "layout.tp", 1),
        # 6 of 48 ranks would do for the ranks, 2 does for the heads too.
        ({"layout.tp": 5, "layout.cp": 8}, "layout.tp", 2),
        # Of a dense model there is one legal ep, whatever the ranks are divided by.
        ({"layout.ep": 7}, "layout.ep", 1),
        # 24 divides the cp ranks and not 16 heads.
        ({"layout.cp": 24, "layout.ulysses": 48, "train.seq_len": 4800}, "layout.ulysses", 8),
        # 28 layers have 30 places: of the degrees that divide 48 ranks, 24 is the last.
        ({"layout.pp": 32}, "layout.pp", 24),
    ],
)
def test_the_nearest_value_suits_model_and_ranks(said, where, nearest):
    question = said | {"model": "qwen3-0.6b", "gpus": "h100:48"}
    found = [f for f in errors(question) if f.where == where]
    assert found
    assert {f.nearest for f in found} == {nearest}
