"""Statistics that are more than one number a tensor, on its device: bin counts, exponent counts, quantiles.

An extra is a function from a tensor to a 1-D tensor on the same device; it waits for nothing. `StatsRowsWithExtras` calls the
extras for each row; their results are brought to the host with the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainprobe.engine.arrays.torch_arrays import TorchStatsRows
from trainprobe.engine.arrays.torch_reduce import real_values
from trainprobe.engine.arrays.torch_rows import to_host
from trainprobe.engine.stats.histogram import checked_edges, exponent_range
from trainprobe.engine.stats.quantiles import checked_levels

Extra = Callable[[Tensor], Tensor]


def tally(at: Tensor, bins: int) -> Tensor:
    """Count how often each of 0 … bins - 1 stands in `at`, int64 [bins]; waits for nothing, as bincount does on a device."""
    if at.device.type == "cpu":
        return torch.bincount(at, minlength=bins)
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
        return tally(torch.where(inside, at, bins), bins + 1)[:bins]

    return count


def exponent_counts(t: Tensor) -> Tensor:
    """Count elements by sign and binary exponent, int64 [2 · exponents + 4]; read by ExponentHistogram.from_counts."""
    x = real_values(t)
    lowest, highest = exponent_range(str(t.dtype))
    n = highest - lowest + 1
    exponent = (torch.frexp(x.where(x.isfinite(), 0.0))[1].to(torch.int64) - 1 - lowest).clamp(0, n - 1)
    at = exponent + n * (x > 0)
    for i, special in enumerate((x == 0, x.isnan(), x == torch.inf, x == -torch.inf)):
        at = torch.where(special, 2 * n + i, at)
    return tally(at, 2 * n + 4)


def quantiles(levels: Any) -> Extra:
    """Return the extra that gives quantiles [k]; see engine.stats.quantiles. Sorts: n log n and a copy of the tensor."""
    levels_array = checked_levels(levels)

    def find(t: Tensor) -> Tensor:
        x = real_values(t)
        n = x.numel()
        if n == 0:
            return torch.full((levels_array.size,), torch.nan, dtype=x.dtype, device=x.device)
        ordered = x.sort().values  # NaN last
        place = levels_array * (n - 1)
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


class StatsRowsWithExtras(TorchStatsRows):
    """A row buffer whose rows carry the results of extras too."""

    __slots__ = ("_brought", "_extras", "_results")

    def __init__(self, flags: int, extras: Sequence[Extra], *, native: bool = True) -> None:
        super().__init__(flags, native=native)
        self._extras = tuple(extras)
        self._results: list[list[Tensor]] = []
        self._brought: list[list[npt.NDArray[Any]]] = []

    def add(self, t: Tensor) -> int:
        """Reduce a tensor into a new row, extras included."""
        row = super().add(t)
        if row >= 0:
            with torch.no_grad():
                self._results.append([extra(t.detach()) for extra in self._extras])
        return row

    def blocks(self) -> list[Tensor]:
        """Return what is on devices, the results of the extras last."""
        return [*super().blocks(), *(result for row in self._results for result in row)]

    def drain(
        self, brought: Sequence[npt.NDArray[Any]] | None = None
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.uint64] | None, list[int] | None]:
        """Hand over all rows and start anew; what the extras gave is then there for `drain_extras`."""
        arrays = to_host(self.blocks()) if brought is None else brought
        width, mine = len(self._extras), len(arrays) - sum(map(len, self._results))
        self._brought = [list(arrays[i : i + width]) for i in range(mine, len(arrays), width)]
        self._results = []
        return super().drain(arrays[:mine])

    def drain_extras(self) -> list[list[npt.NDArray[Any]]]:
        """Return the results that `drain` brought: a list a row, an array an extra."""
        return self._brought
