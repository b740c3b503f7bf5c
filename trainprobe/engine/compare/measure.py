"""One pass over two arrays for every number that says how they differ.

Blocks small enough for the cache are decoded and measured before the next one is touched, so memory stays at a few blocks
whatever the arrays' size. Blocks whose bits agree take a short cut. Floats go through a compiled kernel where it was built
(see compiled); what it does not know goes through NumPy, with the same result up to the order of sums. Both release the
interpreter lock, so that threads measure different arrays at the same time.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.compare.compiled import compiled_difference
from trainprobe.engine.compare.difference import Difference, Position
from trainprobe.engine.compare.number_formats import FORMATS, NumberFormat, coarser, decode
from trainprobe.errors import CompareError

Array = npt.NDArray[Any]
F64 = npt.NDArray[np.float64]
BLOCK = 1 << 15  # elements: 256 KiB of float64, so that the working set of one thread stays in its own cache
_EXPONENT = np.int64(0x7FF0000000000000)  # exponent bits of a float64: x & this is 2^floor(log2 |x|)
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def measure(a: Array, b: Array, format_a: NumberFormat | None = None, format_b: NumberFormat | None = None) -> Difference:
    """Return how a and b differ. Two arrays of equal shape, any strides, as bits of the two formats (see number_formats).

    The formats may be left out for arrays whose NumPy dtype tells them. Raises CompareError when the shapes are not the same.
    """
    if a.shape != b.shape:
        raise CompareError(f"cannot measure arrays of shapes {a.shape} and {b.shape} against each other: give the common part")
    kinds = (format_a or _named(a), format_b or _named(b))
    if a.flags.c_contiguous and b.flags.c_contiguous:
        whole = compiled_difference(a.reshape(-1), b.reshape(-1), *kinds)
        if whole is not None:
            return _at_first_change(_unravelled(whole, a.shape), a, b, kinds)
    total = Difference()
    for where in blocks(a.shape):
        part = _block(np.ascontiguousarray(a[where]).reshape(-1), np.ascontiguousarray(b[where]).reshape(-1), *kinds)
        if part.at is not None:
            inside = np.unravel_index(part.at[0] // coarser(*kinds).parts, _extent(where, a.shape))
            part = replace(part, at=_place(where, inside, a.ndim))
        total = total.merge(part)
    return _at_first_change(total, a, b, kinds)


def _at_first_change(found: Difference, a: Array, b: Array, kinds: tuple[NumberFormat, NumberFormat]) -> Difference:
    """Return the difference at the first element of other bits, where none is at a distance: 0 and -0, or a NaN on one side."""
    if found.at is None or found.max_abs > 0 or not found.changed or kinds[0].name != kinds[1].name:
        return found
    word = _BITS.get(a.dtype.itemsize, np.uint64)
    flat = [np.ascontiguousarray(each).reshape(-1).view(word) for each in (a, b)]
    first = int(np.argmax(flat[0] != flat[1])) // (flat[0].size // a.size)
    return replace(found, at=tuple(int(i) for i in np.unravel_index(first, a.shape)))


def blocks(shape: tuple[int, ...], size: int = BLOCK) -> Iterator[tuple[slice, ...]]:
    """Yield slices that cut an array of `shape` into pieces of at most about `size` elements, in row-major order."""
    if not shape:
        yield ()
        return
    if math.prod(shape) == 0:
        return
    inner = math.prod(shape[1:])
    if inner <= size:
        rows = max(1, size // max(1, inner))
        for start in range(0, shape[0], rows):
            yield (slice(start, min(start + rows, shape[0])),)
        return
    for row in range(shape[0]):
        for rest in blocks(shape[1:], size):
            yield (slice(row, row + 1), *rest)


def _named(array: Array) -> NumberFormat:
    name = array.dtype.name
    if name not in FORMATS:
        raise CompareError(f"cannot measure an array of dtype {name}: pass its bits and the number format")
    return FORMATS[name]


def _unravelled(part: Difference, shape: tuple[int, ...]) -> Difference:
    if part.at is None:
        return part
    return replace(part, at=tuple(int(i) for i in np.unravel_index(part.at[0], shape)))


def _extent(where: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    cut = tuple(s.stop - s.start for s in where)
    return cut + shape[len(cut) :]


def _place(where: tuple[slice, ...], inside: tuple[Any, ...], ndim: int) -> Position:
    start = [s.start for s in where] + [0] * (ndim - len(where))
    return tuple(int(s + i) for s, i in zip(start, inside, strict=True))


class _Scratch(threading.local):
    """Working arrays of one thread, made once: allocating a block costs more than calculating with it."""

    def __init__(self) -> None:
        self.a, self.b, self.d, self.m = (np.empty(2 * BLOCK) for _ in range(4))


_SCRATCH = _Scratch()


def _block(a: Array, b: Array, format_a: NumberFormat, format_b: NumberFormat) -> Difference:
    """Measure one contiguous block, given as bits [n]; `at` is a flat index."""
    compiled = compiled_difference(a, b, format_a, format_b)
    if compiled is not None:
        return compiled
    same_kind = format_a.name == format_b.name
    changed = -1
    if same_kind:
        word = _BITS.get(a.dtype.itemsize, np.uint64)
        unequal = a.view(word) != b.view(word)
        changed = int(np.count_nonzero(unequal))
        if changed == 0:
            return _identical(decode(a, format_a).reshape(-1), a.size)
        if format_a.parts > 1:
            changed = int(np.count_nonzero(unequal.reshape(a.size, -1).any(axis=1)))
    va, vb = decode(a, format_a).reshape(-1), decode(b, format_b).reshape(-1)
    n = va.size
    x, y = _wide(va, _SCRATCH.a), _wide(vb, _SCRATCH.b)
    if changed < 0:
        differ = (x != y) & ~(np.isnan(x) & np.isnan(y))
        changed = int(np.count_nonzero(differ))
    rough = coarser(format_a, format_b)
    with np.errstate(all="ignore"):
        d = np.subtract(x, y, out=_buffer(_SCRATCH.d, n))
        square_d = float(d @ d)
        if not math.isfinite(square_d) or not math.isfinite(float(x @ x)):
            return _with_nonfinite(x, y, changed, a.size, rough)
        return _finite(x, y, d, square_d, changed, a.size, rough)


def _buffer(scratch: F64, n: int) -> F64:
    return scratch[:n] if n <= scratch.size else np.empty(n)


def _wide(values: Array, scratch: F64) -> F64:
    if values.dtype == np.float64:
        return values
    out = _buffer(scratch, values.size)
    np.copyto(out, values)
    return out


def _identical(values: Array, count: int) -> Difference:
    with np.errstate(all="ignore"):
        x = _wide(values, _SCRATCH.a)
        square = float(x @ x)
        nans = 0
        if not math.isfinite(square):
            nans = int(np.count_nonzero(np.isnan(x)))
            finite = x[np.isfinite(x)]
            square = float(finite @ finite)
    return Difference(count, 0, nans, nans, 0, 0.0, square, square, square)


def _finite(x: F64, y: F64, d: F64, square_d: float, changed: int, count: int, rough: NumberFormat) -> Difference:
    """Finish a block without NaN and infinity; x, y are overwritten when they are scratch."""
    square_a, square_b, dot = float(x @ x), float(y @ y), float(x @ y)
    np.abs(d, out=d)
    worst = int(d.argmax())
    max_abs = float(d[worst])
    max_ulp = max_abs if rough.mantissa is None else _ulps(x, y, d, rough)
    return Difference(
        count, changed, 0, 0, 0, square_d, square_a, square_b, dot, max_abs, max_ulp, (worst,) if changed else None
    )


def _ulps(x: F64, y: F64, d: F64, rough: NumberFormat) -> float:
    """Return the largest |d| in units in the last place of `rough` at the larger of |x|, |y|."""
    m = np.abs(x, out=_buffer(_SCRATCH.m, x.size))
    np.maximum(m, np.abs(y), out=m)
    whole = m.view(np.int64)
    np.bitwise_and(whole, _EXPONENT, out=whole)  # m is now the power of two at or below the larger magnitude
    np.maximum(m, rough.smallest, out=m)
    np.divide(d, m, out=m)
    return float(m.max()) / rough.epsilon


def _with_nonfinite(x: F64, y: F64, changed: int, count: int, rough: NumberFormat) -> Difference:
    """Measure a block that holds NaN, infinity, or float64 values too large to square."""
    nan_x, nan_y = np.isnan(x), np.isnan(y)
    both = np.isfinite(x) & np.isfinite(y)
    misplaced = ~both & ~(nan_x & nan_y) & (x != y)
    where = np.flatnonzero(both)
    u, v = x[where], y[where]
    d = u - v
    square_d = float(d @ d)
    part = Difference(count=count, changed=changed)
    if where.size:
        part = _finite(u, v, d, square_d, changed, count, rough)
    at = None if part.at is None else (int(where[part.at[0]]),)
    lost = int(np.count_nonzero(misplaced))
    if lost:
        at = (int(np.flatnonzero(misplaced)[0]),)
    largest = (math.inf, math.inf) if lost else (part.max_abs, part.max_ulp)
    nans = int(np.count_nonzero(nan_x)), int(np.count_nonzero(nan_y))
    return Difference(
        count, changed, *nans, lost, part.square_d, part.square_a, part.square_b, part.dot, *largest, at if changed else None
    )
