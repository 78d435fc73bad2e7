"""Placement of experts and their copies: the published example, and what must be so of any."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.planner.eplb import place_experts
from plait.spec.findings import UserError

#: The example of github.com/deepseek-ai/EPLB.
LOADS = (
    (90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86),
    (20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27),
)


def balance(placement, loads=LOADS):
    """Mean over most of the ranks' loads, by layer."""
    return [sum(row) / len(row) / max(row) for row in placement.loads(loads)]


def test_published_example():
    placement = place_experts(LOADS, replicas=16, ranks=8, nodes=2, groups=4)
    assert placement.experts == (
        (5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1),
        (7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1),
    )
    assert balance(placement) == pytest.approx([0.828, 0.805], abs=5e-4)


def test_published_balance_without_groups():
    # Three groups do not divide over two nodes: global.
    for given_ in ({}, {"groups": 3, "nodes": 2}):
        placement = place_experts(LOADS, replicas=16, ranks=8, **given_)
        assert balance(placement) == pytest.approx([0.932, 0.840], abs=5e-4)


@given(st.data())
def test_any_placement(data):
    nodes, ranks, size = (data.draw(st.integers(1, 3)) for _ in range(3))
    groups = nodes * data.draw(st.integers(1, 3))
    ranks, experts = ranks * nodes, size * groups
    each = -(-experts // ranks) + data.draw(st.integers(0, 2))
    loads = [
        data.draw(st.lists(st.integers(0, 100), min_size=experts, max_size=experts))
        for _ in range(2)
    ]
    placement = place_experts(loads, ranks * each, ranks, nodes, groups)
    for row, slots, per_rank in zip(loads, placement.experts, placement.loads(loads), strict=True):
        copies = Counter(slots)
        assert len(slots) == ranks * each
        assert copies.keys() == set(range(experts))
        assert sum(per_rank) == pytest.approx(sum(row))
        of_node = len(slots) // nodes
        homes = [{e // size for e in slots[i : i + of_node]} for i in range(0, len(slots), of_node)]
        # A group is on one node, all nodes have equally many.
        assert sum(map(len, homes)) == groups
        assert len({len(home) for home in homes}) == 1
        for home in homes:
            # Of two experts of a node, none has a copy too many while the other has one too few.
            mine = [e for e in range(experts) if e // size in home]
            most = max(row[e] / copies[e] for e in mine)
            assert all(row[e] / (copies[e] - 1) >= most for e in mine if copies[e] > 1)


def test_even_loads_are_spread_evenly():
    placement = place_experts([[1.0] * 64], 64, 8)
    assert balance(placement, [[1.0] * 64]) == [1.0]


def test_more_copies_help():
    rng = random.Random(0)
    loads = [[rng.paretovariate(1.2) for _ in range(64)]]
    found = [balance(place_experts(loads, n, 16), loads)[0] for n in (64, 96, 128, 256)]
    assert found[0] < 0.6
    assert min(found[1:]) > 0.9


@pytest.mark.parametrize(
    ("numbers", "where", "nearest"),
    [
        ({"replicas": 11}, "replicas", 16),
        ({"replicas": 17}, "replicas", 24),
        ({"replicas": 16, "nodes": 3}, "nodes", 2),
        ({"replicas": 16, "groups": 5}, "groups", 4),
        ({"replicas": 0}, "replicas", 1),
        ({"replicas": 16.0}, "replicas", 1),
        ({"replicas": 16, "ranks": "8"}, "ranks", 1),
    ],
)
def test_wrong_numbers_are_named_with_the_nearest(numbers, where, nearest):
    with pytest.raises(UserError) as caught:
        place_experts(LOADS, **({"ranks": 8} | numbers))
    (finding,) = caught.value.findings
    assert (finding.where, finding.suggest[where]) == (where, nearest)


def test_wrong_loads_are_named():
    with pytest.raises(UserError) as caught:
        place_experts([[1, 2], [1], [float("nan"), -1]], 2, 2)
    assert len(caught.value.findings) == 2
    for load in ("x", 10**400, float("inf"), 1e308, None):
        with pytest.raises(UserError, match="layer 0: a load is a number"):
            place_experts([[load, 1.0]], 2, 2)
    with pytest.raises(UserError, match="no layer"):
        place_experts([], 2, 2)
