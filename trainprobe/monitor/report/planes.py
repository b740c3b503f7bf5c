"""Packs a metric's numbers into bytes, one a cell, so that eighty million numbers fit into a page and still read well.

Code of a cell: 0 nothing recorded, 1 minus infinity, 2 exactly zero, 3 … 253 a number, 254 plus infinity, 255 NaN. The
codes are ordered: the maximum over any set of cells is the code of its worst cell (NaN, then infinity, then the
largest number), so ranks and steps are joined by `max`. A number t (log10 of it, or asinh for signed data) becomes a code by
a piecewise linear map with four knots a row, [lowest, 0.1 % quantile, 99.9 % quantile, highest], so that one outlier of
1e30 costs the other numbers no resolution: they are kept to about 1 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

MISSING, NEGATIVE_INFINITY, ZERO, LOWEST, HIGHEST, INFINITY, NAN = 0, 1, 2, 3, 253, 254, 255
CODE_KNOTS = np.array([LOWEST, 15, 241, HIGHEST], dtype=np.float64)
QUANTILES = (0.0, 0.001, 0.999, 1.0)

Codes = npt.NDArray[np.uint8]
F64 = npt.NDArray[np.float64]
Scale = Literal["log", "symlog"]


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A metric as bytes.

    codes: uint8 [ranks, rows, steps]. scale and pivot: a number x became t = log10(x), or asinh(x / pivot) / ln 10 for
    signed data. knots: t at the code knots, [rows, 4]. domain: the range of t that the colours should span. spread: t of
    the largest minus t of the smallest rank [rows, steps] (NaN where fewer than two ranks have a number), None for one
    rank or signed data.
    """

    codes: Codes
    scale: Scale
    pivot: float
    knots: F64
    domain: tuple[float, float]
    spread: F64 | None


def pack(values: npt.NDArray[np.floating], missing: npt.NDArray[np.bool_] | None = None) -> Packed:
    """Encode floats [ranks, rows, steps] as bytes; `missing` marks the cells where nothing was recorded."""
    absent = np.zeros(values.shape, dtype=bool) if missing is None else missing
    present = np.isfinite(values) & ~absent
    scale, pivot = _choose_scale(values, present)
    codes = np.zeros(values.shape, dtype=np.uint8)
    knots = np.zeros((values.shape[1], 4))
    two_ranks = values.shape[0] > 1 and scale == "log"
    spread = np.full(values.shape[1:], np.nan) if two_ranks else None
    for row in range(values.shape[1]):
        t, numeric = _transform(values[:, row, :].astype(np.float64), present[:, row, :], scale, pivot)
        if numeric.any():
            knots[row] = _quantiles(t[numeric])
            codes[:, row, :] = _encode(t, numeric, knots[row])
        if spread is not None:
            spread[row] = _spread(t, numeric)
    _mark_special(codes, values, absent, present, scale)
    return Packed(codes, scale, pivot, knots, _domain(knots, codes, scale), spread)


def decode(codes: Codes, packed: Packed) -> F64:
    """Return the numbers [..., rows, steps] that the page shows for these codes (missing cells are NaN too)."""
    t = np.empty(codes.shape, dtype=np.float64)
    for row in range(codes.shape[-2]):
        t[..., row, :] = np.interp(codes[..., row, :], CODE_KNOTS, packed.knots[row])
    x = 10.0**t if packed.scale == "log" else packed.pivot * np.sinh(t * np.log(10))
    for code, value in ((MISSING, np.nan), (NAN, np.nan), (NEGATIVE_INFINITY, -np.inf), (INFINITY, np.inf), (ZERO, 0.0)):
        x[codes == code] = value
    return x


def bucket(codes: Codes, every: int) -> tuple[Codes, Codes]:
    """Join each `every` steps of codes [..., steps]; return (largest, smallest) [..., ceil(steps / every)].

    A NaN or infinity anywhere in a bucket shows in both; cells where nothing was recorded count for neither.
    """
    if every == 1:
        return codes, codes
    pad = -codes.shape[-1] % every
    padded = np.concatenate([codes, np.zeros((*codes.shape[:-1], pad), np.uint8)], axis=-1)
    grouped = padded.reshape(*codes.shape[:-1], -1, every)
    largest = grouped.max(axis=-1)
    return largest, smallest(grouped, -1, largest)


def smallest(codes: Codes, axis: int, largest: Codes) -> Codes:
    """Return the smallest recorded code along an axis, except that NaN and +inf win as they do in `largest`."""
    low = np.where(codes == MISSING, HIGHEST, codes).min(axis=axis)
    return np.where((largest == MISSING) | (largest >= INFINITY), largest, low).astype(np.uint8)


def _choose_scale(values: npt.NDArray[np.floating], present: npt.NDArray[np.bool_]) -> tuple[Scale, float]:
    least = values.min(initial=0.0) if present.all() else values.min(where=present, initial=0.0)
    if least >= 0:
        return "log", 1.0
    magnitude = np.abs(values[present & (values != 0)])
    return "symlog", float(np.median(magnitude, overwrite_input=True)) if magnitude.size else 1.0


def _transform(x: F64, present: npt.NDArray[np.bool_], scale: Scale, pivot: float) -> tuple[F64, npt.NDArray[np.bool_]]:
    """Return t [ranks, steps] and where it is a number; on the log scale a zero is not one, it has its own code."""
    numeric = present & (x > 0) if scale == "log" else present
    safe = np.where(numeric, x, 1.0)
    return (np.log10(safe) if scale == "log" else np.arcsinh(safe / pivot) / np.log(10)), numeric


def _encode(t: F64, numeric: npt.NDArray[np.bool_], knots: F64) -> Codes:
    code = np.interp(t, knots, CODE_KNOTS)
    return np.where(numeric, np.rint(code), 0).astype(np.uint8)


def _quantiles(t: F64) -> F64:
    """Return `numpy.quantile` of QUANTILES, in a third of its time. Changes the order of t."""
    at = np.array(QUANTILES) * (t.size - 1)
    low, high = np.floor(at).astype(np.int64), np.ceil(at).astype(np.int64)
    t.partition(np.unique(np.concatenate([low[1:3], high[1:3]])))
    below, above = t[low], t[high]
    below[0] = above[0] = t.min()
    below[3] = above[3] = t.max()
    step, part = above - below, at - low
    return np.where(part < 0.5, below + step * part, above - step * (1 - part))


def _spread(t: F64, numeric: npt.NDArray[np.bool_]) -> F64:
    high = np.where(numeric, t, -np.inf).max(axis=0)
    low = np.where(numeric, t, np.inf).min(axis=0)
    return np.where(numeric.sum(axis=0) > 1, high - low, np.nan)


def _mark_special(
    codes: Codes,
    values: npt.NDArray[np.floating],
    absent: npt.NDArray[np.bool_],
    present: npt.NDArray[np.bool_],
    scale: Scale,
) -> None:
    if scale == "log":
        codes[present & (values == 0)] = ZERO
    if present.sum() + absent.sum() == present.size:
        return
    codes[np.isnan(values) & ~absent] = NAN
    codes[np.isposinf(values) & ~absent] = INFINITY
    codes[np.isneginf(values) & ~absent] = NEGATIVE_INFINITY


def _domain(knots: F64, codes: Codes, scale: Scale) -> tuple[float, float]:
    """Return the colours' range: the rows' own core ranges joined, and balanced around zero for signed data."""
    used = knots[((codes >= LOWEST) & (codes <= HIGHEST)).any(axis=(0, 2))]
    if used.size == 0:
        return 0.0, 1.0
    low, high = float(used[:, 1].min()), float(used[:, 2].max())
    if scale == "symlog":
        low, high = -max(-low, high), max(-low, high)
    return (low, high) if high - low > 1e-6 else (low - 0.5, high + 0.5)
