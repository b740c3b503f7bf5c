"""Host memory to partials without a tensor library: rows reduced by the compiled kernel, or by NumPy in float64.

Both give the same counts, extrema, checksums and CRCs bit for bit; magnitudes of complex128 within two units in the last place.
Bounds of the NumPy sums, x over the finite elements: up to 32 bits and complex: |error of sum| <= 2^-44 Σ|x|, |error of sumsq|
<= 2^-44 Σx² (pairwise addition in float64). float64: exact addition (`math.fsum`), squares rounded once each: |error of sum| <=
2^-53 |Σx|, |error of sumsq| <= 2^-52 Σx². 64-bit integers are added exactly and rounded once.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.compiled import native
from trainprobe.engine.geometry.shards import Shard, rectangles_of
from trainprobe.engine.stats.checksum import fingerprint, shard_fingerprint
from trainprobe.engine.stats.partials import CHECKSUM, COMPUTED_WITH, CRC32, DEVIATIONS, PARTIALS, SUBNORMAL, uncomputed

_CODES: dict[str, int] = dict(native.DTYPES) if native is not None else {}
_SMALLEST = {
    **{"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022},
    **{"complex64": 2.0**-126, "complex128": 2.0**-1022},
}
_LARGE, _SMALL, _SHIFT = 2.0**480, 2.0**-480, 600


def refusal(array: npt.NDArray[Any], dtype: str) -> str:
    """Return why an array has no statistics, or an empty string. dtype: its plain name, `bfloat16`."""
    if native_rows_in_use():
        return "" if dtype in _CODES else f"{dtype}: its elements are not whole bytes, or not known"
    try:
        values_of(array[:0] if array.ndim else array, dtype)
    except (TypeError, ValueError) as error:
        return f"{dtype}: NumPy cannot read its elements ({error})"
    return ""


def native_rows_in_use() -> bool:
    """Tell whether the compiled kernel reduces."""
    return native is not None


class NumpyStatsRows:
    """Rows of partials of the arrays of a step, in the order in which they were added.

    flags: STATS | CHECKSUM | STD | CRC32 | SUBNORMAL. compiled=False keeps to NumPy.
    """

    def __init__(self, flags: int, *, compiled: bool = True) -> None:
        self._flags = flags
        self._native: Any = native.StatsRows() if native is not None and compiled and native_rows_in_use() else None
        self._rows: list[npt.NDArray[np.float64]] = []
        self._sums: list[int] = []
        self._crcs: list[int] = []

    def __len__(self) -> int:
        return len(self._rows) if self._native is None else len(self._native)

    def add(self, array: npt.NDArray[Any], dtype: str) -> int:
        """Reduce an array into a new row and return its number, or -1 when it has no statistics. dtype: its plain name."""
        code = _CODES.get(dtype, -1) if self._native is not None else -1
        if code >= 0:
            whole = np.ascontiguousarray(array)
            rows: Any = self._native
            return rows.add(whole.__array_interface__["data"][0], code, whole.size, None, self._flags)
        if self._native is not None or refusal(array, dtype):
            return -1
        self._rows.append(reduce_row(array, dtype, self._flags))
        self._sums.append(fingerprint(array) if self._flags & CHECKSUM else 0)
        self._crcs.append(zlib.crc32(np.ascontiguousarray(array).tobytes()) if self._flags & CRC32 else 0)
        return len(self._rows) - 1

    def add_share(self, array: npt.NDArray[Any], dtype: str, shard: Shard) -> list[int]:
        """Take the share of a shard in the fingerprint of the whole array; return the rows whose fingerprints make it up."""
        if array.size != math.prod(shard.shape) or refusal(array, dtype):
            return []
        flat = np.ascontiguousarray(array).reshape(-1)
        whole = (shard.within or shard).whole
        pieces = [(flat[at : at + box.count].reshape(box.shape), box.offset) for at, box in rectangles_of(shard)]
        return [self._add_piece(piece, dtype, offset, whole) for piece, offset in pieces if piece.size]

    def _add_piece(self, array: npt.NDArray[Any], dtype: str, offset: Sequence[int], whole: Sequence[int]) -> int:
        if self._native is not None:
            steps = tuple(step // array.itemsize for step in array.strides)
            address: int = array.__array_interface__["data"][0]
            rows: Any = self._native
            return rows.add(address, _CODES[dtype], array.shape, steps, CHECKSUM, tuple(whole), offset)
        self._rows.append(np.zeros(len(PARTIALS)))
        self._sums.append(shard_fingerprint(array, offset, whole))
        self._crcs.append(0)
        return len(self._rows) - 1

    def peek(self, row: int) -> tuple[bytes, int]:
        """Return (partials as bytes, fingerprint) of a row now."""
        if self._native is not None and native is not None:
            return native.row_of(self._native, row)
        return self._rows[row].tobytes(), self._sums[row]

    def blocks(self) -> list[Any]:
        """Return nothing: all is on the host."""
        return []

    def drain(
        self, brought: Sequence[npt.NDArray[Any]] | None = None
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.uint64] | None, list[int] | None]:
        """Hand over all rows and start anew: float64 [n, 12], uint64 [n] (None unless CHECKSUM), CRC-32 (None unless CRC32)."""
        if self._native is not None:
            raw, raw_sums, crcs = self._native.take()
            rows = np.frombuffer(raw, np.float64).reshape(-1, len(PARTIALS))
            sums = np.frombuffer(raw_sums, np.uint64)
        else:
            rows = np.array(self._rows, np.float64).reshape(-1, len(PARTIALS))
            sums, crcs = np.array(self._sums, np.uint64), self._crcs
            self._rows, self._sums, self._crcs = [], [], []
        return rows, sums if self._flags & CHECKSUM else None, crcs if self._flags & CRC32 else None

    def drain_extras(self) -> Sequence[Any]:
        """Return nothing: no more than partials, checksums and CRCs are computed."""
        return ()


def values_of(array: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Return the elements, flat, as float64, or int64 and uint64 as they are; complex ones by their magnitude.

    dtype: plain name; bfloat16 may be any two-byte NumPy dtype. Raises TypeError for a dtype that NumPy cannot read.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    if dtype == "bfloat16":
        return (flat.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if flat.dtype.kind == "c":
        wide = flat.astype(np.complex128)
        return np.hypot(wide.real, wide.imag)
    if flat.dtype.kind not in "biuf" or flat.dtype.itemsize > 8:
        raise TypeError(f"NumPy knows it as {flat.dtype}")
    return flat if flat.dtype.kind in "iu" and flat.dtype.itemsize == 8 else flat.astype(np.float64)


def reduce_row(array: npt.NDArray[Any], dtype: str, flags: int) -> npt.NDArray[np.float64]:
    """Return the partials of an array, float64 [12] (see engine.stats.partials). The portable twin of the compiled kernel."""
    row: dict[str, float] = dict.fromkeys(PARTIALS, 0.0)
    row["min"], row["max"] = math.inf, -math.inf
    exact = values_of(array, dtype)
    x = exact.astype(np.float64)
    nan, finite = np.isnan(x), np.isfinite(x)
    row["count"], row["nan"] = float(x.size), float(nan.sum())
    row["posinf"], row["neginf"] = float((x == np.inf).sum()), float((x == -np.inf).sum())
    row["zero"] = float((x == 0).sum())
    if not nan.all():
        row["min"], row["max"] = float(x[~nan].min()) + 0.0, float(x[~nan].max()) + 0.0
    kept = x[finite]
    row["sum"] = _sum(exact, kept, dtype)
    row["sumsq"], row["exponent"] = _squares(kept, dtype)
    for name, power in DEVIATIONS.items():
        if COMPUTED_WITH[name] & ~flags == 0 and kept.size:
            row[name] = float(((kept - row["sum"] / kept.size) ** power).sum())
    if flags & SUBNORMAL and dtype in _SMALLEST:
        row["subnormal"] = float(((np.abs(kept) < _SMALLEST[dtype]) & (kept != 0)).sum())
    found = np.array([row[name] for name in PARTIALS])
    found[[*uncomputed(flags)]] = np.nan
    return found


def _sum(exact: npt.NDArray[Any], kept: npt.NDArray[np.float64], dtype: str) -> float:
    if exact.dtype.kind in "iu":
        half = exact.dtype.type(32)
        low = exact & exact.dtype.type(0xFFFFFFFF)
        return float((int((exact >> half).sum()) << 32) + int(low.sum()))
    return math.fsum(kept) if dtype == "float64" else float(kept.sum())


def _squares(kept: npt.NDArray[np.float64], dtype: str) -> tuple[float, float]:
    """Return (sumsq, exponent); squares are scaled by 2^±1200 where they could leave the range of float64."""
    largest = float(np.abs(kept).max()) if kept.size else 0.0
    exponent = _SHIFT if largest > _LARGE else -_SHIFT if 0 < largest < _SMALL else 0
    scaled = np.ldexp(kept, -exponent) if exponent else kept
    squares = scaled * scaled
    return math.fsum(squares) if dtype == "float64" else float(squares.sum()), float(exponent)
