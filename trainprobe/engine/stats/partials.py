"""The partials of a tensor, and how they become numbers.

A device reduces a tensor to one row of float64 partials; the host finishes them. Columns, in order: see `PARTIALS`.
Non-finite elements are counted separately, so that one NaN does not hide the rest:

* count: elements; nan, posinf, neginf, zero: how many of each
* min, max: over the elements that are not NaN (+inf and -inf when there is none); a zero has no sign here
* sum, sumsq: over the finite elements, accumulated in float64 (float64 input: compensated)
* m2: sum of squared deviations from the mean of the finite elements, 0 without the flag STD
* exponent: true sum of squares = sumsq · 4^exponent, non-zero only where float64 squares could leave the range: 600 when
  the largest magnitude is above 2^480, -600 when it is below 2^-480
* subnormal: finite non-zero elements below the dtype's smallest normal number, 0 without the flag SUBNORMAL

Complex elements enter by their magnitude; bool as 0 and 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import or_
from typing import Any

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
# statistics that are computed only where a plan names them, by their flags
ASKED = {"std": STD, "sublow": SUBNORMAL}
# sums of powers of the deviations from the mean of the finite elements: column → its flag and the power
DEVIATIONS = {"m2": (STD, 2)}
# the power of a factor by which a column changes when the tensor is multiplied by it; columns that are not here stay the same
POWERS = {"min": 1, "max": 1, "sum": 1, "sumsq": 2, "m2": 2}
_AT = {name: i for i, name in enumerate(PARTIALS)}
F64 = npt.NDArray[np.float64]


def asked_flags(statistics: Iterable[str]) -> int:
    """Return the flags of statistics that are computed only where a plan names them; other names have none."""
    return reduce(or_, (ASKED.get(name, 0) for name in statistics), 0)


def column(partials: F64, name: str) -> F64:
    """Return the column `name` of partials [rows, len(PARTIALS)]."""
    return partials[:, _AT[name]]


def finite_count(partials: F64) -> F64:
    """Return how many elements were finite, a row [rows]."""
    return column(partials, "count") - column(partials, "nan") - column(partials, "posinf") - column(partials, "neginf")


def without_deviations(partials: F64) -> npt.NDArray[np.bool_]:
    """Tell the rows that were reduced without the flag STD: their elements differ and m2 is 0."""
    return (column(partials, "m2") == 0) & (column(partials, "min") < column(partials, "max"))


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
    """Unbiased, as torch.std: sqrt(m2 / (n - 1)); NaN for fewer than two elements, any non-finite one, or without m2."""
    n = column(p, "count")
    with np.errstate(all="ignore"):
        value = np.sqrt(column(p, "m2") / (n - 1))
    return np.where((finite_count(p) == n) & (n > 1) & ~without_deviations(p), value, np.nan)


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
    """Return statistic name → float64 [rows]. A NaN or infinity in the tensor shows in max, min, mean, norm and std."""
    table = _PLAIN if all_finite(partials) and column(partials, "count").all() else STATISTICS
    return {name: table[name](partials) for name in statistics}
