"""Whether a weight has moved alike in two trainings: how far apart its statistics are, of how far they have moved."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

MOVED_ALIKE = 1e-2  # a median over weights that rounding explains, for each step since they were equal
_ROUNDED = 1e-6  # relative: what float32 leaves of a statistic that did not move


def apart_of_moved(a0: Sequence[float], b0: Sequence[float], a: Sequence[float], b: Sequence[float]) -> float:
    """Return the median over statistics of how far A and B are apart, of the farther of their two movements; 0 to 2.

    a0, b0, a, b: the same statistics of one weight before and after, of two trainings; those that are not finite count 2.
    """
    return median(_apart(*numbers) for numbers in zip(a0, b0, a, b, strict=True)) if len(a) else 0.0


def _apart(a0: float, b0: float, a: float, b: float) -> float:
    moved = max(abs(a - a0), abs(b - b0))
    apart = abs(a - b)
    if apart <= _ROUNDED * max(abs(a), abs(b)):
        return 0.0
    return min(apart / moved, 2.0) if moved > 0 else 2.0
