"""What a cause is, and the values of a tensor that differs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainprobe.ckpt_compare.coverage import coverage_of, overlaps
from trainprobe.ckpt_compare.masters import rounded
from trainprobe.ckpt_compare.pieces import LogicalTensor
from trainprobe.ckpt_compare.tasks import release
from trainprobe.engine.compare.difference import Difference
from trainprobe.engine.compare.measure import blocks
from trainprobe.engine.compare.number_formats import NumberFormat, decode, number_format
from trainprobe.engine.compare.rounding import noise_floor
from trainprobe.errors import FormatError

SMALL = 1 << 20  # elements of a tensor that is looked at whole, however few of them differ
LARGEST = 256 << 20  # bytes of a matrix whose rows are looked at
MOST = 64  # matrices of one kind of which the values are looked at
SHOWN = 8  # numbers in a sentence
Values = npt.NDArray[np.float64]
Sides = tuple[Mapping[str, LogicalTensor], Mapping[str, LogicalTensor]]  # the tensors of A and of B by their keys


@dataclass(frozen=True, slots=True)
class Cause:
    """One sentence, and the keys of the tensors that it explains."""

    sentence: str
    keys: frozenset[str]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A tensor that differs: its key, both sides, and what was measured."""

    key: str
    a: LogicalTensor
    b: LogicalTensor
    difference: Difference

    @property
    def sparse(self) -> bool:
        """Whether so few elements of a large tensor differ, beyond rounding, that no cause is looked for in all of them."""
        d = self.difference
        few = 1000 * d.changed < d.count
        if self.a.format != self.b.format and self.a.shape == self.b.shape:
            few = not d.misplaced and d.relative_l2 <= noise_floor(self.a.format, self.b.format)
        return d.count > SMALL and few


def count(keys: Iterable[str]) -> str:
    """Return the beginning of a sentence about some tensors: `12 tensors, such as NAME, are`."""
    names = sorted(keys)
    return f"{names[0]} is" if len(names) == 1 else f"{len(names)} tensors, such as {names[0]}, are"


def comparable(a: LogicalTensor, b: LogicalTensor) -> tuple[Values, Values] | None:
    """Return the values of both sides, the finer one rounded to the coarser format; None where they cannot be had."""
    x, y = dense(a), dense(b)
    return None if x is None or y is None else _coarse(x, y, a.format, b.format)


def _coarse(x: Values, y: Values, one: NumberFormat, other: NumberFormat) -> tuple[Values, Values] | None:
    if one == other:
        return x, y
    x_is_fine = one.itemsize > other.itemsize
    coarse = other if x_is_fine else one
    if coarse.name not in ("float32", "float16", "bfloat16"):
        return None
    bits = rounded((x if x_is_fine else y).astype(np.float32), number_format("float32"), coarse)
    near = decode(bits, coarse).astype(np.float64)
    return (near, y) if x_is_fine else (x, near)


def beyond_rounding(a: LogicalTensor, b: LogicalTensor) -> int | None:
    """Return how many elements differ after the finer ones are rounded to the coarser format; None where that is not known."""
    found = 0
    for overlap in overlaps(coverage_of(a).parts, coverage_of(b).parts):
        parts = overlap.a, overlap.b
        formats = [part.piece.source.format for part in parts]
        loaded = [part.load(overlap.box) for part in parts]
        for where in blocks(overlap.box.shape):
            x, y = (decode(np.ascontiguousarray(v[where]), fmt) for v, fmt in zip(loaded, formats, strict=True))
            sides = _coarse(x, y, formats[0], formats[1])
            if sides is None:
                return None
            found += int(np.count_nonzero((sides[0] != sides[1]) & ~(np.isnan(sides[0]) & np.isnan(sides[1]))))
        for part in parts:
            release(part.piece.source)
    return found


def dense(tensor: LogicalTensor) -> Values | None:
    """Return the values of a whole tensor; None for one that is too large, complex, incomplete or cannot be read."""
    if not tensor.pieces or tensor.count * 8 > LARGEST or tensor.format.parts > 1:
        return None
    held = coverage_of(tensor)
    if held.uncovered:
        return None
    values = np.empty(tensor.shape)
    try:
        for part in held.parts:
            values[part.box.within((0,) * len(tensor.shape))] = decode(part.load(), part.piece.source.format)
            release(part.piece.source)
    except FormatError:
        return None
    return values


def listed(numbers: Iterable[int]) -> str:
    """Return numbers as words: `1, 2 and 5`; of many the first eight."""
    shown = [*map(str, numbers)]
    if len(shown) > SHOWN:
        return f"{', '.join(shown[:SHOWN])} and {len(shown) - SHOWN} more"
    *first, last = shown
    return f"{', '.join(first)} and {last}" if first else last
