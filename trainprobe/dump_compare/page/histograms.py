"""How the elements of a value are spread, on both sides over the same bins."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

BINS = 48
Counts = tuple[float, float, list[list[int]]]  # first and last edge, and the counts of each side
Arrays = tuple[npt.NDArray[Any] | None, npt.NDArray[Any] | None]


def histogram(arrays: Arrays) -> Counts | None:
    """Return the counts of the finite elements of both sides over bins of equal width.

    None where all elements are equal or none is finite. A side without elements has an empty list.
    """
    flat = [None if array is None else _finite(array) for array in arrays]
    filled = [array for array in flat if array is not None and array.size]
    if not filled:
        return None
    low, high = min(float(array.min()) for array in filled), max(float(array.max()) for array in filled)
    if not (high > low and np.isfinite(high - low)):
        return None
    return low, high, [[] if array is None else np.histogram(array, BINS, (low, high))[0].tolist() for array in flat]


def _finite(array: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    if array.dtype.kind not in "fiub":
        return np.zeros(0)
    flat = np.asarray(array, np.float64).reshape(-1)
    return flat[np.isfinite(flat)]
