"""How far two values are apart, from whatever a dump holds of them: their elements, fingerprints of their bits, or statistics.

The distance is the relative l2, ‖a − b‖₂ / max(‖a‖₂, ‖b‖₂). Statistics bound it from below alone, so it is an interval:

* |‖a‖ − ‖b‖|, |max a − max b|, |min a − min b| and √n·|mean a − mean b| are each at most ‖a − b‖₂ (triangle, ‖·‖∞ ≤ ‖·‖₂,
  Cauchy-Schwarz), for n elements: the largest of them is `low`.
* Independent errors of the elements change a norm by 1/√n of their own norm, and an extreme by about one of them: the upper
  end `high` is an estimate, not a bound, √n·|‖a‖ − ‖b‖| and √n times the change of an extreme.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trainprobe.dump_compare.dump_side import Side
from trainprobe.engine.compare import measure
from trainprobe.engine.core.records import Value

Evidence = Literal["bits", "values", "statistics", "shape", "nothing", "absent", "replicas"]


@dataclass(frozen=True, slots=True)
class Apart:
    """A distance from `low` to `high`, and what it was told by. note: what else there is to say."""

    low: float
    high: float
    evidence: Evidence
    note: str = ""


_ABOUT = 10.0  # times: copies that are apart by less explain no distance of the sides
SAME = Apart(0.0, 0.0, "bits")


def apart(a: Side, left: Value, b: Side, right: Value) -> Apart:
    """Return how far two values are apart; the best evidence that both sides have decides.

    Where ranks of one side hold copies of a value that are not alike, about as far apart as the sides or further, that is what
    is wrong.
    """
    far = _apart(a, left, b, right)
    copies = [found for side, value in ((a, left), (b, right)) if (found := side.disagreement(value)) is not None]
    worst = max(copies, key=lambda found: found.low, default=None)
    if worst is None or (math.isfinite(far.low) and _ABOUT * worst.low < far.low):
        return far
    return Apart(max(far.low, worst.low), max(far.high, worst.high), "replicas", worst.note)


def _apart(a: Side, left: Value, b: Side, right: Value) -> Apart:
    if tuple(left.shape) != tuple(right.shape):
        return Apart(math.inf, math.inf, "shape", f"shapes {list(left.shape)} and {list(right.shape)}")
    same_bits = _same_bits(a.bits(left), b.bits(right)) if dtype(left) == dtype(right) else None
    if same_bits or 0 in left.shape:  # of a tensor without elements there are no statistics, and nothing to differ
        return SAME
    x, y = a.array(left), b.array(right)
    if x is not None and y is not None and x.shape == y.shape:
        found = measure(x, y)
        far = math.inf if found.misplaced else found.relative_l2
        return Apart(far, far, "values", "NaN or infinities on one side alone" if found.misplaced else "")
    return by_statistics(a.numbers(left), b.numbers(right), math.prod(left.shape), same_bits)


def dtype(value: Value) -> str:
    """Return the number format of a value as every tool calls it: `float32`."""
    return value.dtype.rpartition(".")[2].lower()


def _same_bits(a: Mapping[str, int], b: Mapping[str, int]) -> bool | None:
    """Return whether the bits agree, None where the sides have no fingerprint of one kind."""
    kind = next((kind for kind in ("checksum", "crc32") if kind in a and kind in b), None)
    return None if kind is None else a[kind] == b[kind]


def by_statistics(a: Mapping[str, float], b: Mapping[str, float], n: int, same_bits: bool | None) -> Apart:
    """Return what norm, max, min and mean of two tensors of n elements say. same_bits: what is known of their bits."""
    names = [name for name in ("norm", "max", "min", "mean") if name in a and name in b]
    if not names:
        if same_bits is False:
            return Apart(0.0, math.inf, "bits", "the bits differ, and there are no statistics that say how far")
        return Apart(0.0, math.inf, "nothing", "neither dump holds anything to compare")
    if any(_odd(a[name]) != _odd(b[name]) for name in names):
        return Apart(math.inf, math.inf, "statistics", "NaN or infinities on one side alone")
    change = {name: abs(a[name] - b[name]) for name in names if not _odd(a[name])}
    if not any(change.values()):
        if same_bits is False:
            return Apart(
                0.0,
                math.inf,
                "bits",
                "the bits differ, the statistics do not: the same numbers in another order, or zeros of another sign?",
            )
        return Apart(0.0, 0.0, "statistics")
    root = math.sqrt(max(1, n))
    extreme = max(change.get("max", 0.0), change.get("min", 0.0))
    mean, norm = root * change.get("mean", 0.0), change.get("norm", 0.0)
    scale = _scale(a, b, root)
    low = max(norm, extreme, mean) / scale
    return Apart(low, max(low, root * max(norm, extreme) / scale), "statistics")


def _scale(a: Mapping[str, float], b: Mapping[str, float], root: float) -> float:
    """Return the larger norm; where there is none, that of elements all as large as the largest."""
    norms = [side["norm"] for side in (a, b) if math.isfinite(side.get("norm", math.nan))]
    extremes = [abs(side.get(name, 0.0)) for side in (a, b) for name in ("max", "min")]
    return max(norms) if norms and max(norms) > 0 else root * max((x for x in extremes if math.isfinite(x)), default=0.0) or 1.0


def _odd(x: Any) -> Any:
    """Return what a number is where it is not finite, else None: two NaNs are alike here."""
    return None if math.isfinite(x) else str(x)
