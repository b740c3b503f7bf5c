"""Values of which nothing but their numbers says that one side holds whole what the other holds in parts.

Parts whose statistics together are those of the whole, to the last digit that sums have, are its parts; the dimension is that
in which the shapes differ. Their order is taken to be that of the ranks, which stored elements must confirm. So weights and
what a script is called with are known where a dump holds no modules, and other values follow from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from trainprobe.dump_compare.dump_side import STATISTICS
from trainprobe.dump_compare.layouts.cuts import Along, Cut, Lay, boxes_of, flat
from trainprobe.dump_compare.layouts.joined import Join, RankPart, array_of, together

_SUMMED = 1e-12  # relative: by how much statistics of a whole that was added up of its parts may be off


def lay_by_numbers(whole: RankPart, parts: Sequence[RankPart]) -> Lay | None:
    """Return how ranks hold a whole, None where their numbers are not exactly its own."""
    numbers = [each.side.numbers(each.value) for each in (whole, *parts)]
    finite = all(math.isfinite(each.get(name, math.nan)) for each in numbers for name in STATISTICS)
    if not finite or any(part.value.dtype != whole.value.dtype for part in parts):
        return None
    if all(part.shape == whole.shape for part in parts):
        return "copy" if all(are_the_same(numbers[0], each) for each in numbers[1:]) else None
    cut = cut_by_shapes(whole.shape, parts)
    found = cut is not None and tells(numbers[0]) and tell_the_same(whole, parts) and _in_order(whole, parts, cut)
    return cut if found else None


def tell_the_same(whole: RankPart, parts: Sequence[RankPart]) -> bool:
    """Return whether the statistics of parts together are those of a whole."""
    of_parts = [part.side.numbers(part.value) for part in parts]
    numbers, sizes = whole.side.numbers(whole.value), [part.size for part in parts]
    if any(name not in each for each in (numbers, *of_parts) for name in STATISTICS) or not all(sizes):
        return False
    return are_the_same(numbers, {name: together(name, [each[name] for each in of_parts], sizes) for name in STATISTICS})


def cut_by_shapes(whole: tuple[int, ...], parts: Sequence[RankPart]) -> Cut | None:
    """Return the cut along the one dimension in which the shapes of equal parts differ from that of the whole."""
    dim = _split_dim(whole, parts) if len({part.data for part in parts}) == 1 else None
    return None if dim is None else flat(whole, Along(dim - len(whole), parts[0].shape[dim], whole[dim]))


def are_samples_of(whole: RankPart, parts: Sequence[RankPart]) -> bool:
    """Return whether parts are those of a whole along its samples or tokens, of which ranks hold others each, in any order."""
    others = len({part.data for part in parts}) == len(parts)
    return others and _split_dim(whole.shape, parts) is not None and tell_the_same(whole, parts)


def _split_dim(whole: tuple[int, ...], parts: Sequence[RankPart]) -> int | None:
    shape = parts[0].shape
    if any(part.shape != shape for part in parts) or len(shape) != len(whole):
        return None
    dims = [dim for dim in range(len(whole)) if shape[dim] != whole[dim]]
    return dims[0] if len(dims) == 1 and shape[dims[0]] * len(parts) == whole[dims[0]] else None


def tells(numbers: Mapping[str, float]) -> bool:
    """Return whether statistics tell a value from others of its size: it has all of them, and is no constant."""
    return all(math.isfinite(numbers.get(name, math.nan)) for name in STATISTICS) and numbers["max"] > numbers["min"]


def are_the_same(a: Mapping[str, float], b: Mapping[str, float]) -> bool:
    """Return whether all statistics are the same, but for how their sums round."""
    near = [abs(a[name] - b[name]) <= _SUMMED * a["norm"] for name in ("norm", "mean")]
    return a["max"] == b["max"] and a["min"] == b["min"] and all(near)


def _in_order(whole: RankPart, parts: Sequence[RankPart], cut: Cut) -> bool:
    """Return whether stored elements stand in the order of the ranks; where none are stored, they are taken to do so."""
    if whole.value.tensor is None or any(part.value.tensor is None for part in parts):
        return True
    boxes = boxes_of(whole.shape, cut, len(parts))
    elements = [array_of(join) for join in (Join([whole], shape=whole.shape), Join(parts, shape=whole.shape, boxes=boxes))]
    return elements[0] is None or elements[1] is None or np.array_equal(elements[0], elements[1].reshape(elements[0].shape))
