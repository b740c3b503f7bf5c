"""Where in a tensor the wrong elements lie, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

MOST = 20  # elements that are listed
Element = tuple[tuple[int, ...], float, float]  # its place, what is there and what belongs there


def pattern(wrong: torch.Tensor) -> str:
    """Return `, all in …` for a bool tensor whose true elements share a place, an empty string where they do not."""
    if wrong.ndim == 0 or not bool(wrong.any()) or bool(wrong.all()):
        return ""
    places = wrong.nonzero()
    if len(places) == 1:
        return f", at {[*places[0].tolist()]}"
    found: list[str] = []
    for dim, size in enumerate(wrong.shape):
        if size < 2:
            continue
        used = places[:, dim].unique().tolist()
        if len(used) == 1:
            last = ", the last one" if used[0] == size - 1 else ""
            found.append(f"index {used[0]} of dimension {dim}{last}")
        elif len(used) < size and used[-1] == size - 1 and used == [*range(used[0], size)]:
            found.append(f"the last {len(used)} of {size} along dimension {dim}")
        elif len(used) < size and used[0] == 0 and used == [*range(len(used))]:
            found.append(f"the first {len(used)} of {size} along dimension {dim}")
        elif len(used) > 2 and len({b - a for a, b in pairwise(used)}) == 1 and used[1] - used[0] > 1:
            found.append(f"every {used[1] - used[0]}th place of dimension {dim}")
        elif set(used) == {0, size - 1}:
            found.append(f"the border of dimension {dim}")
    return f", all in {' and '.join(found)}" if found else ""


def furthest(y: torch.Tensor, want: torch.Tensor) -> tuple[Element, ...]:
    """Return the elements of two tensors of one shape that are furthest apart."""
    parts = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (y, want))
    got, r = (t.reshape(-1).to(torch.float64) for t in parts)
    apart = torch.where((got == r) | (got.isnan() & r.isnan()), -1.0, (got - r).abs().nan_to_num(math.inf, math.inf))
    worst = apart.topk(min(MOST, len(apart)))
    shape = (*y.shape, 2) if y.is_complex() else y.shape
    places = [place_of(int(i), shape) for i in worst.indices[worst.values >= 0]]
    return tuple((at, float(got[i]), float(r[i])) for at, i in zip(places, worst.indices.tolist(), strict=False))


def place_of(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the place of an element of a tensor of this shape, from its number in order."""
    return tuple(map(int, np.unravel_index(index, tuple(shape))))
