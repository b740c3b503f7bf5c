"""When two settings mean the same: numbers by value whatever their text, truth by meaning, lists element by element."""

from __future__ import annotations

import math
import struct
from typing import Any

_WORDS = {"true": True, "false": False, "none": None, "null": None, "yes": True, "no": False, "on": True, "off": False}


def same(a: Any, b: Any) -> bool:
    """Tell whether two settings mean the same.

    "1e-4" is 0.0001, "True" is true, "[1, 2]" is not parsed. A number rounded to float32 equals
    the number that it was.
    """
    a, b = meaning(a), meaning(b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, int | float) and isinstance(b, int | float):
        return _same_number(a, b)
    return type(a) is type(b) and a == b


def meaning(value: Any) -> Any:
    """Return what a text stands for: a number, true, false, none, or itself. Nothing in a list or dict is none."""
    if isinstance(value, tuple | list | dict) and not value:
        return None
    if isinstance(value, tuple):
        return list(value)
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    number = to_number(text)
    return text if number is None else number


def to_number(text: str) -> int | float | None:
    """Return the number a text is, None for any other text (`1_0` and hexadecimal texts are none)."""
    if "_" in text or len(text) > 400:
        return None
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _same_number(a: float, b: float) -> bool:
    if a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)):
        return True
    if isinstance(a, int) or isinstance(b, int):  # whole numbers, such as seeds, are never rounded
        return False
    x, y = a, b
    short_x, short_y = _float32(x), _float32(y)
    return short_x == short_y and (x == short_x) != (y == short_y)


def _float32(x: float) -> float:
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def close(a: Any, b: Any, tolerance: float = 1e-6) -> bool:
    """Tell whether two statistics agree to `tolerance`, relative; "nan" equals "nan"."""
    x, y = meaning(a), meaning(b)
    if not (_is_number(x) and _is_number(y)):
        return x == y
    return _same_number(x, y) or math.isclose(x, y, rel_tol=tolerance, abs_tol=1e-12)
