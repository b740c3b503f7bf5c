"""The partials of a tensor, and how they become numbers. Their names and flags: engine/core/row_schema.py.

A device reduces a tensor to one row of float64 partials; the host finishes them. Columns, in order: see `PARTIALS`. A column
that the flags of the reduction did not request is NaN, which no computed count is: unknown, and not 0 (see `COMPUTED_WITH`).
Non-finite elements are counted separately, so that one NaN does not hide the rest:

* count: elements, known for every row; nan, posinf, neginf, zero: how many of each
* min, max: over the elements that are not NaN (+inf and -inf if there is none); a zero has no sign here
* sum, sumsq: over the finite elements, accumulated in float64 (float64 input: compensated)
* m2: sum of squared deviations from the mean of the finite elements
* exponent: true sum of squares = sumsq · 4^exponent. Non-zero only if float64 squares could leave the range: 600 if the largest
  magnitude is above 2^480, -600 if it is below 2^-480
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


def _norm(p: F64) -> F64:
    root, exponent = np.sqrt(column(p, "sumsq")), column(p, "exponent")
    return root * np.exp2(exponent) if exponent.any() else root


def _of_asked(statistic: str) -> Callable[[F64], F64]:
    return lambda p: ASKED[statistic].value(dict(zip(PARTIALS, p.T, strict=True)))


# what each number is where all elements are finite
STATISTICS: dict[str, Callable[[F64], F64]] = {
    "max": lambda p: column(p, "max").copy(),
    "min": lambda p: column(p, "min").copy(),
    "mean": lambda p: column(p, "sum") / column(p, "count"),
    "norm": _norm,
    "absmax": lambda p: np.maximum(np.abs(column(p, "max")), np.abs(column(p, "min"))),
    "nan": lambda p: column(p, "nan").copy(),
    "inf": lambda p: column(p, "posinf") + column(p, "neginf"),
    "zero": lambda p: column(p, "zero").copy(),
    "count": lambda p: column(p, "count").copy(),
    **{name: _of_asked(name) for name in ASKED},
}


def _extreme_shown(p: F64, value: F64) -> F64:
    return np.where((column(p, "nan") > 0) | (column(p, "count") == 0), np.nan, value)


def _mean_shown(p: F64, value: F64) -> F64:
    """Let NaN and infinities show as they do in the sum of IEEE arithmetic."""
    pos, neg = column(p, "posinf") > 0, column(p, "neginf") > 0
    value = np.where(pos, np.inf, np.where(neg, -np.inf, value))
    return np.where((column(p, "nan") > 0) | (pos & neg), np.nan, value)


def _norm_shown(p: F64, value: F64) -> F64:
    infinite = (column(p, "posinf") > 0) | (column(p, "neginf") > 0)
    return np.where(column(p, "nan") > 0, np.nan, np.where(infinite, np.inf, value))


def _shown_of_asked(p: F64, value: F64) -> F64:
    n = column(p, "count")
    return np.where((finite_count(p) == n) & (n > 0), value, np.nan)


# what becomes of that number in rows with elements that are not finite, or with none; counts stay
_SHOWN: dict[str, Callable[[F64, F64], F64]] = {
    **dict.fromkeys(("max", "min", "absmax"), _extreme_shown),
    "mean": _mean_shown,
    "norm": _norm_shown,
    **{name: _shown_of_asked for name, asked in ASKED.items() if not asked.whole},
}


def all_finite(partials: F64) -> bool:
    """Tell whether no element of any row was a NaN or an infinity."""
    return not partials[:, _AT["nan"] : _AT["neginf"] + 1].any()


def finish(partials: F64, statistics: Iterable[str] = ("max", "min", "mean", "norm")) -> dict[str, npt.NDArray[Any]]:
    """Return statistic name → float64 [rows]. A NaN or infinity in the tensor shows in max, min, mean, norm and std.

    NaN too where the statistic is unknown (see `known`).
    """
    plain = all_finite(partials) and column(partials, "count").all()
    with np.errstate(all="ignore"):
        numbers = {name: STATISTICS[name](partials) for name in statistics}
    return numbers if plain else {name: _SHOWN[name](partials, x) if name in _SHOWN else x for name, x in numbers.items()}
