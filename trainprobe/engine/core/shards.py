"""Which part of a logical tensor this process holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainprobe.engine.core.topology import axis_of


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a logical tensor that this process holds.

    offset, shape: the rectangle in the global tensor of shape `whole`; a flat piece has one dimension and `whole` = (numel,).
    replicas: axis names over which other processes hold the same rectangle, such as ("dp",) or ("dp", "tp").
    within: for a flat piece of a rectangle that is not the whole tensor: that rectangle; `offset` and `whole` then count its
    elements, row by row.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    replicas: tuple[str, ...] = ()
    within: Shard | None = None


def mesh_shard(t: Any) -> Shard | None:
    """Return the part of a logical tensor that a DTensor holds here, or None for any other tensor. Nothing is communicated.

    A dimension is cut into pieces of equal size, rounded up, as torch cuts it. A strided shard (FSDP2 over tensor parallelism)
    cuts what the other mesh dimensions have left. Mesh dimensions without a known name count as "dp".
    """
    placements, mesh = getattr(t, "placements", None), getattr(t, "device_mesh", None)
    if placements is None or mesh is None or mesh.get_coordinate() is None:
        return None
    axes = [axis_of(name) for name in mesh.mesh_dim_names or ("dp",) * len(placements)]
    cuts = [i for i, placement in enumerate(placements) if hasattr(placement, "dim")]
    at = mesh.get_coordinate()
    offset, shape = cut(
        t.shape, [(placements[i].dim, at[i], mesh.shape[i], hasattr(placements[i], "split_factor")) for i in cuts]
    )
    split = {axes[i] for i in cuts if mesh.shape[i] > 1}
    return Shard(offset, shape, tuple(t.shape), tuple(axis for axis in axes if axis not in split))


def cut(whole: Sequence[int], cuts: Sequence[tuple[int, int, int, bool]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where the part of a tensor of shape `whole` begins and how far it reaches.

    cuts: (dimension, index, number of parts, strided) for each mesh dimension that cuts; strided ones cut what the others left.
    """
    offset, shape = [0] * len(whole), list(whole)
    for dim, index, parts, _ in sorted(cuts, key=lambda each: each[3]):
        size = -(-shape[dim] // parts)
        begin = min(index * size, shape[dim])
        offset[dim] += begin
        shape[dim] = min(size, shape[dim] - begin)
    return tuple(offset), tuple(shape)
