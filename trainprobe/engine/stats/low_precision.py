"""What a low-precision format loses: the elements that it would round to zero, and those beyond its largest number.

A number x under a scale s is cast as x · s, rounded to the nearest, ties to even (IEEE 754; Open Compute Project, *OCP 8-bit
Floating Point Specification*, 2023, and *Microscaling Formats*, 2023). With t the smallest positive number of the format

* it underflows when x ≠ 0 and |x · s| <= t / 2: the tie goes to zero, which is even;
* it overflows when |x · s| rounds to more than the largest finite number m, as if the format went on: above the middle
  between m and the next step, or at the middle where the last bit of m is set. Infinities overflow, NaN does not.

The product x · s is rounded to float32 first, as it is in training, unless x is float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.stats.exponents import first_past


@dataclass(frozen=True, slots=True)
class LowPrecisionFormat:
    """smallest: t. largest: m. middle: between m and the next step. even: the last bit of m is not set."""

    smallest: float
    largest: float
    middle: float
    even: bool


FORMATS: dict[str, LowPrecisionFormat] = {
    "fp4_e2m1": LowPrecisionFormat(2.0**-1, 6.0, 7.0, even=False),
    "fp8_e4m3": LowPrecisionFormat(2.0**-9, 448.0, 464.0, even=True),
    "fp8_e5m2": LowPrecisionFormat(2.0**-16, 57344.0, 61440.0, even=False),
    "fp16": LowPrecisionFormat(2.0**-24, 65504.0, 65520.0, even=False),
    "bf16": LowPrecisionFormat(2.0**-133, (2 - 2.0**-7) * 2.0**127, (2 - 2.0**-8) * 2.0**127, even=False),
}


def lost(array: npt.NDArray[Any], name: str, scale: float = 1.0) -> tuple[int, int]:
    """Return (how many elements underflow, how many overflow) in the format `name` of `FORMATS` under `scale`.

    The reference that the device's implementation is tested against.
    """
    form = FORMATS[name]
    x = np.abs(np.asarray(array).reshape(-1))
    with np.errstate(over="ignore"):
        x = x * scale if x.dtype == np.float64 else (x.astype(np.float32) * np.float32(scale)).astype(np.float64)
    nonzero = np.asarray(array).reshape(-1) != 0
    under = nonzero & (x <= form.smallest / 2)
    over = x > form.middle if form.even else x >= form.middle
    return int(under.sum()), int(over.sum())


def limits_of(formats: Sequence[LowPrecisionFormat], scale: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the smallest magnitudes that do not underflow and that overflow, format by format, [k, 2 · formats].

    scale: positive, float32 [k], or float64 [k] for elements of that dtype; the result has its dtype.
    """
    pairs = [
        (first_past(form.smallest / 2, scale, itself=False), first_past(form.middle, scale, itself=not form.even))
        for form in formats
    ]
    return np.stack([limit for pair in pairs for limit in pair], axis=1)


@cache
def limits_under(formats: tuple[str, ...], scale: float, dtype: str) -> npt.NDArray[Any]:
    """Return `limits_of` named formats under one scale, [1, 2 · formats], of elements of a dtype by its name."""
    return limits_of([FORMATS[name] for name in formats], np.array([scale], dtype))


def amax_scale(largest: npt.NDArray[Any], form: LowPrecisionFormat) -> npt.NDArray[Any]:
    """Return the largest number of a format over the largest magnitudes [k], in their dtype: at most its largest; 1 for 0."""
    with np.errstate(divide="ignore", over="ignore"):
        factor = np.minimum(largest.dtype.type(form.largest) / largest, np.finfo(largest.dtype).max)
    return np.where(largest > 0, factor, largest.dtype.type(1))
