"""Exact counts of a tensor's elements: per bin, and per sign and binary exponent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.errors import UsageError

I64 = npt.NDArray[np.int64]
# Binary exponents from the smallest subnormal to the largest finite number of each dtype, both included.
EXPONENT_RANGE: dict[str, tuple[int, int]] = {
    "float16": (-24, 15),
    "bfloat16": (-133, 127),
    "float32": (-149, 127),
    "float64": (-1074, 1023),
    "float8_e4m3fn": (-9, 8),
    "float8_e5m2": (-16, 15),
    "float8_e4m3fnuz": (-10, 7),
    "float8_e5m2fnuz": (-17, 15),
    "float8_e8m0fnu": (-127, 127),
}


@dataclass(frozen=True, slots=True)
class ExponentHistogram:
    """How many elements have |x| in [2^e, 2^(e+1)), by sign; e runs from `lowest`.

    negative, positive: int64 [exponents]. zero, nan, posinf, neginf: the elements that have no exponent.
    """

    lowest: int
    negative: I64
    positive: I64
    zero: int
    nan: int
    posinf: int
    neginf: int

    @property
    def count(self) -> int:
        """All elements."""
        return int(self.negative.sum() + self.positive.sum()) + self.zero + self.nan + self.posinf + self.neginf

    @classmethod
    def from_counts(cls, counts: I64, dtype: str) -> ExponentHistogram:
        """Build from counts [2 · exponents + 4]: negative, positive, then zero, nan, posinf, neginf."""
        lowest, highest = exponent_range(dtype)
        n = highest - lowest + 1
        zero, nan, posinf, neginf = (int(x) for x in counts[2 * n :])
        return cls(lowest, counts[:n], counts[n : 2 * n], zero, nan, posinf, neginf)


def exponent_range(dtype: str) -> tuple[int, int]:
    """Return the binary exponents of a dtype given by name ("float16", "torch.float16"); others as float64."""
    return EXPONENT_RANGE.get(dtype.rpartition(".")[2], EXPONENT_RANGE["float64"])


def checked_edges(edges: Any) -> npt.NDArray[np.float64]:
    """Return bin edges [bins + 1] as float64; UsageError unless there are two or more and they increase."""
    array = np.asarray(edges, np.float64)
    if array.ndim != 1 or array.size < 2 or not np.all(np.diff(array) > 0):
        raise UsageError(f"histogram edges must be two or more increasing numbers, got {edges!r}: write for example [-1, 0, 1]")
    return array


def bin_counts(array: npt.NDArray[Any], edges: Any) -> I64:
    """Count elements per bin [edges[i], edges[i + 1]), the last one closed, as numpy.histogram; int64 [bins].

    NaN and elements outside the edges are in no bin.
    """
    bounds = checked_edges(edges)
    x = np.asarray(array).reshape(-1).astype(np.float64)
    x = x[(x >= bounds[0]) & (x <= bounds[-1])]
    at = np.minimum(np.searchsorted(bounds, x, side="right") - 1, bounds.size - 2)
    return np.bincount(at, minlength=bounds.size - 1).astype(np.int64)
