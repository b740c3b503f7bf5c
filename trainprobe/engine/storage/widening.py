"""Bit patterns of number formats that NumPy lacks, as float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def widen(array: npt.NDArray[Any], short: str) -> npt.NDArray[Any]:
    """Turn bit patterns of a type that NumPy lacks into float32, exactly; anything else is returned as it is.

    Formats: bfloat16 is the upper half of float32; float8 as in the OCP 8-bit floating point and microscaling
    specifications (E5M2 is the upper half of float16; E4M3 has no infinity; E8M0 is a power of two).
    """
    if short == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    if short == "F8_E5M2":
        return (array.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if short == "F8_E4M3":
        return _E4M3[array]
    return _E8M0[array] if short == "F8_E8M0" else array


def _e4m3() -> npt.NDArray[np.float32]:
    bits = np.arange(256)
    sign, exponent, fraction = np.where(bits & 128, -1.0, 1.0), (bits >> 3) & 15, bits & 7
    size = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7))
    return np.where(bits & 127 == 127, np.nan, sign * size).astype(np.float32)


_E4M3 = _e4m3()
_E8M0 = np.append(2.0 ** (np.arange(255) - 127.0), np.nan).astype(np.float32)
