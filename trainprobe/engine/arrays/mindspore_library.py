"""What the tape asks of MindSpore: which objects are tensors, what they are called, and their numbers, reduced on the host.

A tensor is read with `asnumpy()`, which shares memory on the CPU and copies from a device. It is reduced before this returns,
so nothing is kept that the training may write. MindSpore has no version counter that shows a write in place: each place is
looked at anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt

from trainprobe.engine.arrays.numpy_rows import NumpyStatsRows, refusal
from trainprobe.engine.core.records import Opaque
from trainprobe.engine.geometry.shards import Shard


@dataclass(frozen=True, slots=True, eq=False)
class HostArray:
    """A tensor's elements on the host as they are now. dtype: MindSpore's text, `Float32`. data: may share memory."""

    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool | None
    data: npt.NDArray[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.data.nbytes


@dataclass(frozen=True, slots=True)
class CopiedTensor:
    """Row-major bytes of a tensor that nobody changes, with the dtype as text and the shape."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return len(self.data)


class Arrived:
    """A transfer that is done: the arrays are there."""

    def __init__(self, arrays: list[npt.NDArray[Any]]) -> None:
        self._arrays = arrays

    def arrived(self) -> bool:
        """Return True."""
        return True

    def arrays(self) -> list[npt.NDArray[Any]]:
        """Return the arrays."""
        return self._arrays


class HostStatsRows:
    """Rows of partials of HostArrays."""

    def __init__(self, rows: NumpyStatsRows) -> None:
        self._rows = rows
        self.blocks, self.drain, self.drain_extras = rows.blocks, rows.drain, rows.drain_extras
        self.peek = rows.peek

    def add(self, t: HostArray) -> int:
        """Reduce a HostArray into a new row and return its number, or -1 when it has no statistics."""
        return self._rows.add(t.data, plain_dtype(t.dtype))

    def add_share(self, t: HostArray, shard: Shard) -> list[int]:
        """Take the share of a shard in the fingerprint of the whole; return the rows whose fingerprints make it up."""
        return self._rows.add_share(t.data, plain_dtype(t.dtype), shard)


class MindSporeLibrary:
    """The verbs of MindSpore (see engine.core.library.Library)."""

    plain: frozenset[type] = frozenset()
    extras: Sequence[str] = ()

    def __init__(self, native: bool = True) -> None:
        """Prepare the library. native: let the compiled kernel reduce, where it was built."""
        self.dtype_text: Mapping[Any, str] = _Text()
        self._native = native

    def stats_rows(self, flags: int) -> HostStatsRows:
        """Return an empty row buffer."""
        return HostStatsRows(NumpyStatsRows(flags, compiled=self._native))

    def native_rows(self, stats_rows: Any) -> Any:
        """Return None: each tensor passes through the row buffer's own `add`."""
        return None

    def native_code(self, dtype: Any) -> int:
        """Return -1: see `native_rows`."""
        return -1

    def extra(self, name: str, result: npt.NDArray[np.float64], dtype: str) -> Any:
        """Return an extra as it is; there are none."""
        return result

    def to_host(self, tensors: Sequence[Any]) -> Arrived:
        """Bring small tensors to the host, each flattened."""
        return Arrived([np.asarray(host_array(t).data).reshape(-1) for t in tensors])

    def is_tensor(self, x: Any) -> bool:
        """Tell whether x is a tensor of MindSpore, or one that was brought to the host."""
        return isinstance(x, mindspore.Tensor | HostArray)

    def without_dispatch(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: MindSpore asks no class of tensors."""
        return nullcontext()

    def special(self, t: Any) -> tuple[Any | None, str, Mapping[str, Any] | None, str | None]:
        """Describe a tensor: its HostArray to reduce (or None), its type text, extra, and why not."""
        if isinstance(t, HostArray):
            return t, "mindspore.Tensor", None, None
        note = without_data(t)
        return (None if note else host_array(t)), "mindspore.Tensor", None, note

    def faults(self) -> Sequence[str]:
        """Return nothing: there are no kernels on a device."""
        return ()

    def refusal(self, t: Any) -> str:
        """Say why a HostArray has no statistics."""
        return refusal(t.data, plain_dtype(t.dtype)) or "it could not be read"

    def opaque(self, x: Any) -> Any:
        """Describe what cells take beside tensors and plain scalars; None for the rest."""
        if isinstance(x, mindspore.dtype.Type):
            return Opaque("mindspore.dtype", str(x))
        if isinstance(x, bool | int | float):
            return x
        return str(x) if isinstance(x, str) else None


class _Text(dict[Any, str]):
    def __missing__(self, dtype: Any) -> str:
        return str(dtype)


def plain_dtype(text: str) -> str:
    """Return `bfloat16` for `BFloat16`."""
    return text.rpartition(".")[2].lower()


def without_data(t: Any) -> str | None:
    """Return why a tensor cannot be read, or None when it can."""
    if getattr(t, "has_init", False):
        return "not initialised yet: there is no data"
    return None


def host_array(t: Any) -> HostArray:
    """Return a tensor's elements on the host; waits for the device. A HostArray is returned as it is."""
    if isinstance(t, HostArray):
        return t
    needs = bool(t.requires_grad) if isinstance(t, mindspore.Parameter) else None
    return HostArray(str(t.dtype), tuple(t.shape), needs, t.asnumpy())


def copy_out(t: Any) -> CopiedTensor:
    """Return a copy on the host; waits for the device."""
    array = host_array(t)
    return CopiedTensor(array.dtype, array.shape, np.ascontiguousarray(array.data).tobytes())
