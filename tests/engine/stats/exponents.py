"""Counts of exponents by NumPy, to compare others with."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.stats.histogram import ExponentHistogram, exponent_range


def exponent_histogram(array: npt.NDArray[Any], dtype: str | None = None) -> ExponentHistogram:
    """Count elements by sign and binary exponent; dtype: whose exponents to span (the array's own by default)."""
    x = np.asarray(array).reshape(-1)
    name = dtype or str(x.dtype)
    x = x.astype(np.float64)
    lowest, highest = exponent_range(name)
    n = highest - lowest + 1
    counts = np.zeros(2 * n + 4, np.int64)
    ordinary = x[np.isfinite(x) & (x != 0)]
    exponents = np.frexp(ordinary)[1].astype(np.int64) - 1
    inside = np.clip(exponents - lowest, 0, n - 1)
    counts[: 2 * n] = np.bincount(inside + n * (ordinary > 0), minlength=2 * n)
    counts[2 * n :] = [(x == 0).sum(), np.isnan(x).sum(), (x == np.inf).sum(), (x == -np.inf).sum()]
    return ExponentHistogram.from_counts(counts, name)
