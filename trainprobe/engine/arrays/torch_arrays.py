"""PyTorch tensors to partials: one row buffer per step, reduced where the tensors live, read once at the end.

Bounds, x over the finite elements, u = 2^-53. float16, bfloat16, float32, float8 and integers of at most 32 bits are
added in float64: |error of sum| <= 2^-44 Σ|x| and |error of sumsq| <= 2^-44 Σx². float64 is compensated:
|error of sum| <= 2^-52 |Σx| + 2^-80 Σ|x|, |error of sumsq| <= 2^-51 Σx². 64-bit integer sums are exact and rounded
once. Magnitudes of complex numbers are taken in float64.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainprobe.engine.arrays.torch_reduce import REDUCED
from trainprobe.engine.arrays.torch_rows import DeviceRows, to_host
from trainprobe.engine.arrays.without_dispatch import without_dispatch
from trainprobe.engine.compiled import native as _native
from trainprobe.engine.core.guard import attempt, fault_text
from trainprobe.engine.geometry.rectangles import Rectangle
from trainprobe.engine.geometry.shards import Shard, rectangles_of
from trainprobe.engine.stats.partials import CHECKSUM, CRC32, PARTIALS, STATS, STD, SUBNORMAL

__all__ = [
    "CHECKSUM",
    "CRC32",
    "STATS",
    "STD",
    "SUBNORMAL",
    "HostCopy",
    "TorchStatsRows",
    "copy_out",
    "local_of",
    "native_in_use",
    "reason_without_statistics",
]

_MANY = 1 << 31  # elements of an expanded tensor that are walked
# addresses below may be an offset into freed storage and are looked at twice; so are small tensors of a Python that is no
# position-independent program, whose heap lies there
_SUSPECT = 1 << 40
_NATIVE_CODES: dict[torch.dtype, int] = (
    {getattr(torch, name): code for name, code in _native.DTYPES.items() if hasattr(torch, name)} if _native else {}
)
_COMPLEX_CODES = frozenset(code for dtype, code in _NATIVE_CODES.items() if dtype.is_complex)


def native_code(dtype: torch.dtype) -> int:
    """Return the compiled kernel's number of a dtype, -1 where it has none."""
    return _NATIVE_CODES.get(dtype, -1)


def native_in_use() -> bool:
    """Tell whether CPU tensors are reduced by the compiled kernel."""
    return _native is not None


class TorchStatsRows:
    """Rows of partials of the tensors of a step, in the order in which they were added.

    flags: STATS | CHECKSUM | STD | CRC32 | SUBNORMAL. native=False keeps to torch's operations everywhere.
    """

    __slots__ = ("_add_native", "_codes", "_devices", "_flags", "_kernels", "_placed", "native")

    def __init__(self, flags: int, *, native: bool = True) -> None:
        self._flags = flags
        self.native: Any = _native.StatsRows() if _native is not None and native else None
        self._codes = _NATIVE_CODES if self.native is not None else {}
        self._add_native: Any = self.native.add if self.native is not None else None
        self._kernels = native
        self._devices: dict[torch.device, DeviceRows] = {}
        self._placed: dict[torch.device, dict[int, int]] = {}  # device → rows of the buffer, each with the row there

    def __len__(self) -> int:
        return sum(map(len, self._placed.values())) if self.native is None else len(self.native)

    def add(self, t: Tensor) -> int:
        """Reduce a tensor into a new row and return its number, or -1 when it has no statistics (see `refusal`)."""
        try:
            if t.is_cpu and not t.is_neg():
                code = self._codes[t.dtype]
                address = t.data_ptr()
                there = address > _SUSPECT or not reason_without_statistics(t)
                if there and not t.is_nested and not (code in _COMPLEX_CODES and t.is_conj()):
                    if t.is_contiguous():
                        return self._add_native(address, code, t.numel(), None, self._flags)
                    if not (self._flags & (CHECKSUM | CRC32) and t.numel() > _MANY and reason_without_statistics(t)):
                        return self._add_native(address, code, t.shape, t.stride(), self._flags)
        except (KeyError, RuntimeError):
            pass  # no fast way for this dtype or kind of tensor
        return self._add_by_torch(t)

    def add_share(self, t: Tensor, shard: Shard) -> list[int]:
        """Take the share of a shard in the fingerprint of the whole tensor; return the rows whose fingerprints make it up.

        With STATS in the flags the rows together have the statistics of the shard, too.

        None where the tensor has no elements to look at, or not those that the shard says.
        """
        if t.numel() != math.prod(shard.shape) or reason_without_statistics(t):
            return []
        with without_dispatch(), torch.no_grad():
            if t.is_cpu and t.dtype in self._codes and not (t.is_neg() or t.is_conj()):
                pieces = rectangles_of(shard) if t.numel() else ()
                return [self._add_piece(t.detach(), shard, at, box) for at, box in pieces]
            placed, row = self._placed_on(t.device), self._blank()
            placed[row] = self._devices[t.device].add_share(t, shard, self._flags)
        return [row]

    def _add_piece(self, t: Tensor, shard: Shard, at: int, box: Rectangle) -> int:
        """Take the share of the elements of a shard from `at` on, which are a rectangle of its tensor."""
        outer = shard.within
        piece = t.reshape(box.shape) if outer is None else t.reshape(-1).narrow(0, at, box.count).view(box.shape)
        whole, code = tuple((outer or shard).whole), self._codes[t.dtype]
        return self._add_native(piece.data_ptr(), code, box.shape, piece.stride(), self._flags, whole, box.offset)

    def _blank(self) -> int:
        return len(self) if self.native is None else self.native.blank()

    def _placed_on(self, device: torch.device) -> dict[int, int]:
        if device not in self._devices:
            self._devices[device], self._placed[device] = DeviceRows(device, self._kernels), {}
        return self._placed[device]

    def _add_by_torch(self, t: Tensor) -> int:
        if reason_without_statistics(t):
            return -1
        row = self._blank()
        self.add_all([t], [row])
        return row

    def add_all(self, tensors: Sequence[Tensor], rows: Sequence[int]) -> None:
        """Reduce tensors that all have statistics, together where a device can, into these rows, which are blank.

        Nothing is waited for. Raises what torch raises; then none of the rows may be believed.
        """
        with without_dispatch():
            device = tensors[0].device
            here = [i for i, t in enumerate(tensors) if t.device == device] if len(tensors) > 1 else (0,)
            some = tensors if len(here) == len(tensors) else [tensors[i] for i in here]
            placed = self._placed.get(device)
            if placed is None:
                placed = self._placed_on(device)
            first = self._devices[device].add_all(some, self._flags)
            into = rows if some is tensors else [rows[i] for i in here]
            placed.update(zip(into, range(first, first + len(some)), strict=True))
            if some is not tensors:
                others = sorted({*range(len(tensors))}.difference(here))
                self.add_all([tensors[i] for i in others], [rows[i] for i in others])

    def refusal(self, t: Tensor) -> str:
        """Say why `add` returned -1 for this tensor."""
        return reason_without_statistics(t) or "it could not be read"

    def peek(self, row: int) -> tuple[bytes, int] | None:
        """Return (partials as bytes, fingerprint) of a row now, or None while it is on a device."""
        for device, placed in self._placed.items():
            if row in placed:
                with without_dispatch():
                    return self._devices[device].peek(placed[row])
        return None if _native is None else _native.row_of(self.native, row)

    def blocks(self) -> list[Tensor]:
        """Return what is on devices and has to be brought to the host before `drain`."""
        if not self._devices:
            return []
        with without_dispatch():
            return [block for rows in self._devices.values() for block in rows.blocks()]

    def drain(
        self, brought: Sequence[npt.NDArray[Any]] | None = None
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.uint64] | None, list[int] | None]:
        """Hand over all rows and start anew. brought: the blocks on the host; None brings them, in one transfer a device.

        Returns float64 [n, 12], uint64 [n] (None unless CHECKSUM) and a list of CRC-32 (None unless CRC32).
        """
        arrays = iter(to_host(self.blocks()) if brought is None else brought)
        partials, sums, crcs = self._take_native()
        if self._devices:
            taken = {device: rows.read(arrays) for device, rows in self._devices.items()}
            if self.native is None:
                n = len(self)
                partials, sums = np.zeros((n, len(PARTIALS))), np.zeros(n, np.uint64)
            crcs = crcs or [0] * len(partials)
            for device, (rows, checks, registers) in taken.items():
                placed, at = [*self._placed[device]], [*self._placed[device].values()]
                partials[placed] = rows[at]
                if sums is not None:
                    sums[placed] = checks[at]
                for row, there in self._placed[device].items():
                    crcs[row] = registers[there]
        self._devices, self._placed = {}, {}
        return partials, sums if self._flags & CHECKSUM else None, crcs if self._flags & CRC32 else None

    def drain_extras(self) -> Sequence[Any]:
        """Return nothing: a plain row buffer computes no more than partials, checksums and CRCs."""
        return ()

    def _take_native(self) -> tuple[npt.NDArray[np.float64], Any, list[int]]:
        if self.native is None:
            return np.zeros((0, len(PARTIALS))), np.zeros(0, np.uint64), []
        partials, sums, crcs = self.native.take()
        rows = np.frombuffer(partials, np.float64).reshape(-1, len(PARTIALS))
        return rows, np.frombuffer(sums, np.uint64) if self._flags & CHECKSUM else None, crcs


def reason_without_statistics(t: Tensor) -> str:
    """Return why a tensor has no statistics, or an empty string when it has; never raises."""
    return attempt(_reason, t, otherwise=lambda fault: f"not looked at: {fault_text(fault)}")


def _reason(t: Tensor) -> str:
    wrapper = _torch_func_wrapper(t)
    if wrapper:
        return f"{wrapper}: torch.func hides the data until the transformed function returns"
    if t.layout is not torch.strided:
        return f"layout {t.layout}: only strided tensors are reduced"
    if t.is_quantized:
        return "quantized: the numbers depend on a scale that is not part of the data"
    if t.is_nested:
        return "nested: reduce its values()"
    if t.is_meta:
        return "meta: there is no data"
    if t.dtype not in REDUCED:
        return f"{t.dtype}: its elements are not whole bytes, or not known"
    if type(t).__name__ == "FakeTensor":
        return "fake: there is no data"
    return "" if t.numel() == 0 else _reason_of_memory(t)


def _reason_of_memory(t: Tensor) -> str:
    try:
        storage = t.untyped_storage()
        freed = storage.data_ptr() == 0
    except (RuntimeError, NotImplementedError):
        freed, storage = True, None
    if freed or storage is None:
        return "no data behind it now (freed, or a wrapper without storage)"
    if t.numel() > _MANY and t.numel() * t.element_size() > 16 * storage.nbytes():
        return f"expanded: {t.numel()} elements over {storage.nbytes()} bytes of memory, which would take too long to walk"
    return ""


def _torch_func_wrapper(t: Tensor) -> str:
    """Name the torch.func wrapper that a tensor is, or return an empty string."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    if functorch.is_batchedtensor(t):
        return "BatchedTensor"
    if functorch.is_gradtrackingtensor(t):
        return "GradTrackingTensor"
    return "FunctionalTensor" if torch._is_functional_tensor(t) else ""  # pyright: ignore[reportPrivateImportUsage]


def type_text(t: Tensor) -> str:
    """Return the type of a tensor as existing tools write it: `torch.Tensor`, or the full class path of a subclass."""
    kind = type(t)
    if kind in (Tensor, torch.nn.Parameter):
        return _torch_func_wrapper(t) or "torch.Tensor"
    return f"{kind.__module__}.{kind.__qualname__}"


def local_of(t: Any) -> tuple[Any | None, str, Mapping[str, Any] | None, str | None]:
    """Describe a tensor subclass: (plain tensor inside to reduce or None, type text, extra, note saying why not).

    A DTensor gives its local shard and, as extra, its mesh and placements; nothing is communicated or waited for.
    """
    kind, name = type_text(t), type(t).__name__
    if name == "DTensor" and hasattr(t, "_local_tensor"):
        inner = t._local_tensor
        extra = {"device_mesh": t.device_mesh.mesh.tolist(), "placements": [_placement(p) for p in t.placements]}
        plain, _, _, note = (inner, "", None, None) if type(inner) is Tensor else local_of(inner)
        return plain, kind, extra, note
    if name == "AsyncCollectiveTensor":
        return (t.elem, kind, None, None) if t.completed else (None, kind, None, "a collective still writes it")
    if name == "NestedTensor" and hasattr(t, "_values"):
        return t._values, kind, None, None
    reason = reason_without_statistics(t)
    return (None, kind, None, reason) if reason else (t, kind, None, None)


def still_written(t: Any) -> Tensor | None:
    """Return the memory behind a tensor that a functional collective may still write, None where nobody has to wait for it.

    What is no such tensor but a plain one counts as written: it may be the result that the collective itself returned.
    """
    inner = t._local_tensor if type(t).__name__ == "DTensor" and hasattr(t, "_local_tensor") else t
    if type(inner).__name__ == "AsyncCollectiveTensor":
        return None if inner.completed else inner.elem
    return inner if inner is t and type(t) in _PLAIN else None


def _placement(p: Any) -> dict[str, dict[str, Any]]:
    """Write a DTensor placement as existing tools do."""
    if p.is_shard():
        return {"Shard": {"dim": p.dim}}
    if p.is_partial():
        return {"Partial": {"reduce_op": str(p.reduce_op)}}
    if hasattr(p, "split_factor"):
        return {"StridedShard": {"dim": p.dim, "split_factor": p.split_factor}}
    return {type(p).__name__.lstrip("_"): {}}


@dataclass(frozen=True, slots=True)
class HostCopy:
    """The elements of a tensor on the host: row-major bytes that do not change, with the dtype as text and the shape."""

    dtype: str
    shape: tuple[int, ...]
    data: Any

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return len(self.data)


def copy_out(t: Tensor) -> HostCopy:
    """Return a copy on the host; a DTensor gives its local shard. Waits for the device."""
    if _native is not None and type(t) in _PLAIN and t.dtype in _NATIVE_CODES and t.is_cpu and t.is_contiguous():
        address = 0 if t.is_neg() or t.is_conj() else t.data_ptr()
        if address > _SUSPECT or (address and not reason_without_statistics(t)):
            return HostCopy(_dtype_text(t.dtype), tuple(t.shape), _native.bytes_at(address, t.nbytes))
    with without_dispatch(), torch.no_grad():
        inner = t if type(t) in _PLAIN else local_of(t)[0]
        plain = (t if inner is None else inner).detach().resolve_conj().resolve_neg()
        host = plain.to("cpu", copy=True) if plain.device.type != "cpu" else plain.clone(memory_format=torch.contiguous_format)
        flat = host.contiguous().reshape(-1)
        return HostCopy(str(host.dtype), tuple(host.shape), flat.view(torch.uint8).numpy())


class LateCopy:
    """A copy of a tensor on its own device. Making it waits for nothing; `data` brings it to the host, on any thread.

    A DTensor gives its local shard.
    """

    __slots__ = ("_clone", "_made", "dtype", "nbytes", "shape")

    def __init__(self, t: Tensor) -> None:
        with without_dispatch(), torch.no_grad():
            inner = t if type(t) in _PLAIN else local_of(t)[0]
            plain = (t if inner is None else inner).detach().resolve_conj().resolve_neg()
            self._clone = plain.clone(memory_format=torch.contiguous_format)
            device = None if plain.is_cpu else torch.get_device_module(plain.device)
            stream = getattr(device, "current_stream", None)
            self._made: Any = None if stream is None else stream(plain.device).record_event()
        self.dtype, self.shape, self.nbytes = str(plain.dtype), tuple(plain.shape), self._clone.nbytes

    @property
    def data(self) -> Any:
        """The bytes, on the host; waits for the device."""
        if self._made is not None:
            self._made.synchronize()
        return copy_out(self._clone).data


def copy_late(t: Tensor) -> HostCopy | LateCopy:
    """Return a copy without waiting for the device that the tensor is on."""
    return copy_out(t) if t.is_cpu else LateCopy(t)


_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_dtype_text = cache(str)


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


if _native is not None:
    _native.set_threads(min(_affinity(), torch.get_num_threads(), 8))
