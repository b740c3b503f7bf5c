"""Statistics that are more than one number a tensor, on its device: bin counts, exponent counts, quantiles.

An extra is a function from a tensor to a 1-D tensor on the same device; it waits for nothing. `StripWithExtras` calls the
extras for each row and brings their results to the host in one transfer a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainprobe.engine.arrays.torch_arrays import TorchStrip
from trainprobe.engine.arrays.torch_reduce import accumulator, real_values
from trainprobe.engine.stats.histogram import checked_edges, exponent_range
from trainprobe.engine.stats.quantiles import checked_levels

Extra = Callable[[Tensor], Tensor]


def _tally(at: Tensor, bins: int) -> Tensor:
    """Count how often each of 0 … bins - 1 stands in `at`, int64 [bins]; unlike bincount it waits for nothing."""
    return torch.zeros(bins, dtype=torch.int64, device=at.device).scatter_add_(0, at, torch.ones_like(at))


def bin_counts(edges: Any) -> Extra:
    """Return the extra that counts elements per bin, int64 [bins]; see engine.stats.histogram.bin_counts."""
    bounds = checked_edges(edges)

    def count(t: Tensor) -> Tensor:
        x = real_values(t)
        limits = torch.tensor(bounds, dtype=x.dtype).to(x.device, non_blocking=True)
        bins = limits.numel() - 1
        at = (torch.bucketize(x, limits, right=True) - 1).clamp(max=bins - 1)
        inside = (x >= limits[0]) & (x <= limits[-1])
        return _tally(torch.where(inside, at, bins), bins + 1)[:bins]

    return count


def exponent_counts(t: Tensor) -> Tensor:
    """Count elements by sign and binary exponent, int64 [2 · exponents + 4]; read by ExponentHistogram.from_counts."""
    x = real_values(t)
    lowest, highest = exponent_range(str(t.dtype))
    n = highest - lowest + 1
    exponent = (torch.frexp(x.where(x.isfinite(), 0.0))[1].to(torch.int64) - 1 - lowest).clamp(0, n - 1)
    at = exponent + n * (x > 0)
    for i, odd in enumerate((x == 0, x.isnan(), x == torch.inf, x == -torch.inf)):
        at = torch.where(odd, 2 * n + i, at)
    return _tally(at, 2 * n + 4)


def quantiles(levels: Any) -> Extra:
    """Return the extra that gives quantiles [k]; see engine.stats.quantiles. Sorts: n log n and a copy of the tensor."""
    wanted = checked_levels(levels)

    def find(t: Tensor) -> Tensor:
        x = real_values(t)
        n = x.numel()
        if n == 0:
            return torch.full((wanted.size,), torch.nan, dtype=x.dtype, device=x.device)
        ordered = x.sort().values  # NaN last
        place = wanted * (n - 1)
        below = np.minimum(np.floor(place), n - 1).astype(np.int64)
        low = torch.stack([ordered[i] for i in below.tolist()])
        high = torch.stack([ordered[min(i + 1, n - 1)] for i in below.tolist()])
        share = torch.tensor(place - below, dtype=x.dtype).to(x.device, non_blocking=True)
        step = high - low
        # as NumPy: from the nearer end, so that the value at a level of 1 is the maximum itself
        value = torch.where(share >= 0.5, high - step * (1 - share), low + step * share)
        value = torch.where(low == high, low, value)
        return torch.where(ordered[-1].isnan(), torch.nan, value)

    return find


def to_host(tensors: Sequence[Tensor]) -> list[npt.NDArray[np.float64]]:
    """Bring tensors to the host, in one transfer a device, each flattened to float64 [k] (counts below 2^53 exact)."""
    host: dict[int, npt.NDArray[np.float64]] = {}
    for device in dict.fromkeys(t.device for t in tensors):
        here = [i for i, t in enumerate(tensors) if t.device == device]
        whole = torch.cat([tensors[i].detach().reshape(-1).to(accumulator(device)) for i in here])
        ends = np.cumsum([tensors[i].numel() for i in here])[:-1]
        host.update(zip(here, np.split(whole.cpu().numpy().astype(np.float64), ends), strict=True))
    return [host[i] for i in range(len(tensors))]


class StripWithExtras(TorchStrip):
    """A strip whose rows carry the results of extras too."""

    __slots__ = ("_extras", "_results")

    def __init__(self, flags: int, extras: Sequence[Extra], *, native: bool = True) -> None:
        super().__init__(flags, native=native)
        self._extras = tuple(extras)
        self._results: list[list[Tensor]] = []

    def add(self, t: Tensor) -> int:
        """Reduce a tensor into a new row, extras included."""
        row = super().add(t)
        if row >= 0:
            with torch.no_grad():
                self._results.append([extra(t.detach()) for extra in self._extras])
        return row

    def harvest_extras(self) -> list[list[npt.NDArray[np.float64]]]:
        """Bring the results to the host, one transfer a device: a list a row, an array an extra (counts below 2^53 exact)."""
        flat = [result for row in self._results for result in row]
        host = to_host(flat)
        self._results = []
        width = len(self._extras)
        return [[host[i] for i in range(start, start + width)] for start in range(0, len(flat), width)]
