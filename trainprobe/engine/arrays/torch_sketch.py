"""Two sums of a tensor that tell a rounding from another value, where its fingerprint says only that bits differ."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from trainprobe.engine.arrays.torch_arrays import TorchStatsRows
from trainprobe.engine.arrays.torch_checksum import hashed
from trainprobe.engine.arrays.torch_rows import to_host
from trainprobe.engine.geometry.shards import Shard
from trainprobe.engine.stats.checksum import MASK
from trainprobe.engine.stats.partials import CHECKSUM

_CHUNK = 1 << 18  # elements, at least a row
_ROWS = 1 << 40  # the numbers of rows begin here, so that no row has the sign of a column


def sums_of(t: Tensor, shard: Shard) -> Tensor:
    """Return Σ r(i)·x_ij·c(j) and Σ x_ij², float64 [2] on the tensor's device; waits for nothing.

    i is an index of the first dimension of the whole tensor, j the place in the others, row by row. c(j) is 1 − 2 times the
    lowest bit of K(j) of the fingerprint, and r(i) that of K(2^40 + i). Both sums add up over shards that cover the whole once.
    shard: without `within`.
    """
    with torch.no_grad():
        t = t.detach()
        offset, whole = (shard.offset, shard.whole) if t.dim() else ((0,), (1,))
        t = t if t.dim() else t.reshape(1)
        total = torch.zeros(2, dtype=torch.float64, device=t.device)
        if not t.numel():
            return total
        axes = tuple(zip(t.shape[1:], offset[1:], whole[1:], strict=True))
        across, along = _signs(axes, 0, t.device), _signs(((t.shape[0], offset[0], 0),), _ROWS, t.device)
        step = max(1, _CHUNK // len(across))
        narrow = torch.float64 if t.dtype == torch.float64 else torch.float32  # a row's sum is within 1e-7 of its norm
        across = across.to(narrow)
        for begin in range(0, t.shape[0], step):
            x = t[begin : begin + step].reshape(-1, len(across)).to(narrow)
            squares = torch.linalg.vector_norm(x, dim=1).to(torch.float64).square().sum()
            total += torch.stack([along[begin : begin + step] @ (x @ across).to(torch.float64), squares])
        return total


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
    rows = TorchStatsRows(CHECKSUM)
    placed = [rows.add_share(t, shard) for t, shard in pieces]
    sums = to_host([sums_of(t, shard) for (t, shard), at in zip(pieces, placed, strict=True) if at])
    _, shares, _ = rows.drain()
    both, found = iter(sums), list[tuple[int, float, float] | None]()
    for at in placed:
        if not at or shares is None:
            found.append(None)
            continue
        signed, squares = next(both).tolist()
        found.append((sum(int(shares[row]) for row in at) & MASK, signed, squares))
    return found
