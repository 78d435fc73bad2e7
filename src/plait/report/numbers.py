"""Numbers in words, for text and pages alike."""

from collections.abc import Iterable


def amount(n: float) -> str:
    """Bytes with a binary unit, three digits: "61.2 GiB"."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(n) >= size:
            value = n / size
            digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
            return f"{value:.{digits}f} {unit}"
    return f"{n:.0f} B" if n else "0"


def count(n: float) -> str:
    """A large count with a decimal unit: "70.6 B"."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:,}"


def spans(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 as "0-2, 5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def repeats(values: Iterable[int]) -> str:
    """3, 4, 4, 4 as "3, 4 x 3"."""
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1][1] += 1
        else:
            runs.append([value, 1])
    return ", ".join(str(value) if n == 1 else f"{value} x {n}" for value, n in runs)
