"""Columns of numbers as JSON text, fast: each column is turned into text at once; NaN and infinities have names."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

STRICT = ('"nan"', '"inf"', '"-inf"')  # as Python writes them: float() of the text gives the number back
BARE = ("NaN", "Infinity", "-Infinity")


def column_text(column: npt.NDArray[Any], tokens: tuple[str, str, str] = STRICT) -> list[str]:
    """Return the shortest text of each number that reads back as the same float64.

    tokens: how NaN, +inf and -inf are written (JSON has no numbers for them).
    """
    if not column.size:
        return []
    text = orjson.dumps(np.ascontiguousarray(column), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].decode().split(",")
    if column.dtype.kind == "f":
        for i in np.flatnonzero(~np.isfinite(column)).tolist():
            text[i] = number_text(float(column[i]), tokens)
    return text


def fragment(text: bytes | str) -> Any:
    """Return JSON text for a place in something that orjson turns into text."""
    return orjson.Fragment(text)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]


def number_text(x: float, tokens: tuple[str, str, str] = STRICT) -> str:
    """Return the text of one number."""
    if x != x:
        return tokens[0]
    if x in (float("inf"), float("-inf")):
        return tokens[1] if x > 0 else tokens[2]
    return repr(x)


def plain_numbers(column: npt.NDArray[Any]) -> list[Any]:
    """Return a column as a list for JSON, NaN and infinities as the strings "NaN", "Infinity" and "-Infinity"."""
    values: list[Any] = column.tolist()
    if column.dtype.kind == "f":
        for i in np.flatnonzero(~np.isfinite(column)).tolist():
            values[i] = number_text(values[i], STRICT).strip('"')
    return values


def read_number(x: Any) -> float:
    """Return a number from JSON: NaN for null, and the strings that stand for NaN and infinities as what they are.

    Raises ValueError or TypeError for anything else.
    """
    if x is None:
        return float("nan")
    if isinstance(x, str) and x not in {"NaN", "Infinity", "-Infinity", "nan", "inf", "-inf", "Nan"}:
        raise ValueError(f"{x!r} is not a number")
    return float(x)
