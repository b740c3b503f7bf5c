"""Two arrays of key data side by side: the figures of their row in a sheet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.compare.number_formats import FORMATS, NumberFormat, coarser
from trainprobe.errors import FormatError

Array = npt.NDArray[Any]
_LONGEST_TEXT = 80  # characters of an element that are quoted


@dataclass(frozen=True, slots=True)
class Pair:
    """How two arrays differ. Where their shapes are not the same, the figures are of the part that both have.

    equal: share of equal elements in percent; two NaN are equal. first_mismatch: row-major index of the first element that is
    not, None when all are. first_values: that element on both sides. max_abs: largest |a − b|; max_relative: largest
    |a − b| / max(|a|, |b|); max_ulp: largest |a − b| in units in the last place of the coarser format; None for texts, infinite
    where one side alone is not finite. within_thousandth, within_hundredth: share of elements, in percent, with |a − b| of at
    most that part of max(|a|, |b|).
    """

    shape1: tuple[int, ...]
    shape2: tuple[int, ...]
    floating: bool
    equal: float
    first_mismatch: int | None
    first_values: tuple[str, str] = ("", "")
    max_abs: float | None = None
    max_relative: float | None = None
    max_ulp: float | None = None
    within_thousandth: float | None = None
    within_hundredth: float | None = None


def pair_of(a: Array, b: Array, format_a: str | None = None, format_b: str | None = None) -> Pair:
    """Compare two arrays of any shape and dtype. Raises FormatError for elements that are neither numbers nor texts.

    format_a, format_b: the number formats that the values had before they were kept, where they were others.
    """
    for side in (a, b):
        if side.dtype.kind not in "biufcU":
            raise FormatError(f"elements of dtype {side.dtype} are neither numbers nor texts")
    shapes = (a.shape, b.shape)
    x, y = _shared_part(a, b)
    if (x.dtype.kind == "U") != (y.dtype.kind == "U"):
        return Pair(*shapes, False, 0.0, 0 if x.size else None, (_shown(x, 0), _shown(y, 0)))
    same = (x == y) | ((x != x) & (y != y))
    unequal = np.flatnonzero(~same)
    first = int(unequal[0]) if unequal.size else None
    values = ("", "") if first is None else (_shown(x, first), _shown(y, first))
    floating = x.dtype.kind in "fc" or y.dtype.kind in "fc"
    equal = _percent(same)
    if x.dtype.kind == "U":
        return Pair(*shapes, floating, equal, first, values)
    return Pair(
        *shapes, floating, equal, first, values, *_errors(x, y, same, coarser(_format(x, format_a), _format(y, format_b)))
    )


def _shared_part(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the elements that both arrays have, flat; in row-major order where the numbers of dimensions differ."""
    if a.ndim != b.ndim:
        a, b = a.reshape(-1), b.reshape(-1)
    part = tuple(slice(0, min(n, m)) for n, m in zip(a.shape, b.shape, strict=True))
    return a[part].reshape(-1), b[part].reshape(-1)


def _errors(x: Array, y: Array, same: Array, rough: NumberFormat) -> tuple[float, float, float, float, float]:
    """Return (largest absolute, largest relative error, units in the last place, shares within 1/1000 and 1/100)."""
    if not x.size:
        return 0.0, 0.0, 0.0, 100.0, 100.0
    with np.errstate(all="ignore"):
        u, v = (side.astype(np.complex128 if side.dtype.kind == "c" else np.float64) for side in (x, y))
        distance = np.where(same, 0.0, np.abs(u - v))
        distance = np.where(np.isfinite(distance), distance, np.inf)
        scale = np.maximum(np.abs(u), np.abs(v))
        relative = np.where(same, 0.0, np.where(np.isfinite(scale), distance / np.where(scale > 0, scale, 1.0), np.inf))
        spacing = np.exp2(np.floor(np.log2(np.maximum(scale, rough.smallest or 1.0)))) * rough.epsilon
        ulps = distance if rough.mantissa is None else np.where(same, 0.0, distance / spacing)
    worst = (float(distance.max()), float(relative.max()), float(np.nan_to_num(ulps, nan=np.inf, posinf=np.inf).max()))
    return *worst, _percent(relative <= 1e-3), _percent(relative <= 1e-2)


def _format(array: Array, name: str | None) -> NumberFormat:
    return FORMATS.get(name or "", FORMATS.get(array.dtype.name, FORMATS["float64"]))


def _percent(mask: Array) -> float:
    return 100.0 * float(np.count_nonzero(mask)) / mask.size if mask.size else 100.0


def _shown(array: Array, index: int) -> str:
    if not array.size:
        return ""
    text = repr(array[index].item())
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
