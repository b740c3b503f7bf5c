"""Which part of a whole tensor a rank holds: by the shard that its source says, or by a DTensor's mesh and placements."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.core.records import Value
from trainprobe.engine.geometry.shards import Shard, cut, rectangles_of


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor. within: offset and shape of the rectangle that a flat piece is of, else empty."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    within: tuple[tuple[int, ...], ...] = ()
    everywhere: bool = False  # whether all ranks of the job are on its mesh: a gradient that lies so is reduced
    term: bool = False  # whether ranks hold terms of a sum


def box_of(value: Value, rank: int, world: int) -> Box | None:
    """Return what part of a tensor a rank holds, None where the dump does not say. Raises nothing for what it cannot read."""
    extra = value.extra or {}
    try:
        if isinstance(shard := extra.get("shard"), Mapping):
            return _told(shard)
        if "placements" in extra and "device_mesh" in extra:
            return _on_mesh(value.shape, extra["device_mesh"], extra["placements"], rank, world)
    except (KeyError, TypeError, ValueError, IndexError):
        pass
    return None


def _told(shard: Mapping[str, Any]) -> Box:
    within = shard.get("within")
    outer = () if not isinstance(within, Mapping) else (tuple(within["offset"]), tuple(within["shape"]))
    return Box(tuple(shard["offset"]), tuple(shard["shape"]), outer, everywhere=True)


def share_of(value: Value, bits: Mapping[str, int], box: Box | None) -> tuple[int, int] | None:
    """Return how many elements the whole tensor has, and what a part of it adds to the fingerprint of the whole.

    None where the dump does not say it. bits: the fingerprints of the part.
    """
    whole = None if box is None or box.term else elements_of_whole(value)
    if box is None or whole is None:
        return None
    extra = value.extra or {}
    try:
        if "share" not in extra and math.prod(box.shape) == whole:
            return whole, bits["checksum"]
        return whole, int(extra["share"], 16)
    except (KeyError, TypeError, ValueError):
        return None


def elements_of_whole(value: Value) -> int | None:
    """Return how many elements the tensor has that a value is a part of, None where the dump does not say it."""
    shard: Any = (value.extra or {}).get("shard")
    try:
        while shard is not None and shard.get("within") is not None:
            shard = shard["within"]
        return math.prod(value.shape if shard is None else shard["whole"])
    except (AttributeError, KeyError, TypeError):
        return None


def cut_by(box: Box | None, value: Value) -> object:
    """Return which part of its tensor a value is, None where it is all of it or the dump does not say."""
    whole = None if box is None else elements_of_whole(value)
    return None if box is None or whole in (None, math.prod(box.shape)) else (box.offset, box.shape, box.within)


def _shard(box: Box) -> Shard:
    outer = Shard(box.within[0], box.within[1], ()) if box.within else None
    return Shard(box.offset, box.shape, (), within=outer)


def holder(boxes: Sequence[Box], at: Sequence[int]) -> int | None:
    """Return which of the parts at these places holds an element of the whole, None where none does."""
    for i, box in enumerate(boxes):
        if any(part.holds(at) for _, part in rectangles_of(_shard(box))):
            return i
    return None


def extent(boxes: Sequence[Box]) -> tuple[int, ...] | None:
    """Return the shape of what parts at these places fill, None where they do not fill it."""
    outer = [box.within or (box.offset, box.shape) for box in boxes]
    shape = tuple(max(at[d] + n[d] for at, n in outer) for d in range(len(outer[0][0]))) if outer else ()
    return shape if outer and sum(math.prod(box.shape) for box in boxes) == math.prod(shape) else None


def put_together(arrays: Iterator[npt.NDArray[Any] | None], boxes: Sequence[Box]) -> npt.NDArray[Any] | None:
    """Return the whole that parts make, None where they do not fill it, or one is missing or no box is known.

    Flat pieces of one tensor make a flat whole. Of the parts one at a time is held.
    """
    shape = extent(boxes)
    fills = shape is not None
    whole: npt.NDArray[Any] | None = None
    origin = (0,) * len(shape or ())
    for box in boxes if fills else ():
        array = next(arrays)
        if array is None or array.size != math.prod(box.shape):
            fills = False
            break
        whole = np.empty(shape or (), array.dtype) if whole is None else whole
        flat = array.reshape(-1)
        for start, part in rectangles_of(_shard(box)):
            whole[part.within(origin)] = flat[start : start + part.count].reshape(part.shape)
        del array, flat
    for _ in arrays:  # so that what cannot be read is told
        pass
    return whole if fills else None


def _on_mesh(shape: Sequence[int], mesh: Any, placements: Sequence[Mapping[str, Any]], rank: int, world: int) -> Box | None:
    where = _find(mesh, rank)
    if where is None:
        return None
    coordinate, sizes = where
    cuts = [
        (i, placement[kind]["dim"], kind == "StridedShard")
        for i, placement in enumerate(placements)
        for kind in ("Shard", "StridedShard")
        if kind in placement
    ]
    offset, part = cut(shape, [(dim, coordinate[i], sizes[i], strided) for i, dim, strided in cuts])
    count = 1
    for size in sizes:
        count *= size
    return Box(offset, part, (), count == world, any("Partial" in placement for placement in placements))


def _find(mesh: Any, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return where a rank is in nested lists of ranks, and how long the lists are; None where it is not in them."""
    if not isinstance(mesh, list):
        return ((), ()) if mesh == rank else None
    for i, inner in enumerate(mesh):
        found = _find(inner, rank)
        if found is not None:
            return (i, *found[0]), (len(mesh), *found[1])
    return None
