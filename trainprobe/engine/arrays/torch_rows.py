"""Rows of partials that wait on a device until one transfer brings them all to the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainprobe.engine.arrays.torch_reduce import CRC32, accumulator, reduce_tensor
from trainprobe.engine.arrays.torch_words import crc32_on_host, crc32_register
from trainprobe.engine.stats.partials import PARTIALS

_ROOM = 512
_WIDTH = len(PARTIALS)


class DeviceRows:
    """The rows of one device: int64 [_ROOM, 14] chunks that hold the bits of the partials, the fingerprint and the CRC-32."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wide = accumulator(device)
        self._bits = torch.int64 if self._wide == torch.float64 else torch.int32
        self._filled: list[Tensor] = []
        self._n = 0

    def add(self, t: Tensor, flags: int) -> int:
        """Reduce a tensor into a new row and return its number; nothing is waited for."""
        at = self._n % _ROOM
        if at == 0:
            self._filled.append(torch.zeros((_ROOM, _WIDTH + 2), dtype=torch.int64, device=self._device))
        row, checksum = reduce_tensor(t, flags)
        with torch.no_grad():
            target = self._filled[-1][at]
            target[:_WIDTH].copy_(row.view(self._bits))
            if checksum is not None:
                target[_WIDTH].copy_(checksum)
            if flags & CRC32:
                target[_WIDTH + 1] = self._crc32(t)
        self._n += 1
        return self._n - 1

    def _crc32(self, t: Tensor) -> Tensor | int:
        return crc32_on_host(t) if self._device.type == "cpu" else crc32_register(t)

    def take(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.uint64], list[int]]:
        """Bring the rows to the host: float64 [n, 12], uint64 [n], and their CRC-32."""
        if not self._filled:
            return np.zeros((0, _WIDTH)), np.zeros(0, np.uint64), []
        whole = self._filled[0] if len(self._filled) == 1 else torch.cat(self._filled)
        host = whole.cpu().numpy()[: self._n]
        bits = np.ascontiguousarray(host[:, :_WIDTH])
        partials = (
            bits.view(np.float64) if self._bits == torch.int64 else bits.astype(np.int32).view(np.float32).astype(np.float64)
        )
        return partials, np.ascontiguousarray(host[:, _WIDTH]).view(np.uint64), host[:, _WIDTH + 1].tolist()
