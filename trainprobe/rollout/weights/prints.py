"""`fingerprints(model)`: sixteen bytes for each piece of each logical tensor that a process holds; sums are the whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainprobe.engine.core.sources import Source
from trainprobe.engine.geometry.shards import Shard, is_cut
from trainprobe.engine.stats.checksum import MASK
from trainprobe.errors import UsageError
from trainprobe.rollout.weights.logical import HeldPiece, held_pieces

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape of a piece in its logical tensor
Print = tuple[int, float, float]  # share in the fingerprint, signed sum, sum of squares (the last two as float32)


@dataclass(frozen=True, slots=True)
class WeightPrint:
    """What is known of one logical tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: str
    """Number format, such as `bfloat16`."""
    pieces: Mapping[Box, Print] = field(default_factory=dict[Box, Print])
    """The pieces that were seen."""
    base: int | None = None
    """The fingerprint without the adapter, of a weight that has one and is whole here."""
    disagree: bool = False
    """Whether two ranks hold other bits of the same piece."""

    @property
    def fingerprint(self) -> int:
        """The share of all pieces in the fingerprint of the whole tensor; that of the whole where `complete`."""
        return sum(p[0] for p in self.pieces.values()) & MASK

    @property
    def sums(self) -> tuple[float, float]:
        """The signed sum and the sum of squares."""
        return math.fsum(p[1] for p in self.pieces.values()), math.fsum(p[2] for p in self.pieces.values())

    @property
    def complete(self) -> bool:
        """Whether the pieces are all elements."""
        return sum(math.prod(shape) for _, shape in self.pieces) == math.prod(self.shape)


def fingerprints(
    model: Any, *, source: Source | None = None, config: Mapping[str, Any] | None = None, dtype: str | None = None
) -> dict[str, WeightPrint]:
    """Return logical name → fingerprint, shape and dtype of what this process holds of a model. Nothing is gathered.

    source: where a framework keeps its parameters (DeepSpeed, Megatron); None for modules, DTensors and PEFT's adapters.
    config: `heads`, `groups` and `head_dim` of a model that does not say them, for fused attention. dtype: the number format
    that is sent, such as "bfloat16", where that is not the one that is held. Raises UsageError for a dtype that is none.
    """
    return prints_of_pieces(held_pieces(model, source, config), dtype)


def prints_of_pieces(pieces: Iterable[HeldPiece], dtype: str | None = None) -> dict[str, WeightPrint]:
    """Return the fingerprints of pieces."""
    from trainprobe.engine.arrays.torch_sketch import prints_of

    sent = [piece._replace(tensor=_cast(piece.tensor, dtype)) for piece in pieces if piece.tensor.numel()]
    prints = prints_of([(piece.tensor, piece.shard) for piece in sent])
    whole = [piece for piece in sent if piece.base is not None and not is_cut(piece.shard)]
    without = prints_of([(_cast(p.base, dtype), p.shard) for p in whole])
    bases = {piece.name: each[0] for piece, each in zip(whole, without, strict=True) if each is not None}
    found: dict[str, WeightPrint] = {}
    for piece, each in zip(sent, prints, strict=True):
        box = (tuple(piece.shard.offset), tuple(piece.shard.shape))
        one = {} if each is None else {box: (each[0], float(np.float32(each[1])), float(np.float32(each[2])))}
        kind = str(piece.tensor.dtype).removeprefix("torch.")
        made = WeightPrint(tuple(piece.shard.whole), kind, one, bases.get(piece.name))
        found[piece.name] = made if piece.name not in found else _sum(found[piece.name], made)
    return found


def joined(ranks: Sequence[Mapping[str, WeightPrint]]) -> dict[str, WeightPrint]:
    """Return the fingerprints of all ranks together; a piece that several ranks hold counts once."""
    found: dict[str, WeightPrint] = {}
    for rank in ranks:
        for name, each in rank.items():
            found[name] = each if name not in found else _sum(found[name], each)
    return found


def _sum(a: WeightPrint, b: WeightPrint) -> WeightPrint:
    unlike = any(a.pieces[box][0] != b.pieces[box][0] for box in a.pieces.keys() & b.pieces.keys())
    base = a.base if a.base is not None else b.base
    return WeightPrint(a.shape, a.dtype, {**a.pieces, **b.pieces}, base, a.disagree or b.disagree or unlike)


def share_of_box(tensor: Any, box: Box, whole: tuple[int, ...]) -> int | None:
    """Return the share of one piece of a whole tensor in its fingerprint; None where it cannot be looked at."""
    from trainprobe.engine.arrays.torch_sketch import prints_of

    offset, shape = box
    part = tensor[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
    found = prints_of([(part, Shard(offset, shape, whole))])[0]
    return None if found is None else found[0]


def _cast(tensor: Any, dtype: str | None) -> Any:
    if dtype is None or not tensor.is_floating_point():
        return tensor
    cast = getattr(tensor, dtype.replace("float32", "float").replace("float16", "half").replace("bhalf", "bfloat16"), None)
    if cast is None or dtype not in ("float32", "float16", "bfloat16", "float64"):
        raise UsageError(f"dtype {dtype!r} is not known: give float32, bfloat16, float16 or None")
    return cast() if dtype != "float64" else tensor.double()


def as_json(prints: Mapping[str, WeightPrint]) -> dict[str, Any]:
    """Return fingerprints as JSON values."""
    return {
        name: {
            "shape": each.shape,
            "dtype": each.dtype,
            "base": None if each.base is None else f"{each.base:016x}",
            "pieces": [[*box, f"{share:016x}", signed, squares] for box, (share, signed, squares) in each.pieces.items()],
        }
        for name, each in prints.items()
    }


def from_json(document: Any) -> dict[str, WeightPrint]:
    """Return what `as_json` wrote. Raises ValueError, TypeError or KeyError for anything else."""
    found: dict[str, WeightPrint] = {}
    for name, each in document.items():
        pieces: dict[Box, Print] = {
            (tuple(map(int, offset)), tuple(map(int, shape))): (int(share, 16), float(signed), float(squares))
            for offset, shape, share, signed, squares in each["pieces"]
        }
        base = None if each["base"] is None else int(each["base"], 16)
        found[str(name)] = WeightPrint(tuple(map(int, each["shape"])), str(each["dtype"]), pieces, base)
    return found
