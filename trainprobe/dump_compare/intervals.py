"""How far two values are apart, from whatever a dump holds of them: their elements, fingerprints of their bits, or statistics.

The distance is the relative l2, ‖a − b‖₂ / max(‖a‖₂, ‖b‖₂). Statistics bound it from below alone, so it is an interval:

* |‖a‖ − ‖b‖|, |max a − max b|, |min a − min b| and √n·|mean a − mean b| are each at most ‖a − b‖₂ (triangle, ‖·‖∞ ≤ ‖·‖₂,
  Cauchy-Schwarz), for n elements: the largest of them is `low`.
* Independent errors of the elements change a norm by 1/√n of their own norm, and an extreme by about one of them: the upper
  end `high` is an estimate, not a bound, √n·|‖a‖ − ‖b‖| and √n times the change of an extreme.

All values of a step are looked at together, as columns: a step has hundreds of thousands of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter, eq
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from trainprobe.dump_compare.dump_side import STATISTICS, Columns, Side, column_of
from trainprobe.engine.compare import Difference, measure
from trainprobe.engine.compare.number_formats import FORMATS, LOWEST
from trainprobe.engine.core.records import Value

Evidence = Literal["bits", "values", "statistics", "shape", "nothing", "absent", "replicas"]
F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Interval(NamedTuple):
    """A distance from `low` to `high`, and what says so. note: what else there is to say."""

    low: float
    high: float
    evidence: Evidence
    note: str = ""


_ABOUT = 10.0  # times: copies that are apart by less explain no distance of the sides
_SUMS_IN_SINGLE = 2.0**-20  # relative: by how much sums that were taken in float32 may be off
SUMS = 2.0**-44  # relative: statistics of a whole that was added up of those of its parts in float64 are no nearer
SAME = Interval(0.0, 0.0, "bits")
_EQUAL = Interval(0.0, 0.0, "values")
_NONFINITE = Interval(math.inf, math.inf, "statistics", "other NaN or infinities in A than in B")
_OTHER_BITS = Interval(0.0, math.inf, "bits", "the bits differ, and there are no statistics that say how far")
_NOTHING = Interval(0.0, math.inf, "nothing", "neither dump holds anything to compare")
OTHER_ORDER = Interval(
    0.0,
    math.inf,
    "bits",
    "the bits differ, the statistics do not: the same numbers in another order, or zeros of another sign?",
)
TRANSPOSED, ANOTHER_ORDER = "the same numbers, transposed", "the same numbers in another order"
ALIKE = Interval(0.0, 0.0, "statistics")
MASKED = Interval(
    0.0, math.inf, "statistics", "most of the norm is that of a mask, so that the statistics tell little of the rest"
)
_FIXED = (SAME, ALIKE, _NONFINITE, _OTHER_BITS, _NOTHING, OTHER_ORDER, MASKED)  # by the numbers below
_IS_SAME, _IS_ALIKE, _IS_NONFINITE, _HAS_OTHER_BITS, _IS_UNKNOWN, _HAS_OTHER_ORDER, _IS_MASKED, _IS_MEASURED = range(8)
_OTHER_LOWEST = 1e-3  # the lowest numbers of any two formats are at least this far apart
_FILL, _ABOVE, _SAME_FILL = 9e3, 1e3, 0.01  # how large a mask's number is at least, how many times all else, and how equal


def interval(a: Side, left: Value, b: Side, right: Value) -> Interval:
    """Return how far two values are apart (see intervals)."""
    return intervals(a, [left], b, [right])[0]


def intervals(a: Side, left: Sequence[Value], b: Side, right: Sequence[Value]) -> list[Interval]:
    """Return how far the values of two sides are apart, pair by pair; the best evidence that both sides have decides.

    What is said in the same few words is one object. Where ranks of one side hold copies of a value that are not alike, about
    as far apart as the sides or further, that is what is wrong.
    """
    alike = np.fromiter(map(eq, map(attrgetter("shape"), left), map(attrgetter("shape"), right)), bool, len(left))
    sizes = _sizes(left)
    mine, theirs = a.columns(left), b.columns(right)
    same_bits = _same_bits(mine, theirs, np.fromiter(_same_formats(left, right), bool, len(left)))
    outcome, low, high = _by_columns(mine, theirs, sizes, same_bits)
    for i in np.flatnonzero((outcome == _IS_MEASURED) & (low < _SUMS_IN_SINGLE) & (same_bits < 0)).tolist():
        if _is_whole(left[i]) and _is_whole(right[i]) and _are_rounded(mine, theirs, i):
            outcome[i] = _IS_ALIKE
    if a.adds_up or b.adds_up:
        as_near = (outcome == _IS_MEASURED) & (low < SUMS)
        outcome[as_near & (same_bits < 0)] = _IS_ALIKE
        outcome[as_near & (same_bits == 0)] = _HAS_OTHER_ORDER
    outcome[(same_bits > 0) | (sizes == 0)] = _IS_SAME  # of a tensor without elements there is nothing to differ
    found = _told_by_columns(outcome, low, high, mine, theirs)
    for i in np.flatnonzero(~alike).tolist():
        x, y = left[i], right[i]
        if tuple(x.shape) != tuple(y.shape):
            found[i] = Interval(math.inf, math.inf, "shape", f"shapes {list(x.shape)} and {list(y.shape)}")
    for i in _stored(left, right, alike):  # what is stored decides, whatever is said of it beside
        found[i] = _told_by_elements(found[i], outcome[i] == _IS_SAME, a, left[i], b, right[i])
    if a.has_copies or b.has_copies:
        found = [_with_copies(far, a, x, b, y) for far, x, y in zip(found, left, right, strict=True)]
    return found


def _told_by_columns(outcome: npt.NDArray[Any], low: F64, high: F64, mine: Columns, theirs: Columns) -> list[Interval]:
    measured = outcome == _IS_MEASURED
    finite = [_all_finite(side) for side in (mine, theirs)]
    found: list[Interval] = list(map(_FIXED.__getitem__, np.where(measured, 0, outcome).tolist()))
    known: dict[tuple[float, float], Interval] = {}  # what one call gives, others are given: one object for all of them
    ends_of_each = zip(low[measured].tolist(), high[measured].tolist(), strict=True)
    for i, ends in zip(np.flatnonzero(measured).tolist(), ends_of_each, strict=True):
        found[i] = known.get(ends) or known.setdefault(ends, Interval(*ends, "statistics"))
    for i in np.flatnonzero(outcome == _IS_NONFINITE).tolist():
        found[i] = found[i]._replace(note=_where_nonfinite(finite[0][i], finite[1][i]))
    return found


def _told_by_elements(told: Interval, same: bool, a: Side, x: Value, b: Side, y: Value) -> Interval:
    """Return what the stored elements say. told: what else is said of the pair; same: whether that is equality."""
    exact, at = _by_elements(a.array(x), b.array(y))
    if exact is None or (same and exact is SAME):
        return told
    if same:
        for side, value in ((a, x), (b, y)):
            side.contradicts(value)
    exact = _EQUAL if exact is SAME else exact
    if at is None:
        return exact
    notes = (exact.note, a.place_of(x, at) or b.place_of(y, at))
    return exact._replace(note=", ".join(filter(None, notes)))


def _is_whole(value: Value) -> bool:
    found = FORMATS.get(format_name(value.dtype))
    return found is None or found.mantissa is None


def _are_rounded(a: Columns, b: Columns, i: int) -> bool:
    """Return whether sums of equal whole numbers were rounded to float32 on one side alone.

    mindstudio-probe up to 8.1 takes them in float32, here they are exact.
    """
    extremes = all(a.statistics[name][0][i] == b.statistics[name][0][i] for name in ("max", "min"))
    norms = (side.statistics["norm"][0][i] for side in (a, b))
    return extremes and len({float(np.float32(norm)) == norm for norm in norms}) == 2


def _sizes(values: Sequence[Value]) -> F64:
    """Return how many elements values have."""
    known: dict[tuple[int, ...], int] = {shape: math.prod(shape) for shape in {tuple(value.shape) for value in values}}
    return np.fromiter((known[tuple(value.shape)] for value in values), float, len(values))


def _same_formats(left: Sequence[Value], right: Sequence[Value]) -> Iterator[bool]:
    known: dict[tuple[str, str], bool] = {}
    for pair in zip(map(attrgetter("dtype"), left), map(attrgetter("dtype"), right), strict=True):
        if pair not in known:
            known[pair] = format_name(pair[0]) == format_name(pair[1])
        yield known[pair]


def format_name(dtype: str) -> str:
    """Return a number format as every tool calls it: `float32`."""
    return dtype.rpartition(".")[2].lower()


def _stored(left: Sequence[Value], right: Sequence[Value], among: Bools) -> Iterator[int]:
    """Yield the places of pairs of which both dumps store elements."""
    return (i for i in np.flatnonzero(among).tolist() if left[i].tensor is not None and right[i].tensor is not None)


def _by_elements(x: npt.NDArray[Any] | None, y: npt.NDArray[Any] | None) -> tuple[Interval | None, Sequence[int] | None]:
    """Return how far two arrays are apart, and where most if they are; None where they cannot be compared."""
    if x is None or y is None or x.shape != y.shape:
        return None, None
    found = measure(x, y)
    if not found.changed:
        return SAME, None
    if not found.relative_l2 <= _OTHER_LOWEST or found.misplaced:  # NaN too
        found = _beside_lowest(x, y) or found
    if found.misplaced:
        ends = [bool(np.isfinite(side).all()) for side in (x, y)]
        return Interval(math.inf, math.inf, "values", _where_nonfinite(*ends)), None
    far = found.relative_l2
    return Interval(far, far, "values", _order(x, y) if far > _OTHER_LOWEST else ""), found.at if far else None


def _order(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> str:
    """Return how two arrays that differ hold the same numbers, "" where they do not."""
    if x.ndim == 2 and x.shape[0] == x.shape[1] and np.array_equal(x, y.T):
        return TRANSPOSED
    same = np.max(x) == np.max(y) and np.min(x) == np.min(y) and np.array_equal(np.sort(x, None), np.sort(y, None))
    return ANOTHER_ORDER if same else ""


def _beside_lowest(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> Difference | None:
    """Return how two arrays differ beside the lowest numbers of two formats, which are one mask; None without these."""
    p, q = (np.asarray(each, np.float64) for each in (x, y))
    both = np.isin(p, LOWEST) & np.isin(q, LOWEST) & (p != q)
    return measure(np.where(both, 0.0, p), np.where(both, 0.0, q)) if both.any() else None


def _with_copies(far: Interval, a: Side, left: Value, b: Side, right: Value) -> Interval:
    copies = [found for side, value in ((a, left), (b, right)) if (found := side.disagreement(value)) is not None]
    worst = max(copies, key=lambda found: found.low, default=None)
    if worst is None or (math.isfinite(far.low) and _ABOUT * worst.low < far.low):
        return far
    return Interval(max(far.low, worst.low), max(far.high, worst.high), "replicas", worst.note)


def _same_bits(a: Columns, b: Columns, same_formats: Bools) -> npt.NDArray[np.int8]:
    """Return 1 where the bits agree, 0 where they do not, -1 where the sides have no fingerprint of one kind."""
    found = np.full(len(same_formats), -1, np.int8)
    for kind in ("checksum", "crc32"):
        if kind in a.bits and kind in b.bits:
            (x, in_a), (y, in_b) = a.bits[kind], b.bits[kind]
            both = same_formats & (found < 0) & in_a & in_b
            found[both] = x[both] == y[both]
    return found


def by_statistics(a: Mapping[str, float], b: Mapping[str, float], n: int, same_bits: bool | None) -> Interval:
    """Return what norm, max, min and mean of two tensors of n elements say. same_bits: what is known of their bits."""
    bits = np.array([-1 if same_bits is None else int(same_bits)], np.int8)
    x, y = (Columns({name: column_of([numbers.get(name)]) for name in STATISTICS}, {}) for numbers in (a, b))
    outcome, low, high = _by_columns(x, y, np.array([float(n)]), bits)
    return Interval(float(low[0]), float(high[0]), "statistics") if outcome[0] == _IS_MEASURED else _FIXED[outcome[0]]


def _by_columns(a: Columns, b: Columns, sizes: F64, same_bits: npt.NDArray[np.int8]) -> tuple[npt.NDArray[np.int64], F64, F64]:
    """Return what tells each distance, and where statistics measure it, its lower and upper end."""
    n = len(sizes)
    change = {name: np.zeros(n) for name in STATISTICS}
    known, nonfinite = np.zeros(n, bool), np.zeros(n, bool)
    with np.errstate(all="ignore"):
        for name in STATISTICS:
            (x, in_a), (y, in_b) = a.statistics[name], b.statistics[name]
            both = in_a & in_b
            known |= both
            nonfinite |= both & ~_alike_where_not_finite(x, y)
            change[name][:] = np.where(both & np.isfinite(x), np.abs(x - y), 0.0)
        root = np.sqrt(np.maximum(1.0, sizes))
        extreme = np.maximum(change["max"], change["min"])
        most = np.maximum(np.maximum(change["norm"], extreme), root * change["mean"])
        scale = _scale(a, b, root)
        low = most / scale
        high = np.maximum(low, root * np.maximum(change["norm"], extreme) / scale)
    changed = np.zeros(n, bool)
    for each in change.values():
        changed |= each != 0
    outcome = np.where(changed, _IS_MEASURED, np.where(same_bits == 0, _HAS_OTHER_ORDER, _IS_ALIKE))
    outcome[nonfinite] = _IS_NONFINITE
    _look_beside_masks(a, b, change["max"], root, outcome, low, high, same_bits)
    outcome[~known] = np.where(same_bits[~known] == 0, _HAS_OTHER_BITS, _IS_UNKNOWN)
    return outcome, low, high


def _look_beside_masks(
    a: Columns,
    b: Columns,
    change: F64,
    root: F64,
    outcome: npt.NDArray[np.int64],
    low: F64,
    high: F64,
    same_bits: npt.NDArray[np.int8],
) -> None:
    """Tell what was filled with one very low number by the largest of the others, as norm and mean are those of the mask.

    The number may be the lowest of two formats, of which the norm of one may be infinite. change: of the largest numbers.
    """
    (x, in_a), (y, in_b) = a.statistics["min"], b.statistics["min"]
    (p, _), (q, _) = a.statistics["max"], b.statistics["max"]
    with np.errstate(all="ignore"):
        rest = np.maximum(np.abs(p), np.abs(q))
        filled = in_a & in_b & (np.maximum(x, y) < -np.maximum(_FILL, _ABOVE * rest)) & np.isfinite(x) & np.isfinite(y)
        filled &= (np.abs(x - y) <= _SAME_FILL * np.abs(y)) | (np.isin(x, LOWEST) & np.isin(y, LOWEST))
        beside = np.where(rest > 0, rest, 1.0)
        far = change / beside
    unseen = (outcome == _IS_ALIKE) & (same_bits < 0)
    outcome[filled & (change == 0) & (unseen | (outcome == _IS_MEASURED) | (outcome == _IS_NONFINITE))] = _IS_MASKED
    measured = filled & (change > 0)
    outcome[measured] = _IS_MEASURED
    low[measured], high[measured] = (far / root)[measured], far[measured]


def _all_finite(side: Columns) -> Bools:
    """Return where each statistic that a side has is finite."""
    return np.all([~there | np.isfinite(x) for x, there in side.statistics.values()], axis=0)


def _where_nonfinite(a: bool, b: bool) -> str:
    """Return which side holds NaN or infinities, where both do not hold the same. a, b: whether a side is finite."""
    return _NONFINITE.note if a == b else f"NaN or infinities in {'B' if a else 'A'} alone"


def _alike_where_not_finite(x: F64, y: F64) -> Bools:
    """Return where two numbers are both finite, or the same infinity, or both NaN."""
    return (np.isfinite(x) & np.isfinite(y)) | (x == y) | (np.isnan(x) & np.isnan(y))


def _scale(a: Columns, b: Columns, root: F64) -> F64:
    """Return the larger norm; where there is none, that of elements all as large as the largest."""
    norms, extremes = np.zeros(len(root)), np.zeros(len(root))
    for side in (a, b):
        for name, largest in (("norm", norms), ("max", extremes), ("min", extremes)):
            x, there = side.statistics[name]
            np.maximum(largest, np.where(there & np.isfinite(x), np.abs(x), 0.0), out=largest)
    scale = np.where(norms > 0, norms, root * extremes)
    return np.where(scale == 0, 1.0, scale)
