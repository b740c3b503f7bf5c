"""The schema of a row of partials: its columns, its flags and the statistics that are made of them, in one place.

A row is what the numbers of a tensor are before they are finished; engine/stats/partials.py says what each column holds. Every
kernel takes the layout and the flags from here, those in C at their build. Nothing is imported that a plan must not import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, reduce
from operator import or_
from typing import Any, Literal, NamedTuple, TypeAlias

# the layout of a row, and the flags that say what to compute
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

StatisticName: TypeAlias = Literal["max", "min", "mean", "norm", "std", "absmax", "nan", "inf", "zero", "sublow", "count"]


class Asked(NamedTuple):
    """A statistic that is computed only where a plan names it.

    partial: the column that is NaN where it was not computed. column, about, whole: its column in the run log, what that says,
    and whether it holds whole numbers. value: of the columns by name, float64 [rows] each; what it gives for an element that is
    not finite, or for none, is left out unless whole.
    """

    partial: str
    column: str
    about: str
    value: Callable[[Mapping[str, Any]], Any]
    whole: bool = False


ASKED = {
    "std": Asked("m2", "std", "standard deviation with n - 1", lambda p: (p["m2"] / (p["count"] - 1)) ** 0.5),
    "sublow": Asked(
        "subnormal", "subnormal", "elements below the dtype's smallest normal number", lambda p: p["subnormal"], whole=True
    ),
}


def asked_flags(statistics: Iterable[str]) -> int:
    """Return the flags of statistics that are computed only where a plan names them; other names have none."""
    return reduce(or_, (COMPUTED_WITH[ASKED[name].partial] for name in statistics if name in ASKED), 0) & ~STATS


@cache
def uncomputed(flags: int) -> tuple[int, ...]:
    """Return the numbers of the columns that a reduction with these flags leaves unknown."""
    needed = [COMPUTED_WITH.get(name, STATS) for name in PARTIALS]
    return tuple(i for i, need in enumerate(needed) if need & flags != need)
