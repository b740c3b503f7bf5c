"""How the parts of one value on two sides make the same whole: which axes split it, and along which the ranks hold copies.

Mostly nobody needs to say it; what must be said stands in a table (see split_table). A whole has one number of elements, so of
the ways to read the parts of both sides (split over samples and tensor-parallel ranks, over one of the two, over none) that one
counts which makes both wholes equally large. Where ranks hold copies, these must agree; that is measured, and a copy that does
not agree is what is reported.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from trainprobe.dump_compare.layouts.joined import Join, RankPart, agree
from trainprobe.dump_compare.layouts.rank_boxes import Box
from trainprobe.dump_compare.layouts.split_table import SplitRule
from trainprobe.errors import CompareError

Role = Literal["activation", "gradient", "weight", "weight gradient"]


def joins(
    a: Sequence[RankPart], b: Sequence[RankPart], role: Role, known: tuple[SplitRule | None, SplitRule | None] = (None, None)
) -> tuple[Join, Join] | None:
    """Return how the parts of both sides make one whole each, None where no way is known.

    known: what a table says of each side. Raises CompareError where what a user wrote there cannot be.
    """
    if role == "weight gradient":
        return _terms(a, b)
    samples = [{part.data for part in parts} for parts in (a, b)]
    if len(samples[0]) != len(samples[1]) and not any(part.shape for part in (*a, *b)):
        return _over_samples(a, b, role)  # no number by itself is a part of anything
    for mine in readings(a, role, known[0]):
        for theirs in readings(b, role, known[1]):
            shape = whole_shape(mine, theirs)
            if shape is not None:
                return replace(mine, shape=shape), replace(theirs, shape=shape)
    wrong = next((rule for rule in known if rule is not None and rule.own), None)
    if wrong is not None:
        sizes = [sum(part.size for part in parts) for parts in (a, b)]
        raise CompareError(
            f"{wrong.where} does not fit: the ranks of A hold {sizes[0]} elements there and those of B {sizes[1]}, "
            f"and with tp {wrong.tp!r} and samples {wrong.samples!r} they make no whole of one size"
        )
    return _over_samples(a, b, role)


def readings(parts: Sequence[RankPart], role: Role, known: SplitRule | None = None) -> Iterator[Join]:
    """Yield the ways to read parts: all of them side by side, or copies along one axis. Samples are no copies.

    Where the dump, or a table, says which part of the whole each rank holds, there is one way.
    """
    if all(part.box is not None for part in parts):
        yield _partial(parts) or by_boxes(parts)
        return
    if known is not None and (known.tp is not None or known.samples is not None):
        yield from _as_known(parts, known)
        if known.own:
            return
    yield Join(parts)
    for axes in (("tensor",),) if role in ("activation", "gradient") else (("tensor",), ("data",), ("tensor", "data")):
        first, copies = _apart_from_copies(parts, axes)
        if copies:
            yield Join(first, replicas=copies)


def by_boxes(parts: Sequence[RankPart]) -> Join:
    """Join parts by their places in the whole; what several ranks hold counts once, and the others are copies of it."""
    same: dict[object, list[RankPart]] = defaultdict(list)
    for part in parts:
        same[part.box].append(part)
    copies = [(each[0], other) for each in same.values() for other in each[1:]]
    first = [each[0] for each in same.values()]
    return Join(first, replicas=copies, boxes=[part.box for part in first if part.box is not None])


def _partial(parts: Sequence[RankPart]) -> Join | None:
    """Return the sum of parts of which the dump says that they are terms, one of each rank; None where it does not say it."""
    boxes = {part.box for part in parts}
    if len(boxes) > 1 or not all(part.box is not None and part.box.term for part in parts):
        return None
    placements = [(part.value.extra or {}).get("placements", ()) for part in parts]
    added = all(list(each) == [{"Partial": {"reduce_op": "sum"}}] for each in placements)
    return Join(parts, "terms", terms=len(parts)) if added and len(parts) > 1 else None


def _as_known(parts: Sequence[RankPart], known: SplitRule) -> Iterator[Join]:
    """Yield the one way in which a table says that parts lie."""
    copied = [axis for axis, way in (("tensor", known.tp), ("data", known.samples)) if way == "copy"]
    first, copies = _apart_from_copies(parts, copied) if copied else (list(parts), [])
    counts = {"tp": len({part.tensor for part in first}), "samples": len({part.data for part in first})}
    terms = math.prod(counts[axis] for axis, way in (("tp", known.tp), ("samples", known.samples)) if way == "sum")
    if terms > 1:
        yield Join(first, "terms", replicas=copies, terms=terms)
    else:
        yield Join(first, replicas=copies, boxes=_boxes(first, known, counts))


def _boxes(parts: Sequence[RankPart], known: SplitRule, counts: Mapping[str, int]) -> list[Box]:
    """Return where parts lie along the dimensions that a table names, nothing where it does not name all of them."""
    named = {"tp": known.tp, "samples": known.samples}
    dims = {axis: way for axis, way in named.items() if counts[axis] > 1 and isinstance(way, int)}
    shape = parts[0].shape
    whole = all(counts[axis] == 1 or axis in dims for axis in counts) and len(parts) == math.prod(counts.values())
    if not dims or not whole or any(part.shape != shape or max(map(_reach, dims.values())) > len(shape) for part in parts):
        return []
    order = {"tp": sorted({part.tensor for part in parts}), "samples": sorted({part.data for part in parts})}
    boxes: list[Box] = []
    for part in parts:
        offset = [0] * len(shape)
        for axis, dim in dims.items():
            offset[dim] += order[axis].index(part.tensor if axis == "tp" else part.data) * shape[dim]  # type: ignore[arg-type]
        boxes.append(Box(tuple(offset), shape))
    return boxes


def _reach(dim: int) -> int:
    return dim + 1 if dim >= 0 else -dim


def _apart_from_copies(
    parts: Sequence[RankPart], axes: Sequence[str]
) -> tuple[list[RankPart], list[tuple[RankPart, RankPart]]]:
    """Return the parts without those that are copies along some axes, and each copy beside its first."""
    same: dict[tuple[object, ...], list[RankPart]] = defaultdict(list)
    for part in parts:
        key = () if "data" in axes else part.data, None if "tensor" in axes else part.tensor
        same[key].append(part)
    return [each[0] for each in same.values()], [(each[0], other) for each in same.values() for other in each[1:]]


def whole_shape(a: Join, b: Join) -> tuple[int, ...] | None:
    """Return the shape of the whole that both readings make, None where they make two."""
    shapes = [{part.shape for part in join.parts} for join in (a, b)]
    if a.size != b.size:
        return None
    if len(a.parts) == 1 or len(b.parts) == 1:
        return (a if len(a.parts) == 1 else b).parts[0].shape
    if shapes[0] == shapes[1] and len(shapes[0]) == 1 and len(a.parts) == len(b.parts):
        return (len(a.parts), *next(iter(shapes[0])))
    return (a.size,)


def _over_samples(a: Sequence[RankPart], b: Sequence[RankPart], role: Role) -> tuple[Join, Join] | None:
    """Join what does not grow with the number of samples: the same for all of them, or a mean over them (a loss)."""
    made: list[Join] = []
    for parts in (a, b):
        first, copies = _apart_from_copies(parts, ("tensor",))
        shape = first[0].shape
        if any(part.shape != shape for part in first):
            return None
        if agree(first) and role == "activation":
            made.append(Join(first[:1], "parts", tuple(shape), [*copies, *((first[0], other) for other in first[1:])]))
        elif math.prod(shape) == 1 and role == "activation":
            made.append(Join(first, "terms", tuple(shape), copies, mean=True))
        elif role == "gradient":
            made.append(Join(first, "terms", tuple(shape), copies))
        else:
            return None
    same = made[0].shape == made[1].shape
    return (made[0], made[1]) if same else None


def _terms(a: Sequence[RankPart], b: Sequence[RankPart]) -> tuple[Join, Join] | None:
    """Join gradients of weights before they are reduced: terms over samples; shards, copies or terms over tensor ranks."""
    for split in ((False, False), (True, False), (False, True), (True, True)):
        sides = [sum_of(parts, over) for parts, over in zip((a, b), split, strict=True)]
        if all(side is not None for side in sides):
            shape = whole_shape(*[Join(side[1]) for side in sides if side is not None])
            if shape is not None:
                mine, theirs = (replace(side[0], shape=shape) for side in sides if side is not None)
                return mine, theirs
    return None


def sum_of(parts: Sequence[RankPart], split: bool) -> tuple[Join, Sequence[RankPart]] | None:
    """Return the sum of parts over samples, and the parts of one sample. split: ranks of tensor parallelism hold shards."""
    if all(part.box is not None and part.box.everywhere and not part.box.term for part in parts):  # FSDP2 has reduced it
        join = by_boxes([replace(part, weight=1.0) for part in parts])
        return None if split else (join, join.parts)
    samples: dict[tuple[int, ...], list[RankPart]] = defaultdict(list)
    for part in parts:
        samples[part.data].append(part)
    first = next(iter(samples.values()))
    several = len(first) > 1
    if split and several:
        return Join(parts, "parts" if len(samples) == 1 else "terms"), first
    if split:
        return None
    if several and all(agree(each) for each in samples.values()):
        parts = [each[0] for each in samples.values()]
    return Join(parts, "terms" if len(parts) > 1 else "parts"), first[:1]
