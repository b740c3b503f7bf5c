"""What the tape needs to know of a tensor library, and what it hands over to be brought to the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
Reading = Callable[[npt.NDArray[Any]], Sequence[tuple[F64 | None, F64]]]


class Carried:
    """A small tensor that rides to the host with the rows of its step.

    numbers: its elements, flat and of the tensor's own dtype, once the step is harvested; None before, or where none came.
    """

    __slots__ = ("numbers", "tensor")

    def __init__(self, tensor: Any = None) -> None:
        self.tensor = tensor
        self.numbers: npt.NDArray[Any] | None = None


class Strip(Protocol):
    """The rows of partials on the devices (see engine.arrays)."""

    def add(self, t: Any) -> int:
        """Reduce a tensor into a new row and return its number, or -1 when it has no statistics."""
        ...

    def together(self, on: bool) -> None:
        """Say that what is added from now on stays as it is until this is called with False: it may be reduced then."""
        ...

    def blocks(self) -> list[Any]:
        """Return what is on devices and has to be brought to the host before `harvest`."""
        ...

    def harvest(
        self, brought: Sequence[npt.NDArray[Any]] | None = None
    ) -> tuple[F64, npt.NDArray[np.uint64] | None, list[int] | None]:
        """Hand over all rows and start anew. brought: the blocks on the host; None brings them, in one transfer a device."""
        ...

    def peek(self, row: int) -> tuple[bytes, int] | None:
        """Return (partials as bytes, fingerprint) of a row now, or None while it is on a device."""
        ...

    def harvest_extras(self) -> Sequence[Any]:
        """Return what else was computed for each row; called after `harvest`, and only where extras are wanted."""
        ...


class Library(Protocol):
    """What the tape needs to know of a tensor library."""

    plain: frozenset[type]  # two classes that the compiled tape looks at itself, or none
    extras: Sequence[str]
    dtype_text: Mapping[Any, str]

    def strip(self, flags: int) -> Strip:
        """Return an empty strip."""
        ...

    def native_rows(self, strip: Any) -> Any:
        """Return the compiled rows of a strip, or None where each tensor must pass through the strip's own `add`."""
        ...

    def native_code(self, dtype: Any) -> int:
        """Return the compiled kernel's number of a dtype, -1 where it has none."""
        ...

    def extra(self, name: str, result: npt.NDArray[np.float64], dtype: str) -> Any:
        """Turn what an extra ("histogram", "quantiles") computed for a tensor of this dtype into what `StepData` holds."""
        ...

    def bring(self, tensors: Sequence[Any]) -> list[npt.NDArray[Any]]:
        """Bring small tensors to the host, in one transfer a device, each flattened and of its own dtype."""
        ...

    def is_tensor(self, x: Any) -> bool:
        """Tell whether x is a tensor of this library, wrapped kinds included."""
        ...

    def unnoticed(self) -> AbstractContextManager[Any]:
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
