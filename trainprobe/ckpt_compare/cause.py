"""What a cause is, and the values of a tensor that differs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainprobe.ckpt_compare.coverage import coverage_of
from trainprobe.ckpt_compare.masters import rounded
from trainprobe.ckpt_compare.pieces import LogicalTensor
from trainprobe.ckpt_compare.tasks import release
from trainprobe.engine.compare.difference import Difference
from trainprobe.engine.compare.number_formats import decode, number_format
from trainprobe.errors import FormatError

LARGEST = 256 << 20  # bytes of a matrix whose rows are looked at
MOST = 64  # matrices of one kind of which the values are looked at
SHOWN = 8  # numbers in a sentence
Values = npt.NDArray[np.float64]


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


def count(keys: Iterable[str]) -> str:
    """Return the beginning of a sentence about some tensors: `12 tensors, such as NAME, are`."""
    names = sorted(keys)
    return f"{names[0]} is" if len(names) == 1 else f"{len(names)} tensors, such as {names[0]}, are"


def comparable(a: LogicalTensor, b: LogicalTensor) -> tuple[Values, Values] | None:
    """Return the values of both sides, the finer one rounded to the coarser format; None where they cannot be had."""
    x, y = dense(a), dense(b)
    if x is None or y is None:
        return None
    if a.format == b.format:
        return x, y
    fine, coarse = (a, b) if a.format.itemsize > b.format.itemsize else (b, a)
    if coarse.format.name not in ("float32", "float16", "bfloat16"):
        return None
    bits = rounded((x if fine is a else y).astype(np.float32), number_format("float32"), coarse.format)
    near = decode(bits, coarse.format).astype(np.float64)
    return (near, y) if fine is a else (x, near)


def dense(tensor: LogicalTensor) -> Values | None:
    """Return the values of a whole tensor; None for one that is too large, incomplete or cannot be read."""
    if not tensor.pieces or tensor.count * 8 > LARGEST:
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
