"""Counter-based random numbers: the right moments, and the same values however a tensor is cut."""

import math
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.models import random
from plait.spec.parameters import Parameter

N = 1 << 20


def weight(*shape: int, name: str = "w") -> Parameter:
    return Parameter(name, shape, "embed", "sequence", ("normal", 0.5))


def mixed(z: int) -> int:
    """SplitMix64's finalizer as published, in Python's own integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


@pytest.mark.parametrize("index", [0, 1, 12345, 2**40 + 7, 2**62])
def test_bits_are_those_of_the_mixing_function(index):
    key = random.key(3, "a")
    expected = mixed(mixed((index * 0x9E3779B97F4A7C15 + key) % 2**64) ^ (key % 2**64))
    assert random.bits(key, torch.tensor([index])).item() % 2**64 == expected


def test_each_bit_is_set_half_of_the_time():
    words = random.bits(random.key(0, "bits"), torch.arange(N))
    for bit in range(64):
        share = ((words >> bit) & 1).double().mean().item()
        assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(N)


def test_uniform_moments():
    u = random.uniform(random.key(0, "u"), torch.arange(N))
    assert 0 <= u.min() < u.max() < 1
    assert abs(u.mean() - 1 / 2) < 5 / math.sqrt(12 * N)
    # The variance of (u - 1/2)^2 is 1/180.
    assert abs((u - 0.5).square().mean() - 1 / 12) < 5 / math.sqrt(180 * N)


def test_normal_moments():
    z = random.normal(random.key(0, "z"), torch.arange(N))
    assert z.isfinite().all()
    # Standard errors of the first four moments: sqrt(1, 2, 15, 96) / sqrt(N).
    for power, expected, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs(z.pow(power).mean() - expected) < 5 * math.sqrt(variance / N), power
    for edge in (-2.0, -1.0, 0.0, 1.0, 2.0):
        share = 0.5 * (1 + math.erf(edge / math.sqrt(2)))
        assert abs((z < edge).double().mean() - share) < 5 * math.sqrt(share * (1 - share) / N)


def test_keys_and_neighbours_are_independent():
    index = torch.arange(N)
    a = random.normal(random.key(0, "a"), index)
    for b in (
        random.normal(random.key(0, "b"), index),
        random.normal(random.key(1, "a"), index),
        random.normal(random.key(0, "a"), index + 1),
        random.normal(random.key(0, "a"), index + 4096),
    ):
        assert abs((a * b).mean()) < 5 / math.sqrt(N)


@pytest.mark.parametrize("start", [0, 1, 5, 1023, 600001])
def test_a_slice_is_the_slice_of_the_whole(start):
    key = random.key(0, "s")
    whole = random.fill_(torch.empty(700_000, dtype=torch.float64), key, std=2.0)
    part = random.fill_(torch.empty(77_777, dtype=torch.float64), key, start, std=2.0)
    assert torch.equal(part, whole[start : start + 77_777])
    picked = torch.randperm(700_000)[:1000].view(10, 100)
    chosen = random.fill_(torch.empty(10, 100, dtype=torch.float64), key, picked, std=2.0)
    assert torch.equal(chosen, whole[picked])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_box_is_the_box_of_the_whole(data):
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    offset = [data.draw(st.integers(0, n - 1)) for n in shape]
    size = [data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True)]
    p = weight(*shape)
    whole = random.initial(p, 7, [0] * len(shape), shape)
    box = tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))
    assert torch.equal(random.initial(p, 7, offset, size), whole[box])


def test_a_large_box_crosses_chunks():
    p = weight(1200, 700)
    whole = random.initial(p, 0, (0, 0), p.shape)
    assert torch.equal(random.initial(p, 0, (3, 11), (1100, 600)), whole[3:1103, 11:611])
    assert abs(whole.std() - 0.5) < 5 * 0.5 / math.sqrt(2 * prod(p.shape))


def test_dtypes_round_the_same_values():
    p = weight(64, 64)
    wide = random.initial(p, 0, (0, 0), p.shape)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(random.initial(p, 0, (0, 0), p.shape, dtype), wide.to(dtype))


def test_constants_seeds_and_names():
    one = Parameter("n", (5,), "head", "sequence", ("constant", 1.0))
    assert torch.equal(random.initial(one, 0, (2,), (3,)), torch.ones(3, dtype=torch.float64))
    first = random.initial(weight(8), 0, (0,), (8,))
    assert not torch.equal(first, random.initial(weight(8), 1, (0,), (8,)))
    assert not torch.equal(first, random.initial(weight(8, name="v"), 0, (0,), (8,)))
