"""Where in a tensor the wrong elements lie, in words."""

from __future__ import annotations

from itertools import pairwise

import torch


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
