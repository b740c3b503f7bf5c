"""What the tape needs from a tensor library, and the small tensors whose transfer to the host it defers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trainprobe.engine.geometry.shards import Shard

F64 = npt.NDArray[np.float64]
Reading = Callable[[npt.NDArray[Any]], Sequence[tuple[F64 | None, F64]]]


class Deferred:
    """A small tensor that is transferred to the host together with the rows of its step.

    numbers: its elements, flat and of the tensor's own dtype, once the step is drained; None before, or if none came.
    """

    __slots__ = ("numbers", "tensor")

    def __init__(self, tensor: Any = None) -> None:
        self.tensor = tensor
        self.numbers: npt.NDArray[Any] | None = None


class Transfer(Protocol):
    """Small tensors on their way to the host."""

    def arrived(self) -> bool:
        """Tell whether `arrays` would return at once."""
        ...

    def arrays(self) -> list[npt.NDArray[Any]]:
        """Return them on the host, each flattened and of its own dtype; waits until they are there."""
        ...


class StatsRows(Protocol):
    """A row buffer: partials of tensors, a row each, on the devices that hold the tensors (see engine.arrays)."""

    def add(self, t: Any) -> int:
        """Reduce a tensor into a new row and return its number, or -1 when it has no statistics."""
        ...

    def add_share(self, t: Any, shard: Shard) -> list[int]:
        """Take the share of a shard in the fingerprint of the whole tensor; return the rows whose fingerprints make it up."""
        ...

    def blocks(self) -> list[Any]:
        """Return what is on devices and has to be brought to the host before `drain`."""
        ...

    def drain(
        self, brought: Sequence[npt.NDArray[Any]] | None = None
    ) -> tuple[F64, npt.NDArray[np.uint64] | None, list[int] | None]:
        """Hand over all rows and start anew. brought: the blocks on the host; None brings them, in one transfer a device."""
        ...

    def peek(self, row: int) -> tuple[bytes, int] | None:
        """Return (partials as bytes, fingerprint) of a row now, or None while it is on a device."""
        ...

    def drain_extras(self) -> Sequence[Any]:
        """Return what else was computed for each row; called after `drain`, and only where the plan asks for extras."""
        ...


class Library(Protocol):
    """What the tape needs to know of a tensor library."""

    plain: frozenset[type]  # two classes that the compiled tape looks at itself, or none
    extras: Sequence[str]
    dtype_text: Mapping[Any, str]

    def stats_rows(self, flags: int) -> StatsRows:
        """Return an empty row buffer."""
        ...

    def native_rows(self, stats_rows: Any) -> Any:
        """Return the compiled part of a row buffer, or None where each tensor must pass through its own `add`."""
        ...

    def native_code(self, dtype: Any) -> int:
        """Return the compiled kernel's number of a dtype, -1 where it has none."""
        ...

    def extra(self, name: str, result: npt.NDArray[np.float64], dtype: str) -> Any:
        """Turn what an extra ("histogram", "quantiles") computed for a tensor of this dtype into what `StepData` holds."""
        ...

    def to_host(self, tensors: Sequence[Any]) -> Transfer:
        """Begin to bring small tensors to the host, in one transfer a device; waits for nothing where the device allows it."""
        ...

    def is_tensor(self, x: Any) -> bool:
        """Tell whether x is a tensor of this library, wrapped kinds included."""
        ...

    def without_dispatch(self) -> AbstractContextManager[Any]:
        """Return a context in which looking at a tensor of the program's own class runs none of that class's code."""
        ...

    def special(self, t: Any) -> tuple[Any | None, str, Mapping[str, Any] | None, str | None]:
        """Describe a tensor that is not of a plain kind: (tensor to reduce or None, type text, extra, note)."""
        ...

    def faults(self) -> Sequence[str]:
        """Return what the user must know of this library's kernels: sentences, the same ones each time."""
        ...

    def refusal(self, t: Any) -> str:
        """Say why a tensor has no statistics."""
        ...

    def opaque(self, x: Any) -> Any:
        """Describe a leaf that is neither tensor nor plain scalar (dtype, device, process group …), or None."""
        ...
