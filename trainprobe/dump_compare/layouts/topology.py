"""Where the ranks of a dump stood: what its headers say of the parallel axes, and whether two dumps have one layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trainprobe.engine.core.records import Place

DATA_AXES = ("dp", "cp", "sp")  # ranks along these hold other samples or tokens
MODEL_AXES = ("pp", "tp")  # ranks along these hold other parts of the model, or the same


@dataclass(frozen=True, slots=True)
class RankPosition:
    """Where a rank stands on the axes that tell ranks apart. data: index on each of DATA_AXES; an absent axis has index 0."""

    data: tuple[int, ...]
    stage: int
    tensor: int


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """The parallel sizes of a dump. sizes: axis → size, without those of size 1."""

    ranks: int
    sizes: Mapping[str, int]

    def __str__(self) -> str:
        return " ".join(f"{axis.upper()}{size}" for axis, size in self.sizes.items()) or "1 rank"

    @property
    def averaged(self) -> int:
        """Over how many ranks gradients are averaged: local ones are this many times larger than their share of the whole."""
        return math.prod(self.sizes.get(axis, 1) for axis in DATA_AXES)


def layout_of(place: Place) -> ParallelLayout:
    """Return the layout that the place of any rank says."""
    return ParallelLayout(place.world_size, {axis: size for axis, (_, size) in sorted(place.axes.items()) if size > 1})


def position_of(place: Place) -> RankPosition:
    """Return where a rank stands."""
    index = {axis: place.axes.get(axis, (0, 1))[0] for axis in (*DATA_AXES, *MODEL_AXES)}
    return RankPosition(tuple(index[axis] for axis in DATA_AXES), index["pp"], index["tp"])


def expert_position_of(place: Place) -> RankPosition:
    """Return where a rank stands for an expert, which is split over other ranks where there is an axis `etp`.

    Megatron counts ranks over tensor-parallel ranks of experts first, then over experts, then over those that share an expert.
    """
    dense = position_of(place)
    if "etp" not in place.axes:
        return dense
    (tensor, split), (_, experts) = place.axes["etp"], place.axes.get("ep", (0, 1))
    stages = place.axes.get("pp", (0, 1))[1]
    share = place.rank % (place.world_size // stages) // (split * experts)
    return RankPosition((share, *(0 for _ in DATA_AXES[1:])), dense.stage, tensor)


def other_layouts(a: tuple[int, Place], b: tuple[int, Place]) -> bool:
    """Return whether two dumps say that they split the model differently. a, b: how many ranks were dumped, and one's place.

    A dump of several ranks that does not say how many there were (another tool's) has no layout that is known.
    """
    if any(ranks > place.world_size for ranks, place in (a, b)):
        return False
    return layout_of(a[1]) != layout_of(b[1])
