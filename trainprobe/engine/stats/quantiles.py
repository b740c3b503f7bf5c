"""Exact quantiles of a tensor's elements, by linear interpolation between order statistics."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.errors import UsageError


def checked_levels(levels: Any) -> npt.NDArray[np.float64]:
    """Return quantile levels as float64 [k]; UsageError unless each is within 0 and 1."""
    array = np.atleast_1d(np.asarray(levels, np.float64))
    if array.ndim != 1 or not np.all((array >= 0) & (array <= 1)):
        raise UsageError(f"quantile levels must lie between 0 and 1, got {levels!r}: write for example [0.01, 0.5, 0.99]")
    return array


def quantiles(array: npt.NDArray[Any], levels: Any) -> npt.NDArray[np.float64]:
    """Return the quantiles [k] in float64, as numpy.quantile(method="linear"); NaN when there is a NaN or no element."""
    levels_array = checked_levels(levels)
    x = np.asarray(array).reshape(-1).astype(np.float64)
    if x.size == 0 or np.isnan(x).any():
        return np.full(levels_array.size, np.nan)
    with np.errstate(invalid="ignore"):
        return np.quantile(x, levels_array)
