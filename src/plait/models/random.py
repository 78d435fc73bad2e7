"""Random numbers from counters: a value depends on a key and an index, on nothing else.

So a rank can make its own part of a tensor, wherever the layout has put it, and gets the very
values that one process would have got. Philox and its like do the same on GPUs (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC11); here the mixing function is that of
SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), applied twice, which needs only 64-bit integer
multiplication, shift and xor and so gives the same bits on every device.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from plait.spec.parameters import Parameter

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
#: Elements made at once: temporaries stay at some 10 MiB however large the tensor is.
_CHUNK = 1 << 18


def _signed(word: int) -> int:
    """A 64-bit word as torch's int64 holds it."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


def key(seed: int, name: str) -> int:
    """The key of one stream: a signed 64-bit number from a seed and a name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return _signed(int.from_bytes(digest[:8], "little"))


def bits(key: int, index: Tensor) -> Tensor:
    """64 random bits for each index: int64 of any shape -> int64 of that shape."""
    z = _mix_(index * _signed(_GOLDEN) + key)
    # The key enters again, so that two streams are never shifted copies of each other.
    return _mix_(z.bitwise_xor_(key))


def uniform(key: int, index: Tensor) -> Tensor:
    """Uniform in [0, 1) with 53 random bits for each index, float64."""
    return _shift(bits(key, index), 11).double().mul_(2.0**-53)


def normal(key: int, index: Tensor) -> Tensor:
    """Standard normal for each index, float64.

    Box and Muller's transform of the two halves of one word; the radius ends at
    sqrt(2 ln 2^32) = 6.66.
    """
    word = bits(key, index)
    angle = (word & 0xFFFFFFFF).double().mul_(2 * math.pi * 2.0**-32).cos_()
    radius = _shift(word, 32).double().add_(1.0).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
    return radius.mul_(angle)


def fill_(tensor: Tensor, key: int, index: int | Tensor = 0, std: float = 1.0) -> Tensor:
    """Fills a tensor with std * normal(key, index) in place and returns it.

    Args:
        tensor: any shape, floating dtype.
        key: of the stream.
        index: int64 of as many elements, or the index of the first element of a run.
        std: standard deviation.
    """
    flat = tensor.detach().view(-1)
    for start in range(0, flat.numel(), _CHUNK):
        stop = min(start + _CHUNK, flat.numel())
        if isinstance(index, int):
            part = torch.arange(index + start, index + stop, device=flat.device)
        else:
            part = index.reshape(-1)[start:stop]
        flat[start:stop].copy_(normal(key, part).mul_(std))
    return tensor


def initial(
    p: Parameter,
    seed: int,
    offset: Sequence[int],
    size: Sequence[int],
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The first values of a box of a parameter, whoever holds it.

    Args:
        p: the parameter; element i of its row-major order gets the i-th value of its stream.
        seed: of the run.
        offset, size: the box.
        dtype: of the result; values are made in float64 and rounded once.

    Returns:
        A tensor of shape `size`.
    """
    out = torch.empty(tuple(size), dtype=dtype)
    kind, value = p.init
    if kind == "constant":
        return out.fill_(value)
    assert kind == "normal", kind
    shape, offset, extent = _merge(p.shape, offset, size)
    stream = key(seed, p.name)
    flat = out.view(-1)
    for start in range(0, flat.numel(), _CHUNK):
        stop = min(start + _CHUNK, flat.numel())
        index = _box_index(shape, offset, extent, start, stop)
        flat[start:stop].copy_(normal(stream, index).mul_(value))
    return out


def _merge(
    shape: Sequence[int], offset: Sequence[int], size: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """The same box with dims joined to the one before them where they are held whole."""
    merged: list[list[int]] = []
    for n, o, s in zip(shape, offset, size, strict=True):
        if merged and s == n:
            merged[-1] = [m * n for m in merged[-1]]
        else:
            merged.append([n, o, s])
    return tuple(map(list, zip(*merged, strict=True)))


def _box_index(
    shape: Sequence[int], offset: Sequence[int], size: Sequence[int], start: int, stop: int
) -> Tensor:
    """Row-major index in the whole tensor of elements [start, stop) of a box."""
    if len(shape) == 1:
        return torch.arange(offset[0] + start, offset[0] + stop)
    rest = torch.arange(start, stop)
    index, stride = torch.zeros_like(rest), 1
    for n, o, s in reversed(list(zip(shape, offset, size, strict=True))):
        index += (rest % s + o) * stride
        rest = rest // s
        stride *= n
    return index


def _shift(word: Tensor, n: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (word >> n).bitwise_and_((1 << (64 - n)) - 1)


def _mix_(z: Tensor) -> Tensor:
    z = z.bitwise_xor_(_shift(z, 30)).mul_(_signed(_MIX[0]))
    z = z.bitwise_xor_(_shift(z, 27)).mul_(_signed(_MIX[1]))
    return z.bitwise_xor_(_shift(z, 31))
