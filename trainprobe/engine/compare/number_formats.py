"""How numbers are stored, and how to turn stored bits into values NumPy can calculate with.

NumPy has no bfloat16 and no 8-bit floats, so an array is passed around as its bits (an unsigned integer array) together with
the `NumberFormat` that says what they mean. Everything here is exact: decoding never rounds, except that integers beyond
2^53 lose their last bits in float64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.errors import FormatError, did_you_mean

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """What the bits of one element mean.

    storage: NumPy dtype that holds the bits. mantissa: stored fraction bits, None for integers and bool. smallest: the smallest
    positive normal number. parts: real numbers an element consists of (2 for complex).
    """

    name: str
    storage: str
    mantissa: int | None = None
    smallest: float = 0.0
    parts: int = 1

    @property
    def itemsize(self) -> int:
        """Bytes an element takes."""
        return _ITEMSIZES[self.storage]

    @property
    def epsilon(self) -> float:
        """Gap between 1 and the next number (2^-mantissa); 1 for integers."""
        return 1.0 if self.mantissa is None else 2.0**-self.mantissa


_ALL = (
    NumberFormat("float64", "<f8", 52, 2.0**-1022),
    NumberFormat("float32", "<f4", 23, 2.0**-126),
    NumberFormat("float16", "<f2", 10, 2.0**-14),
    NumberFormat("bfloat16", "<u2", 7, 2.0**-126),
    NumberFormat("float8_e4m3fn", "u1", 3, 2.0**-6),
    NumberFormat("float8_e5m2", "u1", 2, 2.0**-14),
    NumberFormat("float8_e4m3fnuz", "u1", 3, 2.0**-7),
    NumberFormat("float8_e5m2fnuz", "u1", 2, 2.0**-15),
    NumberFormat("float8_e8m0fnu", "u1", 0, 2.0**-127),
    NumberFormat("complex64", "<c8", 23, 2.0**-126, 2),
    NumberFormat("complex128", "<c16", 52, 2.0**-1022, 2),
    NumberFormat("int64", "<i8"),
    NumberFormat("int32", "<i4"),
    NumberFormat("int16", "<i2"),
    NumberFormat("int8", "i1"),
    NumberFormat("uint64", "<u8"),
    NumberFormat("uint32", "<u4"),
    NumberFormat("uint16", "<u2"),
    NumberFormat("uint8", "u1"),
    NumberFormat("bool", "u1"),
)
FORMATS: dict[str, NumberFormat] = {f.name: f for f in _ALL}
_LARGEST = {  # of the formats that masks are filled with
    "float64": sys.float_info.max,
    "float32": 2.0**128 * (1 - 2.0**-24),
    "float16": 65504.0,
    "bfloat16": 2.0**128 * (1 - 2.0**-8),
}
LOWEST = [-largest for largest in _LARGEST.values()]
LIMITS = {  # a number that is a limit of a format → which: the same limits of two formats are one thing in a program
    number: name
    for fmt in _ALL
    if (largest := _LARGEST.get(fmt.name)) is not None
    for number, name in ((largest, "largest"), (-largest, "lowest"), (fmt.smallest, "smallest"), (fmt.epsilon, "epsilon"))
}
_ITEMSIZES = {f.storage: np.dtype(f.storage).itemsize for f in _ALL}


def number_format(name: str) -> NumberFormat:
    """Return the format called `name` (`float32`, `torch.bfloat16`, …); raise FormatError for an unknown name."""
    short = name.removeprefix("torch.")
    if short not in FORMATS:
        raise FormatError(f"unknown number format {name!r}{did_you_mean(short, list(FORMATS))}")
    return FORMATS[short]


def coarser(a: NumberFormat, b: NumberFormat) -> NumberFormat:
    """Return the format with the larger gap between neighbours: the one that sets the noise floor of a comparison."""
    if a.mantissa is None or b.mantissa is None:
        return b if a.mantissa is None else a
    return a if a.mantissa <= b.mantissa else b


def decode(bits: Array, fmt: NumberFormat) -> Array:
    """Return the values of stored bits, any shape, as the narrowest of float32 and float64 that holds them exactly.

    A complex array gains a last axis of length 2 (real, imaginary).
    """
    return _DECODERS[fmt.name](bits)


def _bfloat16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _complex(bits: Array) -> Array:
    part = np.float32 if bits.dtype.itemsize == 8 else np.float64
    return np.ascontiguousarray(bits)[..., None].view(part)


@lru_cache(maxsize=8)
def _table(exponent_bits: int, mantissa_bits: int, bias: int, style: str) -> npt.NDArray[np.float32]:
    """Return the 256 values of an 8-bit float (Micikevicius et al.

    2022, FP8 formats; `fnuz` as in Graphcore and AMD hardware).
    """
    code = np.arange(256)
    sign = np.where(code >> 7, -1.0, 1.0)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    value = sign * np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    if style == "fn":
        value[[0x7F, 0xFF]] = np.nan
    elif style == "fnuz":
        value[0x80] = np.nan
    else:  # ieee
        top = exponent == (1 << exponent_bits) - 1
        value[top & (fraction == 0)] = (sign * np.inf)[top & (fraction == 0)]
        value[top & (fraction != 0)] = np.nan
    return value.astype(np.float32)


def _e8m0(bits: Array) -> Array:
    values = np.ldexp(np.ones(256), np.arange(256) - 127)
    values[255] = np.nan
    return values[bits]


_DECODERS: dict[str, Callable[[Array], Array]] = {
    "float64": lambda b: b,
    "float32": lambda b: b,
    "float16": lambda b: b.astype(np.float32),
    "bfloat16": _bfloat16,
    "float8_e4m3fn": lambda b: _table(4, 3, 7, "fn")[b],
    "float8_e5m2": lambda b: _table(5, 2, 15, "ieee")[b],
    "float8_e4m3fnuz": lambda b: _table(4, 3, 8, "fnuz")[b],
    "float8_e5m2fnuz": lambda b: _table(5, 2, 16, "fnuz")[b],
    "float8_e8m0fnu": _e8m0,
    "complex64": _complex,
    "complex128": _complex,
    **{f.name: (lambda b: b.astype(np.float64)) for f in _ALL if f.mantissa is None},
}
