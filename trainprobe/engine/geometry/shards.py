"""Which part of a logical tensor this process holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from trainprobe.engine.core.topology import axis_of
from trainprobe.engine.geometry.rectangles import Rectangle, flat_rectangles


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

    def described(self) -> dict[str, Any]:
        """Return it as a dump has it."""
        told: dict[str, Any] = {"offset": self.offset, "shape": self.shape, "whole": self.whole, "replicas": self.replicas}
        return told if self.within is None else {**told, "within": self.within.described()}


@dataclass(frozen=True, slots=True)
class SavedShard:
    """A piece of a logical tensor, with its share in the fingerprint of the whole."""

    place: int
    """Digest of the rectangle that it is; 0 of the whole."""
    count: int
    """Its elements."""
    whole: int
    """Elements of the logical tensor."""
    share: int
    """Its share in the fingerprint of the logical tensor (`engine.stats.checksum`)."""


ShardOf = Callable[[Any], Shard | None]


def is_cut(shard: Shard) -> bool:
    """Return whether a shard is not all of its tensor."""
    return tuple(shard.shape) != tuple(shard.whole) or (shard.within is not None and is_cut(shard.within))


def rectangles_of(shard: Shard) -> Iterator[tuple[int, Rectangle]]:
    """Yield (first element in the shard, rectangle of the whole tensor): one, or a few of a flat piece of a rectangle."""
    outer = shard.within
    if outer is None:
        yield 0, Rectangle(tuple(shard.offset), tuple(shard.shape))
    elif outer.within is None:
        begin = shard.offset[0]
        for at, inner in flat_rectangles(tuple(outer.shape), begin, begin + shard.shape[0]):
            yield at - begin, inner.moved(outer.offset)


def shards_declared_over(axes: Mapping[str, tuple[int, int]]) -> ShardOf | None:
    """Return what tells which part of the whole a parameter is; None where no parameter can be cut (see `declared_shard`)."""
    return partial(declared_shard, axes=axes) if axes.get("tp", (0, 1))[1] > 1 else None


def declared_shard(parameter: Any, axes: Mapping[str, tuple[int, int]]) -> Shard | None:
    """Return which part of the whole a parameter is that says how it is cut, as Megatron's do; None for one that says nothing.

    That is `tensor_model_parallel`, `partition_dim`, and `partition_stride`: so many blocks, each cut over the ranks.
    axes: parallel axis → (index of this rank, size).
    """
    index, size = axes.get("tp", (0, 1))
    if size == 1:
        return None
    dim = getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else -1
    stride = getattr(parameter, "partition_stride", 1)
    shape = list(parameter.shape)
    if not 0 <= dim < len(shape) or stride < 1 or shape[dim] % stride:
        return None
    if stride > 1:
        shape[dim : dim + 1] = [stride, shape[dim] // stride]
        dim += 1
    offset = tuple(index * n if d == dim else 0 for d, n in enumerate(shape))
    whole = tuple(size * n if d == dim else n for d, n in enumerate(shape))
    return Shard(offset, tuple(shape), whole, tuple(axis for axis in axes if axis not in ("tp", "pp")))


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
