"""What the tape needs from PyTorch: which objects are tensors, what they are called, and a row buffer for their partials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from trainprobe.engine.arrays.torch_arrays import TorchStatsRows, local_of, native_code, reason_without_statistics
from trainprobe.engine.arrays.torch_extras import Extra, StatsRowsWithExtras, bin_counts, exponent_counts
from trainprobe.engine.arrays.torch_extras import quantiles as quantiles_at
from trainprobe.engine.arrays.torch_rows import TorchTransfer
from trainprobe.engine.arrays.triton_rows import refusals
from trainprobe.engine.arrays.without_dispatch import without_dispatch
from trainprobe.engine.core.records import Opaque
from trainprobe.engine.stats.histogram import ExponentHistogram


class _DtypeText(dict[Any, str]):
    """dtype → text, made on first sight."""

    def __missing__(self, dtype: Any) -> str:
        text = self[dtype] = str(dtype)
        return text


class TorchLibrary:
    """The verbs of PyTorch (see engine.core.library.Library)."""

    plain: frozenset[type] = frozenset({torch.Tensor, torch.nn.Parameter})

    def __init__(
        self,
        native: bool = True,
        *,
        edges: Sequence[float] | Literal["exponent"] | None = None,
        quantiles: Sequence[float] = (),
    ) -> None:
        """Prepare the library. edges: bins of a histogram of each value, or "exponent"; quantiles: levels from 0 to 1."""
        self.dtype_text: Mapping[Any, str] = _DtypeText()
        self._native = native
        self._edges = edges
        computed: dict[str, Extra] = {}
        if edges is not None:
            computed["histogram"] = exponent_counts if isinstance(edges, str) else bin_counts(edges)
        if quantiles:
            computed["quantiles"] = quantiles_at(quantiles)
        self.extras: Sequence[str] = tuple(computed)
        self._extras = tuple(computed.values())

    def stats_rows(self, flags: int) -> TorchStatsRows:
        """Return an empty row buffer."""
        if self._extras:
            return StatsRowsWithExtras(flags, self._extras, native=self._native)
        return TorchStatsRows(flags, native=self._native)

    def native_rows(self, stats_rows: TorchStatsRows) -> Any:
        """Return the compiled part of a row buffer, or None where each tensor must pass through its own `add`."""
        return None if self._extras else stats_rows.native

    def native_code(self, dtype: Any) -> int:
        """Return the compiled kernel's number of a dtype, -1 where it has none."""
        return native_code(dtype)

    def extra(self, name: str, result: npt.NDArray[np.float64], dtype: str) -> Any:
        """Turn the result of an extra into what `StepData` holds: (edges, counts) of a histogram, or quantiles, [levels]."""
        if name != "histogram":
            return result
        if not isinstance(self._edges, str):
            return self._edges, result
        return exponent_edges(result, dtype)

    def to_host(self, tensors: Sequence[Any]) -> TorchTransfer:
        """Begin to bring small tensors to the host, in one transfer a device; waits for nothing where the device allows it."""
        with without_dispatch():
            return TorchTransfer(tensors)

    def is_tensor(self, x: Any) -> bool:
        """Tell whether x is a tensor, subclasses included."""
        return isinstance(x, torch.Tensor)

    def without_dispatch(self) -> AbstractContextManager[Any]:
        """Return a context in which no `__torch_function__` is called, whose code may count, draw or write."""
        return without_dispatch(within_transforms=True)

    def special(self, t: Any) -> tuple[Any | None, str, Mapping[str, Any] | None, str | None]:
        """Describe a tensor subclass: the plain tensor inside it to reduce (or None), its type text, extra, and why not."""
        inner, kind, extra, note = local_of(t)
        if extra is None and inner is t and not t.is_contiguous():
            extra = {"stride": [*t.stride()]}
        return inner, kind, extra, note

    def faults(self) -> Sequence[str]:
        """Return why a device that has kernels does without them (see triton_rows)."""
        return refusals() if self._native else ()

    def refusal(self, t: Any) -> str:
        """Say why a tensor has no statistics."""
        return reason_without_statistics(t)

    def opaque(self, x: Any) -> Any:
        """Describe arguments that are neither tensors nor plain scalars, as existing tools write them; None for the rest."""
        kind = type(x)
        if kind is torch.Size:
            return Opaque("torch.Size", [_plain(n) for n in x])
        if kind is torch.dtype:
            return Opaque("torch.dtype", str(x))
        if kind is torch.device:
            return Opaque("torch.device", str(x))
        if kind is torch.memory_format:
            return Opaque("torch.memory_format", None, {"format": str(x)})
        if kind is slice:
            return Opaque("slice", [_plain(x.start), _plain(x.stop), _plain(x.step)])
        if x is Ellipsis:
            return Opaque("ellipsis", "...")
        if isinstance(x, bool | int | float):
            return x.real if not isinstance(x, bool) else bool(x)
        if isinstance(x, complex):
            return Opaque("complex", str(x))
        if isinstance(x, str):
            return str(x)
        return None


def exponent_edges(counts: npt.NDArray[np.float64], dtype: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return (edges [2n + 2], counts [2n + 1]) by powers of two: negative bins, zero between them, positive bins."""
    counted = ExponentHistogram.from_counts(counts.astype(np.int64), dtype)
    with np.errstate(over="ignore"):  # of float64 the last one is infinity itself
        powers = np.ldexp(1.0, np.arange(counted.lowest, counted.lowest + len(counted.positive) + 1))
    edges = np.concatenate([-powers[::-1], powers])
    return edges, np.concatenate([counted.negative[::-1], [counted.zero], counted.positive]).astype(np.float64)


def _plain(x: Any) -> Any:
    """Keep plain numbers; a tensor as a bound of a slice is named by its type (reading it would wait for the device)."""
    return x if x is None or isinstance(x, int) else f"<{type(x).__name__}>"
