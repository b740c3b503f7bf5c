"""Magnitudes counted in bins between powers of two and a few limits, and what such counts tell.

With e the exponent number of x (0 of zero and NaN, 1 from the smallest power of two on, the last one of infinity) and k
the number of limits L with x >= L, the bin of x is e + k. Neither falls as x grows, so the numbers below a limit, or below a
power of two, fill the bins up to one that is known beforehand: one count of all elements tells every limit and every exponent
exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.stats.histogram import exponent_range

_SUBNORMAL = (1 << 23) - 1  # bits of the largest subnormal number of float32, of 1 for the smallest
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ExponentBins:
    """The bins of numbers of a dtype ("float32", "float64") between its powers of two and `limits` more."""

    dtype: str
    limits: int

    @property
    def lowest(self) -> int:
        """The exponent of the smallest number."""
        return exponent_range(self.dtype)[0]

    @property
    def last(self) -> int:
        """The exponent number of infinity."""
        return exponent_range(self.dtype)[1] - self.lowest + 2

    @property
    def bins(self) -> int:
        """How many bins there are."""
        return self.last + 1 + self.limits

    def exponents(self, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the exponent numbers of magnitudes without NaN, of the dtype, as integers [n]."""
        if self.dtype == "float32":
            bits = x.view(np.int32)
            if (bits - 1).view(np.uint32).min(initial=_SUBNORMAL) >= _SUBNORMAL:  # zeros wrap round: none is subnormal
                at = (bits >> 23).astype(np.int16)
                at += (at > 0).view(np.int8) * np.int8(23)
                return at
        at = (np.frexp(np.where(x < np.inf, x, 0.0))[1] - self.lowest).astype(np.int16)
        at[x == 0] = 0
        at[x == np.inf] = self.last
        return at

    def powers(self) -> F64:
        """Return the powers of two at which the exponents begin, that of infinity last, [last]."""
        with np.errstate(over="ignore"):  # of float64 the last one is infinity itself
            return np.ldexp(1.0, np.arange(self.lowest, self.lowest + self.last))

    def below(self, counts: I64, limits: F64) -> tuple[I64, I64]:
        """Return how many numbers are below each limit, [rows, limits], and how many are with each exponent, [rows, last - 1].

        counts: int64 [rows, bins]. limits: positive, [rows, limits] or for all rows [1, limits], in any order.
        """
        powers = self.powers()
        marks = np.concatenate([limits, np.broadcast_to(powers, (len(limits), powers.size))], axis=1)
        cut = self._exponent(marks) + (limits[:, None, :] < marks[:, :, None]).sum(-1)
        cut[:, self.limits :] -= 1  # what is below a power of two ends with the exponent before
        total = np.take_along_axis(counts.cumsum(1), np.broadcast_to(cut, (len(counts), cut.shape[1])), 1)
        return total[:, : self.limits], np.diff(total[:, self.limits :], axis=1)

    def _exponent(self, x: F64) -> I64:
        exponent = np.frexp(np.where(np.isfinite(x), x, 1.0))[1].astype(np.int64) - self.lowest
        return np.where(np.isfinite(x), exponent, self.last)


def first_past(limit: float, scale: npt.NDArray[Any], *, itself: bool) -> npt.NDArray[Any]:
    """Return the smallest positive numbers whose product with the scale, rounded to its dtype, is past a limit.

    scale: positive, float32 or float64 [k]; the result has its dtype. itself: whether a product equal to the limit is past it.
    Where no finite number is, that is infinity. The product grows with the number, so the bits are halved until one is left.
    """
    whole = np.int32 if scale.dtype == np.float32 else np.int64
    low = np.zeros(scale.shape, whole)
    high = np.full(scale.shape, np.array(np.inf, scale.dtype).view(whole))
    with np.errstate(over="ignore", under="ignore"):
        while (high - low > 1).any():
            middle = low + (high - low) // 2
            product = middle.view(scale.dtype) * scale
            past = product >= limit if itself else product > limit
            high, low = np.where(past, middle, high), np.where(past, low, middle)
    return high.view(scale.dtype)
