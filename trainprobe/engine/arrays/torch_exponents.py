"""Counts the magnitudes of many tensors in the bins of `engine.stats.exponents`: one row of counts a tensor.

What is to be counted is copied into a room first, so that many small tensors cost as many operations as one. No device is
waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainprobe.engine.arrays.torch_extras import tally
from trainprobe.engine.arrays.torch_reduce import accumulator
from trainprobe.engine.stats.exponents import ExponentBins

_ROOM, _ROOM_ON_HOST = 1 << 20, 1 << 16  # elements: what keeps an accelerator busy, and what a processor's cache holds
Spread = Callable[[Any], Any]
Exceeding = Callable[[Any, Any, Spread], Iterable[Any]]


class CountedMagnitudes:
    """Tensors of one device; on the host `OnHost` is faster.

    dtype: float32, or float64 for tensors of that dtype. limits: how many there are. exceeding: given magnitudes [n] of some
    tensors, the largest finite magnitude of each of those [rows] where `largest` asks for it, and a function that spreads
    [rows] over [n], returns for each limit which magnitudes are at or above it, bool [n].
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, limits: int, exceeding: Exceeding, largest: bool = False
    ) -> None:
        self.bins = ExponentBins(str(dtype).rpartition(".")[2], limits)
        self._exceeding = exceeding
        self._largest: list[Tensor] | None = [] if largest else None
        self._rows = 0
        self._room = torch.empty(_ROOM_ON_HOST if device.type == "cpu" else _ROOM, dtype=dtype, device=device)
        self._filled = 0
        self._waiting: list[tuple[int, int]] = []  # row, how many of its elements are in the room
        self._blocks: list[Tensor] = []
        self._begun = -1  # the last row that was counted

    def add(self, t: Tensor) -> int:
        """Count the magnitudes of a tensor of floating-point numbers, one or more, in a new row; return its number."""
        flat = self._flat(t)
        row, start, size, n = self._rows, 0, len(self._room), len(flat)
        self._rows += 1
        if self._largest is not None:
            self._largest.append(self._largest_finite([flat[i : i + size] for i in range(0, n, size)]))
        while start < n:
            taken = min(n - start, size - self._filled)
            self._take(flat if taken == n else flat[start : start + taken], self._filled)
            self._waiting.append((row, taken))
            self._filled += taken
            start += taken
            if self._filled == size:
                self._empty_room()
        return row

    def counts(self) -> Tensor:
        """Return the counts of all rows, int64 [rows, bins]."""
        self._empty_room()
        return torch.cat(self._blocks)

    def largest(self) -> Tensor | None:
        """Return the largest finite magnitude of each row, [rows], where it was asked for."""
        return torch.stack(self._largest) if self._largest else None

    def _flat(self, t: Tensor) -> Any:
        """Return the elements of a tensor, [n]."""
        return t.detach().resolve_neg().reshape(-1)

    def _take(self, piece: Any, start: int) -> None:
        """Copy elements [n] to this place in the room."""
        self._room[start : start + len(piece)].copy_(piece)

    def _largest_finite(self, pieces: Sequence[Any]) -> Tensor:
        """Return the largest finite magnitude of a tensor in pieces, 0 where there is none, []."""
        magnitudes = (piece.to(self._room.dtype).abs() for piece in pieces)
        return torch.stack([x.where(x < torch.inf, 0.0).amax() for x in magnitudes]).amax()

    def _empty_room(self) -> None:
        if not self._waiting:
            return
        (first, _), (last, _) = self._waiting[0], self._waiting[-1]
        largest = None if self._largest is None else torch.stack(self._largest[first : last + 1])
        counts = self._count(self._room[: self._filled], [length for _, length in self._waiting], largest)
        if first == self._begun:
            self._blocks[-1][-1] += counts[0]
            counts = counts[1:]
        if len(counts):
            self._blocks.append(counts)
        self._begun, self._filled, self._waiting = last, 0, []

    def _count(self, x: Tensor, lengths: list[int], largest: Tensor | None) -> Tensor:
        """Count the elements of tensors that lie one after the other, [rows, bins]; x may be written to."""
        bins, rows, n, device = self.bins.bins, len(lengths), x.numel(), x.device
        repeats = torch.tensor(lengths).to(device, non_blocking=True)

        def spread(numbers: Tensor) -> Tensor:
            return numbers.repeat_interleave(repeats, output_size=n)

        x = x.abs_().nan_to_num_(nan=0.0, posinf=torch.inf)
        passed = torch.zeros(n, dtype=torch.uint8, device=device)
        for above in self._exceeding(x, largest, spread):
            passed.add_(above.view(torch.uint8))
        at = exponent_bins_of(x, self.bins).add_(passed)
        if rows > 1:
            at.add_(spread(torch.arange(0, rows * bins, bins).to(device, non_blocking=True)))
        return tally(at, rows * bins).view(rows, bins)


class OnHost(CountedMagnitudes):
    """Tensors on the host, counted by NumPy, whose comparisons are ten times as fast there as torch's."""

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self._array: npt.NDArray[Any] = self._room.numpy()

    def _flat(self, t: Tensor) -> Any:
        plain = t.detach() if t.dtype == self._room.dtype and not t.is_neg() else t.detach().resolve_neg().to(self._room.dtype)
        return plain.numpy().reshape(-1)

    def _take(self, piece: Any, start: int) -> None:
        np.abs(piece, out=self._array[start : start + piece.size])

    def _largest_finite(self, pieces: Sequence[Any]) -> Tensor:
        largest = [x.max() if np.isfinite(x.max()) else x.max(where=x < np.inf, initial=0.0) for x in map(np.abs, pieces)]
        return torch.from_numpy(np.asarray(max(largest)))

    def _count(self, x: Tensor, lengths: list[int], largest: Tensor | None) -> Tensor:
        array = self._array[: len(x)]
        if np.isnan(array.max()):
            array[np.isnan(array)] = 0.0
        passed = np.zeros(array.size, np.uint8)
        numbers = None if largest is None else largest.numpy()
        for above in self._exceeding(array, numbers, lambda each: np.repeat(each, lengths)):
            passed += above.view(np.uint8)
        at = self.bins.exponents(array)
        at += passed
        bins, rows = self.bins.bins, len(lengths)
        begins = np.arange(rows, dtype=np.int16 if rows * bins < 1 << 15 else np.int32) * bins
        return tally(torch.from_numpy(at + np.repeat(begins, lengths)), rows * bins).view(rows, bins)


def exponent_bins_of(x: Tensor, bins: ExponentBins) -> Tensor:
    """Return the exponent numbers of magnitudes without NaN, float32 or float64 [n], as int64 [n]."""
    if x.dtype == torch.float32 and accumulator(x.device) == torch.float64:
        bits = x.double().view(torch.int64)  # where no number of float32 is subnormal
        return bits.bitwise_right_shift_(52).sub_(1022 + bins.lowest).clamp_(0, bins.last)
    finite = x < torch.inf
    exponent = torch.frexp(x.where(finite, 0.0))[1].to(torch.int64) - bins.lowest
    return torch.where(finite, torch.where(x == 0, 0, exponent), bins.last)
