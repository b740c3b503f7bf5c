"""The partials of a tensor, and how they become numbers. Their names and flags: engine/core/row_schema.py.

A device reduces a tensor to one row of float64 partials; the host finishes them. Columns, in order: see `PARTIALS`. A column
that the flags of the reduction did not ask for is NaN, which no computed count is: unknown, and not 0 (see `COMPUTED_WITH`).
Non-finite elements are counted separately, so that one NaN does not hide the rest:

* count: elements, known of every row; nan, posinf, neginf, zero: how many of each
* min, max: over the elements that are not NaN (+inf and -inf when there is none); a zero has no sign here
* sum, sumsq: over the finite elements, accumulated in float64 (float64 input: compensated)
* m2: sum of squared deviations from the mean of the finite elements
* exponent: true sum of squares = sumsq · 4^exponent, non-zero only where float64 squares could leave the range: 600 when
  the largest magnitude is above 2^480, -600 when it is below 2^-480
* subnormal: finite non-zero elements below the dtype's smallest normal number; 0 for a dtype that has none, such as integers

Complex elements enter by their magnitude; bool as 0 and 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.core.row_schema import (
    ASKED,
    CHECKSUM,
    CHUNK,
    CHUNK_INTEGERS,
    COMPUTED_WITH,
    CRC32,
    DEVIATIONS,
    PARTIALS,
    POWERS,
    STATS,
    STD,
    SUBNORMAL,
    WIDTH,
    asked_flags,
    uncomputed,
)

__all__ = [
    "ASKED",
    "CHECKSUM",
    "CHUNK",
    "CHUNK_INTEGERS",
    "COMPUTED_WITH",
    "CRC32",
    "DEVIATIONS",
    "PARTIALS",
    "POWERS",
    "STATISTICS",
    "STATS",
    "STD",
    "SUBNORMAL",
    "WIDTH",
    "all_finite",
    "asked_flags",
    "column",
    "finish",
    "finite_count",
    "known",
    "uncomputed",
]

_AT = {name: i for i, name in enumerate(PARTIALS)}
F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def column(partials: F64, name: str) -> F64:
    """Return the column `name` of partials [rows, len(PARTIALS)]."""
    return partials[:, _AT[name]]


def finite_count(partials: F64) -> F64:
    """Return how many elements were finite, a row [rows]."""
    return column(partials, "count") - column(partials, "nan") - column(partials, "posinf") - column(partials, "neginf")


def known(partials: F64, statistic: str) -> Bools:
    """Tell the rows of which a statistic was computed."""
    partial = ASKED[statistic].partial if statistic in ASKED else "count" if statistic == "count" else "nan"
    return ~np.isnan(column(partials, partial))


def _poisoned(partials: F64, value: F64) -> F64:
    """Let NaN and infinities show in a sum-like number as IEEE arithmetic would have it."""
    pos, neg = column(partials, "posinf") > 0, column(partials, "neginf") > 0
    value = np.where(pos, np.inf, np.where(neg, -np.inf, value))
    return np.where((column(partials, "nan") > 0) | (pos & neg), np.nan, value)


def _max(p: F64) -> F64:
    return np.where((column(p, "nan") > 0) | (column(p, "count") == 0), np.nan, column(p, "max"))


def _min(p: F64) -> F64:
    return np.where((column(p, "nan") > 0) | (column(p, "count") == 0), np.nan, column(p, "min"))


def _mean(p: F64) -> F64:
    with np.errstate(all="ignore"):
        return _poisoned(p, column(p, "sum") / column(p, "count"))


def _norm(p: F64) -> F64:
    with np.errstate(all="ignore"):
        root = np.sqrt(column(p, "sumsq")) * np.exp2(column(p, "exponent"))
    infinite = (column(p, "posinf") > 0) | (column(p, "neginf") > 0)
    return np.where(column(p, "nan") > 0, np.nan, np.where(infinite, np.inf, root))


def _asked(statistic: str) -> Callable[[F64], F64]:
    """Return what finishes a statistic of `ASKED`: one of elements is NaN where one is not finite, or there are none."""
    _, _, _, value, whole = ASKED[statistic]

    def finished(p: F64) -> F64:
        with np.errstate(all="ignore"):
            numbers = value(dict(zip(PARTIALS, p.T, strict=True)))
        n = column(p, "count")
        return numbers if whole else np.where((finite_count(p) == n) & (n > 0), numbers, np.nan)

    return finished


def _absmax(p: F64) -> F64:
    return np.maximum(np.abs(_max(p)), np.abs(_min(p)))


STATISTICS: dict[str, Any] = {
    "max": _max,
    "min": _min,
    "mean": _mean,
    "norm": _norm,
    "absmax": _absmax,
    "nan": lambda p: column(p, "nan"),
    "inf": lambda p: column(p, "posinf") + column(p, "neginf"),
    "zero": lambda p: column(p, "zero"),
    "count": lambda p: column(p, "count"),
    **{name: _asked(name) for name in ASKED},
}


def _plain_norm(p: F64) -> F64:
    root = np.sqrt(column(p, "sumsq"))
    with np.errstate(over="ignore"):
        return root * np.exp2(column(p, "exponent")) if column(p, "exponent").any() else root


# the same numbers where every row has elements and all of them are finite
_PLAIN: dict[str, Any] = {
    **STATISTICS,
    "max": lambda p: column(p, "max").copy(),
    "min": lambda p: column(p, "min").copy(),
    "mean": lambda p: column(p, "sum") / column(p, "count"),
    "norm": _plain_norm,
    "absmax": lambda p: np.maximum(np.abs(column(p, "max")), np.abs(column(p, "min"))),
}


def all_finite(partials: F64) -> bool:
    """Tell whether no element of any row was a NaN or an infinity."""
    return not partials[:, _AT["nan"] : _AT["neginf"] + 1].any()


def finish(partials: F64, statistics: Iterable[str] = ("max", "min", "mean", "norm")) -> dict[str, npt.NDArray[Any]]:
    """Return statistic name → float64 [rows]. A NaN or infinity in the tensor shows in max, min, mean, norm and std.

    NaN too where the statistic is unknown (see `known`).
    """
    table = _PLAIN if all_finite(partials) and column(partials, "count").all() else STATISTICS
    return {name: table[name](partials) for name in statistics}
