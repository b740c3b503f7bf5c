"""Calls that are given the same on both sides, and weights: what is held to the rounding of the result itself, or to none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from trainprobe.dump_compare.call_slots import named_values
from trainprobe.dump_compare.distances import Distance
from trainprobe.dump_compare.dump_side import STATISTICS, Side
from trainprobe.dump_compare.intervals import OTHER_ORDER, SUMS
from trainprobe.dump_compare.own_rounding import (
    COARSE,
    SEVERAL,
    WITHIN,
    Beyond,
    Counted,
    OwnRounding,
    arriving,
    by_counts,
    by_elements,
    by_statistics,
    in_its_format,
    passes_on,
    roundings,
    smallest,
    statistics_of,
)
from trainprobe.engine.core.records import Value

if TYPE_CHECKING:
    from trainprobe.dump_compare.judge import Judged

_SUMS_IN_SINGLE = 2.0**-18  # relative: statistics of equal weights that two tools took in float32 are as near


def hold_to_own_rounding(one: Judged, a: Side, b: Side) -> None:
    """Say of each result in a coarse format how far it is beyond its own rounding, of a call that is given the same.

    Of a kernel that is given other numbers: beyond that and what arrives.
    """
    held = list(_apart(one)) if one.own > COARSE and (one.given == 0 or passes_on(one.call)) else []
    given = max(math.prod(value.shape) for value in named_values(one.call)[1]) if held else 0
    for i, value, left, right in held:
        told = value.interval.evidence in ("statistics", "values") and left.shape == right.shape
        rows = in_its_format(one.call, left, given)
        if value.result and told and rows:
            one.values[i] = value._replace(beyond=_beyond(one, value, math.sqrt(rows), (a, left), (b, right)))


def see_weights(one: Judged, a: Side, b: Side) -> None:
    """Say of each weight of one format whether other numbers are stored on the two sides, where no step was before."""
    for i, value, left, right in _apart(one) if one.weights > 0 and a.step_data.step == b.step_data.step == 0 else ():
        if value.slot.startswith("parameters"):
            far = value.interval.evidence == "values" or value.interval.low > _SUMS_IN_SINGLE
            other = _other_bits(a, left, b, right)
            if other and value.interval.low < SUMS and value.interval.evidence == "statistics":
                one.values[i] = value._replace(stored=True, interval=OTHER_ORDER)  # two libraries sum in another order
            elif far or other:
                one.values[i] = value._replace(stored=True)


def _apart(one: Judged) -> Iterator[tuple[int, Distance, Value, Value]]:
    """Yield the values of one format that are apart: their place, their distance, and the value of either side."""
    apart = [(i, value) for i, value in enumerate(one.values) if value.interval.low > 0 and not value.formats]
    if not apart or one.pair.a is None or one.pair.b is None:
        return
    left, right = (dict(zip(*named_values(call), strict=True)) for call in (one.pair.a, one.pair.b))
    for i, value in apart:
        if value.slot in left and value.slot in right:
            yield i, value, left[value.slot], right[value.slot]


def _other_bits(a: Side, left: Value, b: Side, right: Value) -> bool:
    mine, theirs = a.columns([left]).bits, b.columns([right]).bits
    kinds = [kind for kind in mine if kind in theirs and mine[kind][1][0] and theirs[kind][1][0]]
    return any(mine[kind][0][0] != theirs[kind][0][0] for kind in kinds)


def _beyond(one: Judged, value: Distance, more: float, *sides: tuple[Side, Value]) -> Beyond:
    left = sides[0][1]
    times, shared = roundings(one.call, left.shape, joined=any(side.adds_up for side, _ in sides))
    times *= more
    arrives = value.cancelled * arriving(one.moved, one.given, left.shape) if one.given and times == 1 else 0.0
    if one.given and not arrives:
        return WITHIN
    unit = one.own if times < SEVERAL else max(value.floor, one.own)
    how = OwnRounding(unit, smallest(left.dtype.rpartition(".")[2]), one.sums * value.cancelled, times, shared, arrives)
    size = math.prod(left.shape)
    if value.interval.evidence == "values":
        arrays = [side.array(each) for side, each in sides]
        if arrays[0] is None or arrays[1] is None or not (np.isfinite(arrays[0]).all() and np.isfinite(arrays[1]).all()):
            return WITHIN
        x, y = (np.asarray(array, np.float64) for array in arrays)
        told = by_statistics(statistics_of(x), statistics_of(y), size, how)
        return told if arrives else max(told, by_elements(x, y, how, within=times > 1 or one.call.kind != "op"))
    told = [_statistics(side, each) for side, each in sides]
    whole = all(len(each) == len(STATISTICS) and all(map(np.isfinite, each.values())) for each in told)
    if not whole:
        return WITHIN
    found = by_statistics(told[0], told[1], size, how)
    if times == 1 and not arrives:
        counted = [Counted(*side.counted(each)) for side, each in sides]
        found = max(found, by_counts(counted[0], counted[1], told[0]["norm"], size, how))
    return found


def _statistics(side: Side, value: Value) -> dict[str, float]:
    columns = side.columns([value]).statistics
    return {name: float(numbers[0]) for name, (numbers, there) in columns.items() if there[0]}
