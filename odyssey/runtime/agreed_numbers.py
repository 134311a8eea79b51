"""Whole numbers that all who have any have alike: a sum over the workers shows which they are, or that they differ.

So a rank that has none learns what the others have, in a reduction that is made anyway.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

N_RATE = 9
"""So many numbers tell of learning rates."""
_WORDS, _RATE = struct.Struct("<4H"), struct.Struct("<d")


def told(numbers: Sequence[int]) -> list[float]:
    """Give what a worker adds that has `numbers`, of up to 16 bits: a one, them, and their squares. Sums of these are exact."""
    return [1.0, *map(float, numbers), *(float(number * number) for number in numbers)]


def untold(n: int) -> list[float]:
    """Give what a worker adds that has no such `n` numbers."""
    return [0.0] * (1 + 2 * n)


def alike(sums: Iterable[float]) -> tuple[int, ...] | None:
    """Find the numbers that all who have told any have: empty where nobody has, None where they differ.

    For a mean is as large as the root of the mean square only where all are equal.
    """
    n_told, *rest = map(int, sums)
    numbers, squares = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    if n_told == 0:
        return ()
    if any(n_told * square != number * number for number, square in zip(numbers, squares, strict=True)):
        return None
    return tuple(number // n_told for number in numbers)


def rates_told(rates: Iterable[float]) -> list[float]:
    """Give what a worker adds that has these learning rates, each once, to the last bit."""
    each = [untold(4), *(told(_WORDS.unpack(_RATE.pack(rate))) for rate in rates)]
    return [sum(column) for column in zip(*each, strict=True)]


def rate_of(sums: Iterable[float]) -> float | None:
    """Find the learning rate that all have, if there is such a one."""
    words = alike(sums)
    return float(_RATE.unpack(_WORDS.pack(*words))[0]) if words else None
