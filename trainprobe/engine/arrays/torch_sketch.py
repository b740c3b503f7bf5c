"""Two sums of a tensor that tell a rounding from another value, where its fingerprint says only that bits differ."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from trainprobe.engine.arrays.torch_arrays import TorchStatsRows
from trainprobe.engine.arrays.torch_checksum import hashed
from trainprobe.engine.arrays.torch_rows import to_host
from trainprobe.engine.geometry.shards import Shard
from trainprobe.engine.stats.checksum import MASK
from trainprobe.engine.stats.partials import CHECKSUM, STATS, column, finite_count

_CHUNK = 1 << 18  # elements, at least a row
_ROWS = 1 << 40  # the numbers of rows begin here, so that no row has the sign of a column


def signed_sum(t: Tensor, shard: Shard) -> Tensor:
    """Return Σ r(i)·x_ij·c(j), float64 [] on the tensor's device; waits for nothing.

    i is an index of the first dimension of the whole tensor, j the place in the others, row by row. c(j) is 1 − 2 times the
    lowest bit of K(j) of the fingerprint, and r(i) that of K(2^40 + i). The sums of shards that cover the whole once add up to
    its own. shard: without `within`.
    """
    with torch.no_grad():
        t = t.detach()
        offset, whole = (shard.offset, shard.whole) if t.dim() else ((0,), (1,))
        t = t if t.dim() else t.reshape(1)
        axes = tuple(zip(t.shape[1:], offset[1:], whole[1:], strict=True))
        narrow = torch.float64 if t.dtype == torch.float64 else torch.float32  # a row's sum is within 1e-7 of its norm
        across = _signs(axes, 0, t.device).to(narrow)
        along = _signs(((t.shape[0], offset[0], 0),), _ROWS, t.device)
        copied = t.dtype != narrow or not t.is_contiguous()
        step = max(1, _CHUNK // max(1, len(across)) if copied else len(t))
        parts = [
            along[at : at + step] @ (t[at : at + step].reshape(-1, len(across)).to(narrow) @ across).to(torch.float64)
            for at in range(0, t.shape[0] if t.numel() else 0, step)
        ]
        return parts[0] if len(parts) == 1 else sum(parts, torch.zeros((), dtype=torch.float64, device=t.device))


def _signs(axes: tuple[tuple[int, int, int], ...], begin: int, device: torch.device) -> Tensor:
    """Return ±1 for the places of a box, float64 [n]. axes: size, start and size of the whole of each. begin: is added."""
    small = math.prod(size for size, _, _ in axes) <= _CHUNK
    return (_made_signs if small else _made_signs.__wrapped__)(axes, begin, device)


@lru_cache(64)  # the same at each push, and of most tensors of a model
def _made_signs(axes: tuple[tuple[int, int, int], ...], begin: int, device: torch.device) -> Tensor:
    place = torch.zeros((), dtype=torch.int64, device=device)
    for size, start, width in axes:
        place = place.unsqueeze(-1) * width + torch.arange(start, start + size, device=device)
    return 1.0 - 2.0 * (hashed(place.reshape(-1) + begin) & 1).to(torch.float64)


def prints_of(pieces: list[tuple[Tensor, Shard]]) -> list[tuple[int, float, float] | None]:
    """Return (share in the fingerprint, signed sum, sum of squares) of each piece, read in one transfer a device.

    None for a tensor that cannot be looked at.
    """
    rows, placed, signed = TorchStatsRows(CHECKSUM | STATS), list[list[int]](), list[Tensor]()
    for t, shard in pieces:  # both at once, while it is in the cache
        placed.append(rows.add_share(t, shard))
        signed += [signed_sum(t, shard)] if placed[-1] else []
    sums = iter(to_host(signed))
    partials, shares, _ = rows.drain()
    squares = np.ldexp(column(partials, "sumsq"), 2 * column(partials, "exponent").astype(int))
    squares[finite_count(partials) < column(partials, "count")] = np.nan
    assert shares is not None
    return [
        (sum(int(shares[row]) for row in at) & MASK, next(sums).item(), float(squares[at].sum())) if at else None
        for at in placed
    ]
