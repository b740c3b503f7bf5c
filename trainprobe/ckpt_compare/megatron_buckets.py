"""The buckets of Megatron's distributed optimizer: which elements of a flat buffer belong to which parameter.

Geometry of `megatron.core.distributed.param_and_grad_buffer._ParamAndGradBuffer`: parameters backwards, each beginning at a
multiple of 64 elements; a bucket is closed once it holds `bucket_size` elements, and begins at a multiple of 128; an embedding
that two pipeline stages share has a bucket of its own. Files hold each bucket up to its last parameter, without what fills it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from trainprobe.engine.geometry.rectangles import Point

ALIGNMENT = 64  # elements


def bucket_places(shapes: Sequence[Point], sizes: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return (bucket, first element in it) of each parameter where buckets of these sizes hold exactly them, else None."""
    places = [(0, 0)] * len(shapes)
    bucket = at = 0
    for i in reversed(range(len(shapes))):
        if bucket < len(sizes) and sizes[bucket] in (at, _aligned(at)):
            bucket, at = bucket + 1, 0
        at = _aligned(at)
        if bucket == len(sizes) or at + prod(shapes[i]) > sizes[bucket]:
            return None
        places[i] = (bucket, at)
        at += prod(shapes[i])
    return places if bucket == len(sizes) - 1 and at == sizes[bucket] else None


def likely_buckets(shapes: Sequence[Point], shared: Sequence[bool], config: Mapping[str, Any]) -> Iterator[list[int]]:
    """Yield the sizes that the buckets may have had, where a file does not state them: in one bucket, or cut as configured.

    shared: of each parameter, whether two pipeline stages share it. config: `bucket_size` and `dp` where known.
    """
    default = max(40_000_000, 1_000_000 * int(config.get("dp") or 1))  # as Megatron-LM chooses
    for limit in dict.fromkeys((None, config.get("bucket_size"), default)):
        for alone in (shared, [False] * len(shapes)):
            yield _cut(shapes, alone, limit)


def _cut(shapes: Sequence[Point], alone: Sequence[bool], limit: int | None) -> list[int]:
    sizes: list[int] = []
    at = 0
    for i in reversed(range(len(shapes))):
        if alone[i] and at:
            sizes.append(_aligned(at))
            at = 0
        at = _aligned(at) + prod(shapes[i])
        if alone[i] or (limit is not None and at >= limit):
            sizes.append(at)
            at = 0
    return [*sizes, at] if at else sizes


def _aligned(at: int) -> int:
    return -(-at // ALIGNMENT) * ALIGNMENT


def coalesced_starts(shapes: Sequence[Point], size: int, candidates: Iterator[list[int]]) -> list[int] | None:
    """Return the first element of each parameter in a buffer of `size` elements whose buckets follow each other closely."""
    for sizes in candidates:
        places = bucket_places(shapes, sizes) if sum(sizes) == size else None
        if places is not None:
            return [sum(sizes[:bucket]) + start for bucket, start in places]
    return None
