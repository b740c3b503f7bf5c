"""Which rows of a tensor that is one in one family of models belong to which tensor in another: q, k and v, or gate and up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Band:
    """Indices start … start+size−1 on one axis of a tensor, and where they belong: part number and first index in that part."""

    start: int
    size: int
    part: int
    target: int


def interleaved(sizes: Sequence[int], groups: int = 1) -> list[Band]:
    """Return the bands of a tensor of which each group holds an equal share of each part, one part after the other.

    sizes: numbers of rows of the parts. groups: 1 where the parts stand one after the other.
    """
    bands: list[Band] = []
    start = 0
    for group in range(groups):
        for part, size in enumerate(sizes):
            share = size // groups
            bands.append(Band(start, share, part, group * share))
            start += share
    return bands
