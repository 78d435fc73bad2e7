"""What a device must have beside what a formula counts: one number, fitted on runs.

Nobody's formula counts everything that takes device memory: the context of the driver, buffers of
the communication library, blocks that the caching allocator keeps and cannot use. A reserve stands
for all of it. It is fitted on runs that ran, and only on them: who has room to spare says little,
who ran with little says how small the rest can be.
"""

from collections.abc import Iterable
from math import floor


def fitted_reserve(rooms: Iterable[float], refused: float = 0.1) -> float:
    """The largest reserve under which a further run like these is wrongly refused with a
    probability of at most `refused`.

    It is the k-th smallest of n rooms, k = floor(refused (n + 1)): of n + 1 runs in any order, the
    last is among the k - 1 that have less with a probability of at most k / (n + 1) (conformal
    prediction; Vovk, Gammerman and Shafer 2005, section 2.2).

    Args:
        rooms: of runs that ran, what the device has beyond what the formula counts, bytes.

    Raises:
        ValueError: too few runs for `refused`: fewer than 9 for one in ten.
    """
    ordered = sorted(rooms)
    k = floor(refused * (len(ordered) + 1))
    if k < 1:
        raise ValueError(f"{len(ordered)} runs are too few to refuse {refused} of them")
    return ordered[k - 1]


def fits(counted: float, device: float, reserve: float) -> bool:
    """Whether what a formula counts, and the reserve, go into a device; bytes."""
    return counted + reserve <= device
