"""Layout.fill and the batch: what they derive, and a clear finding for everything else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.spec.findings import UserError
from plait.spec.job import Batch
from plait.spec.layout import SCHEDULES, Layout, divisors, nearest


def test_defaults():
    layout = Layout.fill(1)
    assert layout == Layout()
    assert Layout.fill(8) == Layout(dp_shard=8, zero=1)
    assert Layout.fill(8, zero=0) == Layout(dp_replicate=8, zero=0)
    assert Layout.fill(8, tp=2) == Layout(tp=2, sequence_parallel=True, dp_shard=4)
    assert Layout.fill(8, tp=2, sequence_parallel=False).sequence_parallel is False
    assert Layout.fill(8, dp_replicate=2, zero=3) == Layout(dp_replicate=2, dp_shard=4, zero=3)
    assert Layout.fill(8, pp=2, vpp=2).schedule == "interleaved-1f1b"
    assert Layout.fill(8, pp=2, vpp=2, stages=(2, 1, 2, 1)).stages == (2, 1, 2, 1)
    assert Layout.fill(4, recompute="selective").recomputed == ("norm", "mlp")
    assert Layout.fill(4, recompute="full").recomputed == ()
    assert Layout.fill(8, tp=None, pp=None) == Layout.fill(8)


@pytest.mark.parametrize("axis", ["cp", "pp", "ep", "dcp", "etp"])
def test_every_axis_is_legal(axis):
    layout = Layout.fill(16, tp=2, **{axis: 2})
    assert getattr(layout, axis) == 2
    assert layout.world == 16


def findings(world, **told):
    with pytest.raises(UserError) as caught:
        Layout.fill(world, **told)
    found = caught.value.findings
    for finding in found:
        assert finding.level == "error"
        assert "\n" not in finding.line()
    return {f.where.removeprefix("layout."): f for f in found}


@pytest.mark.parametrize(
    ("world", "told", "where", "right"),
    [
        (8, {"tp": 3}, "tp", 2),
        (8, {"tp": 7}, "tp", 8),
        (8, {"tp": 16}, "tp", 8),
        (8, {"tp": 0}, "tp", 1),
        (8, {"cp": -4}, "cp", 1),
        (8, {"pp": 10**12}, "pp", 1_000_000),
        (999_983, {"tp": 999_982}, "tp", 999_983),
        (12, {"tp": 5, "pp": 2}, "tp", 6),
        (12, {"tp": 2, "pp": 5}, "pp", 6),
        (6, {"tp": 4, "cp": 5}, "tp", 3),
        (36, {"tp": 4, "cp": 12}, "tp", 3),
        (12, {"tp": 4, "cp": 5, "pp": 7}, "tp", 4),
        (0, {}, "ranks", 1),
        (-3, {}, "ranks", 1),
        (10**12, {}, "ranks", 1_000_000),
        (8, {"zero": 5}, "zero", 3),
        (8, {"zero": -1}, "zero", 0),
        (8, {"dp_replicate": 3}, "dp_replicate", 2),
        (8, {"dp_shard": 5}, "dp_shard", 4),
        (8, {"dp_replicate": 2, "dp_shard": 2}, "dp_replicate", 4),
        (8, {"dp_replicate": 3, "dp_shard": 4}, "dp_replicate", 2),
        (8, {"dp_replicate": 4, "dp_shard": 3}, "dp_shard", 2),
        (8, {"zero": 0, "dp_shard": 8}, "dp_shard", 1),
        (8, {"zero": 0, "dp_replicate": 2}, "dp_replicate", 8),
        (8, {"cp": 4, "ulysses": 3}, "ulysses", 2),
        (8, {"ulysses": 2}, "ulysses", 1),
        (8, {"cp": 2, "cp_method": "rign"}, "cp_method", "ring"),
        (8, {"cp": 2, "cp_method": "allgather"}, "cp_method", "all-gather"),
        (8, {"schedule": "1f1"}, "schedule", "1f1b"),
        (8, {"schedule": "zb-h22"}, "schedule", "zb-h2"),
        (8, {"schedule": "interleave-1f1"}, "schedule", "interleaved-1f1b"),
        (8, {"schedule": "dual-pip"}, "schedule", "dualpipe"),
        (8, {"schedule": ""}, "schedule", "1f1b"),
        (8, {"recompute": "ful"}, "recompute", "full"),
        (8, {"recompute": "full:mlp"}, "recompute", "full"),
        (8, {"recompute": "selective:mpl,norm"}, "recompute", "selective:mlp,norm"),
        (8, {"recompute": "selective:"}, "recompute", "selective:mlp"),
        (8, {"recompute": ""}, "recompute", "none"),
        (8, {"micro_batch": 0}, "micro_batch", 1),
        (8, {"tp": 4, "dcp": 3}, "dcp", 2),
        (8, {"ep": 3}, "ep", 2),
        (8, {"ep": 16}, "ep", 8),
        (8, {"etp": 3}, "etp", 2),
        (8, {"etp": 2, "ep": 8}, "ep", 4),
        (8, {"dp_replicate": 2, "ep": 8}, "ep", 4),
        (8, {"pp": 2, "stages": (3,)}, "stages", None),
        (8, {"pp": 2, "stages": (3, -3)}, "stages", None),
        (8, {"stages": ()}, "stages", None),
        (8, {"stages": "a,b"}, "stages", None),
        (8, {"tp": "two"}, "tp", None),
        (8, {"tp": 2.5}, "tp", None),
        (8, {"tp": True}, "tp", None),
        (8, {"schedule": 3}, "schedule", None),
        (8, {"sequence_parallel": "maybe"}, "sequence_parallel", None),
    ],
)
def test_one_problem(world, told, where, right):
    found = findings(world, **told)
    assert where in found
    assert found[where].nearest == right
    # What is suggested is right.
    if right is not None and where not in ("ranks", "pp") and "cp_method" not in told:
        mended = {k.removeprefix("layout."): v for k, v in found[where].suggest.items()}
        Layout.fill(world, **(told | mended))


@pytest.mark.parametrize("world", ["8", None, 8.0, True])
def test_a_world_that_is_no_number(world):
    assert "ranks" in findings(world)


def test_unknown_field():
    found = findings(8, schedul="1f1b")
    assert found["schedul"].nearest == "layout.schedule"


def test_everything_wrong_at_once():
    told = {
        "tp": 0,
        "pp": -2,
        "zero": 5,
        "cp": 4,
        "ulysses": 3,
        "cp_method": "rong",
        "schedule": "zb-h3",
        "recompute": "some",
        "micro_batch": 0,
        "nonsense": 1,
    }
    assert findings(8, **told).keys() == told.keys() - {"cp"}
    together = {"tp": 3, "ulysses": 2, "schedule": "x", "stages": (1, 1, 1), "dp_shard": 2}
    assert findings(8, **together).keys() == {"tp", "ulysses", "schedule", "stages"}
    assert findings(8, zero=0, dp_replicate=2, dp_shard=2).keys() == {"dp_replicate", "dp_shard"}


anything = st.one_of(
    st.integers(), st.integers(-3, 20), st.text(max_size=3), st.none(), st.booleans(), st.floats(),
    st.lists(st.integers(-3, 9), max_size=4), st.sampled_from(sorted(SCHEDULES)),
)  # fmt: skip


@given(
    st.one_of(anything, st.integers(1, 64)),
    st.dictionaries(st.sampled_from([*Layout.__dataclass_fields__, "other"]), anything),
)
def test_nonsense_is_a_finding_and_no_traceback(world, told):
    try:
        layout = Layout.fill(world, **told)
    except UserError as wrong:
        assert wrong.findings  # noqa: PT017
    else:
        assert layout.world == world


degree = st.sampled_from([1, 1, 2, 3, 4])


@settings(deadline=None)
@given(degree, degree, degree, degree, degree, st.integers(1, 3), st.data())
def test_legal_layouts_fill_their_world(tp, cp, pp, replicate, shard, zero, data):
    world = tp * cp * pp * replicate * shard
    told = {"tp": tp, "cp": cp, "pp": pp, "dp_replicate": replicate, "zero": zero}
    layout = Layout.fill(world, **told)
    assert layout.world == world
    assert layout.dp_shard == shard
    ep = data.draw(st.sampled_from(divisors(tp * cp * shard)))
    layout = Layout.fill(world, **told, ep=ep)
    assert layout.etp * layout.ep * layout.edp * layout.pp == world


@given(st.integers(1, 3000))
def test_divisors(n):
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


def test_nearest_takes_the_smaller_of_two():
    assert nearest(3, [2, 4]) == 2
    assert nearest(5, [1, 2, 4, 8]) == 4


# ------------------------------------------------------------------------------------------
# The batch


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_each_number_of_the_batch_from_the_others(dp, micro, accumulation):
    whole = Batch(micro, micro * dp * accumulation, accumulation)
    assert Batch.fill(dp, micro, whole.global_, None) == whole
    assert Batch.fill(dp, None, whole.global_, accumulation) == whole
    assert Batch.fill(dp, micro, None, accumulation) == whole
    assert Batch.fill(dp, micro, whole.global_, accumulation) == whole


def test_what_a_batch_leaves_out_is_one():
    assert Batch.fill(4, None, None, None) == Batch(1, 4, 1)
    assert Batch.fill(4, 3, None, None) == Batch(3, 12, 1)
    assert Batch.fill(4, None, None, 3) == Batch(1, 12, 3)
    assert Batch.fill(4, None, 12, None) == Batch(3, 12, 1)


number = st.one_of(st.none(), st.integers(-2, 70), st.sampled_from([10**8, 10**40, -(10**40)]))


@given(st.integers(1, 16), number, number, number)
def test_a_wrong_batch_names_what_is_right(dp, micro, global_, accumulation):
    told = {
        "layout.micro_batch": micro,
        "train.global_batch": global_,
        "train.accumulation": accumulation,
    }
    try:
        batch = Batch.fill(dp, *told.values())
    except UserError as caught:
        for finding in caught.findings:
            assert finding.value == told[finding.where]
            assert finding.nearest != finding.value
            told |= finding.suggest
        if not any(finding.rule == "input" for finding in caught.findings):
            if None not in (micro, accumulation) or len(caught.findings) > 1:
                return  # two numbers may have to change
            Batch.fill(dp, *told.values())
    else:
        assert batch.global_ == batch.micro * dp * batch.accumulation
        for value, name in zip(told.values(), ("micro", "global_", "accumulation"), strict=True):
            assert value in (None, getattr(batch, name))


@pytest.mark.parametrize(
    ("numbers", "where", "right"),
    [
        ((4, 1, 10, None), "train.global_batch", 8),
        ((4, 2, 3, None), "train.global_batch", 8),
        ((4, 2, 30, 3), "train.global_batch", 24),
        ((4, 3, 32, None), "layout.micro_batch", 2),
        ((4, None, 32, 3), "train.accumulation", 2),
        ((4, 2, 32, 3), "train.accumulation", 4),
        ((4, 0, None, None), "layout.micro_batch", 1),
        ((4, None, -4, None), "train.global_batch", 1),
    ],
)
def test_batches_that_do_not_multiply(numbers, where, right):
    with pytest.raises(UserError) as caught:
        Batch.fill(*numbers)
    (finding,) = caught.value.findings
    assert (finding.where, finding.nearest) == (where, right)


def test_all_numbers_of_a_batch_wrong_at_once():
    with pytest.raises(UserError) as caught:
        Batch.fill(4, 0, -1, 10**20)
    assert len(caught.value.findings) == 3
