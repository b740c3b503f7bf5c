"""The partials of a tensor, and how they become numbers. This is the only place where their names, flags and meanings stand.

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

from collections.abc import Iterable
from functools import cache, reduce
from operator import or_
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

# The layout of a row, and the flags that say what to compute. All kernels take them from here, those in C at their build.
PARTIALS = ("count", "nan", "posinf", "neginf", "zero", "min", "max", "sum", "sumsq", "m2", "exponent", "subnormal")
WIDTH = len(PARTIALS)
# the layout of a chunk on a device, before the chunks of a tensor become its row: sums with their corrections, what the
# deviations are merged by, and for Triton the fingerprint and the halves of an exact sum of integers
CHUNK = (
    *("nan", "posinf", "neginf", "zero", "min", "max", "sum", "sum_lost", "sumsq", "sumsq_lost", "m2", "exponent", "subnormal"),
    *("finite", "mean"),
)
CHUNK_INTEGERS = ("fingerprint", "upper", "lower")
STATS, CHECKSUM, STD, CRC32, SUBNORMAL = 1, 2, 4, 8, 16
# column → the flags that it is computed with, STATS alone where it is not named here
COMPUTED_WITH = {"count": 0, "m2": STATS | STD, "subnormal": STATS | SUBNORMAL}
# sums of powers of the deviations from the mean of the finite elements: column → the power
DEVIATIONS = {"m2": 2}
# the power of a factor by which a column changes when the tensor is multiplied by it; columns that are not here stay the same
POWERS = {"min": 1, "max": 1, "sum": 1, "sumsq": 2, "m2": 2}
_AT = {name: i for i, name in enumerate(PARTIALS)}
F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

StatisticName: TypeAlias = Literal["max", "min", "mean", "norm", "std", "absmax", "nan", "inf", "zero", "sublow", "count"]


class Asked(NamedTuple):
    """A statistic that is computed only where a plan names it.

    partial: the column that is NaN where it was not computed. column, whole, about: its column in the run log, whether that
    holds whole numbers, and what it says.
    """

    partial: str
    column: str
    about: str
    whole: bool = False


ASKED = {
    "std": Asked("m2", "std", "standard deviation with n - 1"),
    "sublow": Asked("subnormal", "subnormal", "elements below the dtype's smallest normal number", whole=True),
}


def asked_flags(statistics: Iterable[str]) -> int:
    """Return the flags of statistics that are computed only where a plan names them; other names have none."""
    return reduce(or_, (COMPUTED_WITH[ASKED[name].partial] for name in statistics if name in ASKED), 0) & ~STATS


@cache
def uncomputed(flags: int) -> tuple[int, ...]:
    """Return the numbers of the columns that a reduction with these flags leaves unknown."""
    needed = [COMPUTED_WITH.get(name, STATS) for name in PARTIALS]
    return tuple(i for i, need in enumerate(needed) if need & flags != need)


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


def _std(p: F64) -> F64:
    """Unbiased, as torch.std: sqrt(m2 / (n - 1)); NaN for fewer than two elements or any non-finite one."""
    n = column(p, "count")
    with np.errstate(all="ignore"):
        value = np.sqrt(column(p, "m2") / (n - 1))
    return np.where((finite_count(p) == n) & (n > 1), value, np.nan)


def _absmax(p: F64) -> F64:
    return np.maximum(np.abs(_max(p)), np.abs(_min(p)))


STATISTICS: dict[str, Any] = {
    "max": _max,
    "min": _min,
    "mean": _mean,
    "norm": _norm,
    "std": _std,
    "absmax": _absmax,
    "nan": lambda p: column(p, "nan"),
    "inf": lambda p: column(p, "posinf") + column(p, "neginf"),
    "zero": lambda p: column(p, "zero"),
    "sublow": lambda p: column(p, "subnormal"),
    "count": lambda p: column(p, "count"),
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
