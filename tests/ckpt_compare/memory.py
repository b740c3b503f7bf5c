"""Checkpoints that live in memory, cut into rectangles at will: what formats give, without files."""

from __future__ import annotations

import numpy as np

from trainprobe.ckpt_compare.pieces import Checkpoint, LogicalTensor, Piece, Problem
from trainprobe.ckpt_compare.storage.mapped import HeldArray
from trainprobe.engine.compare.number_formats import number_format


def held(array: np.ndarray, dtype: str | None = None) -> HeldArray:
    """Wrap an array of bits as a source."""
    return HeldArray(array, number_format(dtype or array.dtype.name))


def tensor(name: str, array: np.ndarray, boxes=None, *, slot: str = "", dtype: str | None = None, **more) -> LogicalTensor:
    """Cut an array into the given (offset, shape) boxes, or leave it whole."""
    boxes = boxes if boxes is not None else [((0,) * array.ndim, array.shape)]
    pieces = tuple(
        Piece(
            tuple(o), held(array[tuple(slice(b, b + n) for b, n in zip(o, s, strict=True))].copy(), dtype), f"rank {i}: {name}"
        )
        for i, (o, s) in enumerate(boxes)
    )
    return LogicalTensor(name, array.shape, pieces, slot, **more)


def checkpoint(*tensors: LogicalTensor, problems: tuple[Problem, ...] = (), **more) -> Checkpoint:
    """Gather tensors into a checkpoint."""
    return Checkpoint("memory", "memory", {t.key: t for t in tensors}, problems=problems, **more)


def dense(tensor: LogicalTensor) -> np.ndarray:
    """Put a small logical tensor together, for oracles only."""
    out = np.zeros(tensor.shape, tensor.format.storage)
    for piece in tensor.pieces:
        out[piece.rectangle.within((0,) * len(tensor.shape))] = piece.source.load()
    return out
