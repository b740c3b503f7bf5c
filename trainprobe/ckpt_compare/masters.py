"""The law that ties an optimizer to its weights: a master weight, rounded to the number format of its weight, is that weight.

Where an optimizer's state was stored without names, the names that are given to it are a guess until this holds: sizes that fit
prove nothing where many parameters have one size. It also tells an optimizer of another step, or of another model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from trainprobe.ckpt_compare.coverage import Overlap, coverage_of, overlaps
from trainprobe.ckpt_compare.pieces import Array, LogicalTensor, gather
from trainprobe.ckpt_compare.tasks import release
from trainprobe.engine.compare.number_formats import NumberFormat, decode
from trainprobe.engine.geometry.rectangles import Rectangle
from trainprobe.errors import FormatError

SAMPLE = 4096  # elements of one rectangle that are looked at
EXACT = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Agreement:
    """How many elements were looked at, in how many a weight is its rounded master, and whether all masters were the same."""

    count: int = 0
    equal: int = 0
    constant: bool = True

    @property
    def holds(self) -> bool:
        """Whether the master belongs to the weight: single elements may differ, which a comparison tells."""
        return self.count > 0 and 2 * self.equal > self.count


def rounded(bits: Array, fmt: NumberFormat, to: NumberFormat) -> Array:
    """Round float32 or float64 values to the nearest number of another format (ties to even); return its bits.

    to: one of `EXACT`. NaN stays NaN.
    """
    if fmt == to:
        return bits
    values = decode(bits, fmt).astype(np.float32 if to.name != "float64" else np.float64)
    if to.name != "bfloat16":
        with np.errstate(over="ignore"):
            return values.astype(to.storage)
    raw = np.ascontiguousarray(values).view(np.uint32)
    near = (raw + np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), near).astype(np.uint16)


def agreement(weight: LogicalTensor, master: LogicalTensor, most: int | None = SAMPLE) -> Agreement | None:
    """Hold the masters that are there against their weights; None where their formats do not allow it, or nothing is common.

    most: elements of each common rectangle that are looked at, None for all. Raises FormatError for files that cannot be read.
    """
    if not (weight.pieces and master.pieces) or weight.shape != master.shape:
        return None
    if weight.format.name not in EXACT or master.format.name not in EXACT or master.format.itemsize < weight.format.itemsize:
        return None
    total = Agreement()
    first: float | None = None
    for overlap in overlaps(coverage_of(weight).parts, coverage_of(master).parts):
        box = overlap.box if most is None else _beginning(overlap.box, most)
        mine, theirs = overlap.a.load(box), overlap.b.load(box)
        near = rounded(theirs, master.format, weight.format)
        values = decode(theirs, master.format).reshape(-1)
        same = (near == mine) | (np.isnan(decode(near, weight.format)) & np.isnan(decode(mine, weight.format)))
        first = float(values[0]) if first is None else first
        constant = total.constant and bool((values == first).all())
        total = Agreement(total.count + box.count, total.equal + int(same.sum()), constant)
        _let_go(overlap)
    return total if total.count else None


def _let_go(overlap: Overlap) -> None:
    for part in (overlap.a, overlap.b):
        release(part.piece.source)


def _beginning(box: Rectangle, most: int) -> Rectangle:
    """Return the first rows of a box, about so many elements."""
    shape = list(box.shape)
    for axis in range(len(shape)):
        inner = int(np.prod(shape[axis + 1 :]))
        shape[axis] = min(shape[axis], max(1, most // max(1, inner)))
    return Rectangle(box.offset, tuple(shape))


def strangers(masters: Iterable[LogicalTensor], weights: Mapping[str, LogicalTensor]) -> Iterator[tuple[str, Agreement | None]]:
    """Yield the names of masters that are not those of their weights, with what was seen; None where nothing could be seen."""
    for master in masters:
        weight = weights.get(master.name)
        try:
            seen = None if weight is None else agreement(weight, master)
        except FormatError:
            continue  # told when the file is compared
        if seen is None or not seen.holds:
            yield master.name, seen


def not_placed(mismatches: Mapping[str, Agreement | None]) -> str:
    """Say that the states of some parameters are left out, and what was seen of the first."""
    name, seen = next(iter(mismatches.items()))
    why = "there is no master weight to check that with"
    if seen is not None:
        why = f"its master weights, rounded, are the weights in {seen.equal} of {seen.count} elements"
    return (
        f"the states of {len(mismatches)} parameters are not placed, such as those of {name}: where the order of the "
        f"parameters puts them, {why}"
    )


def without_strangers(
    states: Collection[LogicalTensor], weights: Mapping[str, LogicalTensor]
) -> tuple[list[LogicalTensor], str]:
    """Leave out the states of parameters whose masters are not their weights; return the others and what to say of it.

    For states that were stored without names. States of parameters without a master are kept: nothing can be checked.
    """
    masters = gather(t for t in states if t.slot == "master").values()
    mismatches = {name: seen for name, seen in strangers(masters, weights) if seen is not None}
    return [t for t in states if t.name not in mismatches], not_placed(mismatches) if mismatches else ""
