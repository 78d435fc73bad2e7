"""Elasticity: the global batch that DeepSpeed chooses so that many numbers of devices divide it.

Source: elasticity/elasticity.py of DeepSpeed 0.19.6.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from plait.spec.layout import divisors

#: Numbers with more divisors than any smaller one (OEIS A002182, as far as DeepSpeed goes).
_COMPOSITE = (
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560,
    10080, 15120, 20160, 25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200,
    332640, 498960, 554400, 665280, 720720,
)  # fmt: skip
#: The largest batch that is worked out.
_LARGEST = 10**9


@dataclass(frozen=True)
class Elastic:
    """What a configuration asks of elasticity; the defaults are DeepSpeed's.

    Attributes:
        most: the largest global batch, samples. micros: micro batches that fit a device.
        fewest, largest: devices. larger: of equally good batches the larger one.
        version: 0.1 refuses other numbers of devices, 0.2 takes another batch for them.
    """

    most: int = 2000
    micros: tuple[int, ...] = (2, 4, 6)
    fewest: int = 1
    largest: int = 10000
    larger: bool = True
    version: float = 0.2

    def sound(self) -> bool:
        return 0 < self.most <= _LARGEST and bool(self.micros) and all(
            0 < micro <= self.most for micro in self.micros
        )  # fmt: skip

    def batch(self) -> tuple[int, tuple[int, ...]]:
        """The global batch, and the numbers of devices that divide it into micro batches."""
        best, worlds = min(self.micros), ()
        for batch in _candidates((*self.micros, lcm(*self.micros)), self.most):
            found = self._worlds(batch)
            better = batch > best if self.larger else batch < best
            if len(found) > len(worlds) or (len(found) == len(worlds) and better):
                best, worlds = batch, found
        return best, worlds

    def _worlds(self, batch: int) -> tuple[int, ...]:
        found = {
            n
            for micro in self.micros
            if batch % micro == 0
            for n in divisors(batch // micro)
            if self.fewest <= n <= self.largest
        }
        return tuple(sorted(found))

    def on(self, dp: int) -> tuple[int, int | None]:
        """Global and micro batch on so many data-parallel ranks; None: none fits."""
        batch, worlds = self.batch()
        if dp not in worlds and self.version >= 0.2:
            sizes = [micro * dp * (self.most // (micro * dp)) for micro in self.micros]
            batch = max(sizes) if self.larger else min(sizes)
        fits = [micro for micro in self.micros if batch and batch // dp % micro == 0]
        return batch, max(fits, default=None)


def _candidates(bases: Sequence[int], most: int) -> list[int]:
    found = {
        base * max(n for n in _COMPOSITE if n <= most // base) for base in bases if base <= most
    }
    return sorted(found)
