"""Turn the tensors of one family of names into logical ones: pure functions on rectangles, no number is touched.

Each takes a tensor and gives tensors whose pieces point into the same files. A name map (names/*.yaml) says which to apply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from trainprobe.ckpt_compare.pieces import LogicalTensor, Piece, Reshaped, Turned, window
from trainprobe.engine.geometry.fused_rows import Band, bands_of, rows_of_qkv
from trainprobe.errors import CompareError


def split(tensor: LogicalTensor, axis: int, bands: Sequence[Band], parts: int) -> list[LogicalTensor]:
    """Deal the bands of one axis out to `parts` tensors; every index must lie in exactly one band."""
    sizes = [sum(b.size for b in bands if b.part == p) for p in range(parts)]
    if sum(sizes) != tensor.shape[axis]:
        raise CompareError(
            f"{tensor.native or tensor.name} has {tensor.shape[axis]} rows on axis {axis} where {sum(sizes)} are expected: the "
            "number of heads, groups or experts given for this model does not fit"
        )
    dealt: list[list[Piece]] = [[] for _ in range(parts)]
    for piece in tensor.pieces:
        for band in bands:
            cut = _cut(piece, axis, band)
            if cut is not None:
                dealt[band.part].append(cut)
    shape = tensor.shape
    return [
        replace(
            tensor,
            shape=(*shape[:axis], sizes[p], *shape[axis + 1 :]),
            held=tuple(dealt[p]),
            native=tensor.native or tensor.name,
        )
        for p in range(parts)
    ]


def _cut(piece: Piece, axis: int, band: Band) -> Piece | None:
    begin = piece.offset[axis]
    lo, hi = max(begin, band.start), min(begin + piece.shape[axis], band.start + band.size)
    if lo >= hi:
        return None
    cut = tuple(slice(lo - begin, hi - begin) if a == axis else slice(0, n) for a, n in enumerate(piece.shape))
    offset = (*piece.offset[:axis], band.target + lo - band.start, *piece.offset[axis + 1 :])
    return replace(piece, offset=offset, source=window(piece.source, cut))


def unstack(tensor: LogicalTensor) -> list[LogicalTensor]:
    """Give one tensor for each index of the first axis, that axis dropped (stacked layers, stacked experts)."""
    count = tensor.shape[0]
    return [_without_first_axis(t) for t in split(tensor, 0, [Band(i, 1, i, 0) for i in range(count)], count)]


def _without_first_axis(tensor: LogicalTensor) -> LogicalTensor:
    pieces = tuple(replace(p, offset=p.offset[1:], source=Reshaped(p.source, p.shape[1:])) for p in tensor.pieces)
    return replace(tensor, shape=tensor.shape[1:], held=pieces)


def turn(tensor: LogicalTensor, axes: tuple[int, ...] | None = None) -> LogicalTensor:
    """Give the tensor with its axes in another order; by default the last two swapped."""
    n = len(tensor.shape)
    if axes is None:
        if n < 2:
            return tensor
        axes = (*range(n - 2), n - 1, n - 2)
    order = axes

    def reorder(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(values[a] for a in order)

    pieces = tuple(replace(p, offset=reorder(p.offset), source=Turned(p.source, order)) for p in tensor.pieces)
    return replace(tensor, shape=reorder(tensor.shape), held=pieces, native=tensor.native or tensor.name)


def _fused(kind: str, tensor: LogicalTensor, config: Mapping[str, Any]) -> list[LogicalTensor]:
    """Parts that are one tensor elsewhere: see `bands_of`."""
    rows = (0, 0, 1)
    if kind in NEEDS:
        rows = rows_of_qkv(config) if all(config.get(name) for name in NEEDS[kind]) else (*config[QKV_ROWS], 1)
    axis, bands = bands_of(kind, tensor.shape, *rows)
    return split(tensor, axis, bands, 1 + max(band.part for band in bands))


def _rotary_pairs(tensor: LogicalTensor, config: Mapping[str, Any]) -> list[LogicalTensor]:
    """Rows of a head that stand as pairs to be rotated: first all the first ones of pairs, then all the second ones."""
    dim = config["head_dim"]
    if any(piece.offset[0] % dim or piece.shape[0] % dim for piece in tensor.pieces):
        raise CompareError(
            f"{tensor.native or tensor.name} is cut inside a head of {dim} rows: the number of heads given for this model does "
            "not fit"
        )
    return [replace(tensor, held=tuple(_unpaired(piece, dim) for piece in tensor.pieces), native=tensor.native or tensor.name)]


def _unpaired(piece: Piece, dim: int) -> Piece:
    rows, *rest = piece.shape
    pairs = Reshaped(piece.source, (rows // dim, dim // 2, 2, *rest))
    source = Reshaped(Turned(pairs, (0, 2, 1, *range(3, 3 + len(rest)))), piece.shape)
    return replace(piece, source=source)


def _transpose(tensor: LogicalTensor, config: Mapping[str, Any]) -> list[LogicalTensor]:
    """Weights stored as [input, output] (GPT-2's Conv1D)."""
    return [turn(tensor)]


def _by_index(tensor: LogicalTensor, config: Mapping[str, Any]) -> list[LogicalTensor]:
    """Stacked experts: one tensor for each index of the first axis."""
    return unstack(tensor)


def _same(tensor: LogicalTensor, config: Mapping[str, Any]) -> list[LogicalTensor]:
    """Leave the tensor as it is."""
    return [tensor]


Transform = Callable[[LogicalTensor, Mapping[str, Any]], list[LogicalTensor]]
TRANSFORMS: dict[str, Transform] = {
    "same": _same,
    **{kind: partial(_fused, kind) for kind in ("halves", "column_halves", "thirds", "qkv_by_group", "qkv_blocks")},
    "rotary_pairs": _rotary_pairs,
    "transpose": _transpose,
    "by_index": _by_index,
}
QKV_ROWS = "qkv_rows"  # rows of q and of k, as the other checkpoint has them: all that `qkv_blocks` needs
NEEDS: dict[str, tuple[str, ...]] = {
    "qkv_by_group": ("heads", "groups", "head_dim"),
    "qkv_blocks": ("heads", "groups", "head_dim"),
    "rotary_pairs": ("head_dim",),
}


def lacking(transforms: Sequence[str], tensor: LogicalTensor, config: Mapping[str, Any]) -> list[str]:
    """Return what `config` lacks for splitting a tensor by `transforms`."""
    q, kv = config.get(QKV_ROWS) or (0, 0)
    known = ("qkv_blocks",) if q and tensor.shape and tensor.shape[0] == q + 2 * kv else ()
    return [need for by in transforms if by not in known for need in NEEDS.get(by, ()) if not config.get(need)]
