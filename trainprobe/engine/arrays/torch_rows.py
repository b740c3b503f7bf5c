"""Rows of partials that wait on a device until one transfer brings them all to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainprobe.engine.arrays.torch_checksum import crc32_on_host, crc32_register, share_of
from trainprobe.engine.arrays.torch_reduce import accumulator, write_rows
from trainprobe.engine.arrays.triton_rows import TritonRows, kernels_of
from trainprobe.engine.geometry.shards import Shard
from trainprobe.engine.stats.partials import CHECKSUM, CRC32, PARTIALS, STATS

_ROOM = 512
_WIDTH = len(PARTIALS)
_BYTES = 8 * (_WIDTH + 2)  # of a row


class DeviceRows:
    """The rows of one device: int64 [_ROOM, 14] chunks that hold the bits of the partials, the fingerprint and the CRC-32.

    kernels: let Triton's kernels reduce, where the device has them and they are proven (see triton_rows).
    """

    def __init__(self, device: torch.device, kernels: bool = True) -> None:
        self._device = device
        self._wide = accumulator(device)
        self._bits = torch.int64 if self._wide == torch.float64 else torch.int32
        self._filled: list[Tensor] = []
        self._n = self._address = 0
        self._kernels: TritonRows | None = kernels_of(device) if kernels else None

    def add_all(self, tensors: Sequence[Tensor], flags: int) -> int:
        """Reduce tensors into new rows, one behind the other, and return the number of the first; nothing is waited for."""
        first, done, n = self._n, 0, len(tensors)
        while done < n:
            at = self._n % _ROOM
            if at == 0:
                self._add_room()
            some = tensors[done : done + _ROOM - at]
            done, self._n = done + len(some), self._n + len(some)
            left = (
                range(len(some))
                if self._kernels is None
                else self._kernels.add_all(some, flags, self._address + at * _BYTES, _BYTES)
            )
            if len(left) == len(some):
                write_rows(some, flags, self._filled[-1][at : at + len(some)], self._wide)
            else:
                for i in left:
                    write_rows([some[i]], flags, self._filled[-1][at + i : at + i + 1], self._wide)
            for i in range(len(some)) if flags & CRC32 else ():
                with torch.no_grad():
                    self._filled[-1][at + i, _WIDTH + 1] = self._crc32(some[i])
        return first

    def add_share(self, t: Tensor, shard: Shard, flags: int) -> int:
        """Write the share of a shard in the fingerprint of the whole tensor, and its statistics, into a new row."""
        row = self._n
        if flags & STATS:
            self.add_all([t], flags & ~CHECKSUM)
        elif row % _ROOM == 0:
            self._add_room()
        self._n = row + 1
        with torch.no_grad():
            self._filled[row // _ROOM][row % _ROOM, _WIDTH] = share_of(t, shard)
        return row

    def _add_room(self) -> None:
        self._filled.append(torch.zeros((_ROOM, _WIDTH + 2), dtype=torch.int64, device=self._device))
        self._address = self._filled[-1].data_ptr()

    def _crc32(self, t: Tensor) -> Tensor | int:
        return crc32_on_host(t) if self._device.type == "cpu" else crc32_register(t)

    def peek(self, row: int) -> tuple[bytes, int] | None:
        """Return (partials as bytes, fingerprint) of a row on the host; None for any other, to wait for no device."""
        if self._device.type != "cpu":
            return None
        bits = self._filled[row // _ROOM][row % _ROOM].numpy()
        return bits[:_WIDTH].tobytes(), int(bits[_WIDTH : _WIDTH + 1].view(np.uint64)[0])

    def blocks(self) -> list[Tensor]:
        """Return the rows so far, int64 [n, 14] of at most _ROOM each, and those of kernels that are on trial."""
        tried = self._kernels.blocks() if self._kernels is not None else []
        return [*(chunk[: self._n - i * _ROOM] for i, chunk in enumerate(self._filled)), *tried]

    def read(self, brought: Iterator[npt.NDArray[Any]]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.uint64], list[int]]:
        """Return the rows of as many blocks as there are, float64 [n, 12], uint64 [n], and their CRC-32."""
        host = np.concatenate([next(brought) for _ in self._filled]).reshape(-1, _WIDTH + 2)
        bits = np.ascontiguousarray(host[:, :_WIDTH])
        partials = (
            bits.view(np.float64) if self._bits == torch.int64 else bits.astype(np.int32).view(np.float32).astype(np.float64)
        )
        if self._kernels is not None:
            self._kernels.settle(brought)
        return partials, np.ascontiguousarray(host[:, _WIDTH]).view(np.uint64), host[:, _WIDTH + 1].tolist()


class TorchTransfer:
    """Tensors on their way to the host as bits, in one transfer a device.

    The bytes of a device are copied behind all that its current stream does, into pinned memory that belongs to this transfer
    alone. Where a device has no streams or no pinned memory, the copy is waited for at once.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._sent: list[
            tuple[list[int], list[Tensor], Tensor, Tensor, Any]
        ] = []  # numbers, tensors, bytes there and here, event
        with torch.no_grad():
            flat = [_plain(t) for t in tensors]
            for device in dict.fromkeys(t.device for t in tensors):
                here = [i for i, t in enumerate(tensors) if t.device == device]
                here.sort(key=lambda i: -flat[i].element_size())  # so that each begins where its dtype may begin
                parts = [flat[i] for i in here]
                whole = torch.cat([part.view(torch.uint8) for part in parts])
                self._sent.append((here, parts, whole, *_copied(whole)))

    def arrived(self) -> bool:
        """Tell whether all copies are done."""
        return all(event is None or event.query() for *_, event in self._sent)

    def arrays(self) -> list[npt.NDArray[Any]]:
        """Return the tensors on the host, each flattened and of its own dtype; waits until they are there.

        What NumPy has no dtype for (bfloat16, float8) comes as float32.
        """
        found: dict[int, npt.NDArray[Any]] = {}
        for here, parts, _, host, event in self._sent:
            if event is not None and not event.query():
                event.synchronize()
            ends = np.cumsum([part.nbytes for part in parts])[:-1]
            for i, part, bits in zip(here, parts, np.split(host.numpy(), ends), strict=True):
                found[i] = bits.view(_numpy_dtype(part.dtype))
        return [found[i] for i in range(len(found))]


def _copied(t: Tensor) -> tuple[Tensor, Any]:
    """Return a copy on the host and the event behind it, or None where it is there already."""
    stream = None if t.is_cpu else getattr(torch.get_device_module(t.device), "current_stream", None)
    host = None if stream is None else _pinned(t.nbytes)
    if stream is None or host is None:
        return t.cpu(), None
    return host.copy_(t, non_blocking=True), stream(t.device).record_event()


def _pinned(n: int) -> Tensor | None:
    """Return n bytes of the host that devices copy to by themselves; None where this build of torch has none."""
    try:
        return torch.empty(n, dtype=torch.uint8, pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return None


def to_host(tensors: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
    """Bring tensors to the host as bits, in one transfer a device, and wait for them (see `TorchTransfer`)."""
    return TorchTransfer(tensors).arrays()


def _plain(t: Tensor) -> Tensor:
    """Return the elements one after the other, of a dtype that NumPy has."""
    try:
        _numpy_dtype(t.dtype)
    except TypeError:
        t = t.float()
    return t.detach().reshape(-1).contiguous()


@cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype
