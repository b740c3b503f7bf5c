"""Which rows of a tensor that is one in one family of models belong to which tensor in another: q, k and v, or gate and up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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


def bands_of(kind: str, shape: Sequence[int], q: int = 0, kv: int = 0, groups: int = 1) -> tuple[int, list[Band]]:
    """Return the axis on which a tensor of some shape is fused, and the bands of its parts. kind: as name maps have it.

    halves: gate above up, of the whole tensor and not of a rank's; of more than two axes on the last but one. column_halves:
    the same on the last axis, for weights stored as [input, 2 · ffn]. thirds: all q, all k, all v. qkv_blocks: the same with q
    rows of queries and kv rows of keys. qkv_by_group: heads / groups queries, one key and one value of each query group.
    """
    if kind in ("qkv_by_group", "qkv_blocks"):
        return 0, interleaved([q, kv, kv], groups if kind == "qkv_by_group" else 1)
    parts = 3 if kind == "thirds" else 2
    axis = {"column_halves": len(shape) - 1, "halves": max(0, len(shape) - 2) if len(shape) > 2 else 0}.get(kind, 0)
    return axis, interleaved([shape[axis] // parts] * parts)


def rows_of_qkv(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the rows of the queries, those of the keys, and the number of query groups, of heads, groups and head_dim."""
    heads, groups, dim = (config[name] for name in ("heads", "groups", "head_dim"))
    return heads // groups * groups * dim, groups * dim, groups
