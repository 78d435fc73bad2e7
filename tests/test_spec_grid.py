"""Both grids against groups that Megatron-LM's own generator printed, and as bijections."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grids import groups_of
from plait.cost.links import far_axes
from plait.spec import presets
from plait.spec.grid import FLATTENED, Grid, dense_grid, expert_grid, traffic_axes
from plait.spec.layout import Layout


def test_groups_of_sixteen_ranks():
    """Megatron-LM with tp 2, cp 2, pp 2 over 16 ranks."""
    layout = Layout.fill(16, tp=2, cp=2, pp=2)
    grid = dense_grid(layout)
    assert layout.dp == 2
    assert grid.groups("tp") == [(r, r + 1) for r in range(0, 16, 2)]
    assert grid.groups("cp")[:2] == [(0, 2), (1, 3)]
    dp = [(0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15)]
    assert grid.groups(*FLATTENED["dp"]) == dp
    dp_cp = [(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)]
    assert grid.groups(*FLATTENED["fsdp"]) == dp_cp
    assert grid.groups("pp") == [(r, r + 8) for r in range(8)]


@pytest.mark.parametrize("dp", [{}, {"zero": 0}, {"dp_replicate": 2}])
def test_batch_groups_do_not_depend_on_how_states_are_sharded(dp):
    grid = dense_grid(Layout.fill(16, tp=2, cp=2, pp=2, **dp))
    assert grid.groups("dp_shard", "dp_replicate")[:2] == [(0, 4), (1, 5)]


def test_expert_groups_of_sixteen_ranks():
    """The same with ep 4, etp 1 and with ep 2, etp 2."""
    grid = expert_grid(Layout.fill(16, tp=2, cp=2, pp=2, ep=4))
    assert grid.groups("ep") == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert grid.groups("edp")[:2] == [(0, 4), (1, 5)]
    grid = expert_grid(Layout.fill(16, tp=2, cp=2, pp=2, ep=2, etp=2))
    assert grid.groups("etp") == [(r, r + 1) for r in range(0, 16, 2)]
    assert grid.groups("ep")[:3] == [(0, 2), (1, 3), (4, 6)]
    assert grid.groups("edp")[0] == (0, 4)


@pytest.mark.parametrize(
    ("world", "told", "dp", "edp"),
    [
        (64, {"tp": 1, "pp": 4, "ep": 8}, 16, 2),
        (256, {"tp": 4, "pp": 4, "ep": 8, "etp": 4}, 16, 2),
        (256, {"tp": 4, "pp": 4, "ep": 8, "etp": 1}, 16, 8),
        (256, {"tp": 8, "pp": 4, "ep": 8, "etp": 8}, 8, 1),
        (256, {"tp": 8, "pp": 4, "ep": 8, "etp": 1}, 8, 8),
        # torchtitan: efsdp 2, batch 4
        (16, {"dp_shard": 4, "cp": 2, "tp": 2, "ep": 8}, 4, 2),
    ],
)
def test_data_parallel_degrees(world, told, dp, edp):
    layout = Layout.fill(world, **told)
    assert (layout.dp, layout.edp) == (dp, edp)
    assert dense_grid(layout).size("dp_shard", "dp_replicate") == dp
    assert expert_grid(layout).size("edp") == edp
    assert dense_grid(layout).world == expert_grid(layout).world == world


def test_torchtitan_shards_over_context_ranks_too():
    layout = Layout.fill(16, dp_shard=4, cp=2, tp=2, ep=8)
    assert layout.fsdp == dense_grid(layout).size(*FLATTENED["fsdp"]) == 8


sizes = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@given(sizes)
def test_rank_and_coordinate_are_a_bijection(sizes):
    grid = Grid(tuple("abcde"[: len(sizes)]), tuple(sizes))
    coordinates = [grid.coordinate(rank) for rank in range(grid.world)]
    assert [grid.rank(**c) for c in coordinates] == list(range(grid.world))
    assert len({tuple(c.values()) for c in coordinates}) == grid.world
    assert all(0 <= c[a] < grid.size(a) for c in coordinates for a in grid.axes)


@given(sizes, st.data())
def test_groups_part_the_ranks(sizes, data):
    grid = Grid(tuple("abcde"[: len(sizes)]), tuple(sizes))
    axes = data.draw(st.lists(st.sampled_from(grid.axes), unique=True))
    groups = grid.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world))
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    for group in groups:
        assert len(group) == grid.size(*axes)
        assert list(group) == sorted(group)
        assert all(grid.group(rank, *axes) == group for rank in group)
        fixed = {
            tuple(i for a, i in grid.coordinate(rank).items() if a not in axes) for rank in group
        }
        assert len(fixed) == 1


@st.composite
def layouts(draw):
    """Layouts of up to some hundred ranks, also of numbers that are no powers of two."""

    def part(n):
        return draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))

    tp, cp, pp, replicate, shard = (draw(st.sampled_from((1, 2, 3, 4))) for _ in range(5))
    ep = part(tp * cp * shard)
    etp = part(tp * cp * shard // ep)
    world = tp * cp * pp * replicate * shard
    given = {"tp": tp, "cp": cp, "pp": pp, "dp_replicate": replicate, "dp_shard": shard}
    return Layout.fill(world, **given, ulysses=part(cp), ep=ep, etp=etp)


@given(layouts(), st.sampled_from((2, 4, 6, 8, 16, 72)))
def test_axes_are_the_groups_of_the_grids_and_leave_domains_where_these_do(layout, domain):
    cluster = replace(presets.cluster(f"h100:{layout.world}"), fast_domain=domain)
    far = set()
    for axis in traffic_axes(layout):
        groups = groups_of(layout, axis.name)
        assert sorted({tuple(axis.group(rank)) for rank in range(layout.world)}) == groups
        for group in groups:
            assert [axis.at(rank) for rank in group] == list(range(axis.size))
        if any(len({rank // domain for rank in group}) > 1 for group in groups):
            far.add(axis.name)
    names = {axis.name for axis in traffic_axes(layout)}
    assert far_axes(layout, cluster, names) == far
    assert far_axes(layout, cluster, ["tp"]) == far & {"tp"}
    assert far_axes(layout, None, names) == set()
