"""The compiled kernel for float arrays, where the package was built with one; elsewhere NumPy does the work (see measure)."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from trainprobe.engine.compare.difference import Difference
from trainprobe.engine.compare.number_formats import NumberFormat, coarser

try:
    from trainprobe.engine.compare import _native as kernel  # pyright: ignore[reportAttributeAccessIssue]
except ImportError:
    kernel = None

_KINDS = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3}  # as in native/difference.c


def compiled_difference(
    a: npt.NDArray[Any], b: npt.NDArray[Any], format_a: NumberFormat, format_b: NumberFormat
) -> Difference | None:
    """Return the difference of two contiguous arrays of bits [n], `at` as a flat index.

    None when the kernel is not built, does not know the formats, or met a NaN or an infinity.
    """
    if kernel is None or format_a.name not in _KINDS or format_b.name not in _KINDS:
        return None
    rough = coarser(format_a, format_b)
    kinds = _KINDS[format_a.name], _KINDS[format_b.name]
    found = kernel.difference(a.ctypes.data, b.ctypes.data, a.size, *kinds, rough.smallest)
    if found is None:
        return None
    changed, square_d, square_a, square_b, dot, max_abs, max_ulp, at = found
    place = (at,) if changed else None
    return Difference(a.size, changed, 0, 0, 0, square_d, square_a, square_b, dot, max_abs, max_ulp / rough.epsilon, place)
