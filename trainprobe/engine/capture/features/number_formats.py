"""What a low-precision format would lose of activations, weights and gradients, and how their exponents are spread.

For each chosen format the share of all elements that would underflow and that would overflow under the scale
(see engine.stats.low_precision), and the count of elements per power of two. Scale "amax" is the largest number of the format
over the largest magnitude of the tensor, as Transformer Engine's current scaling has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainprobe.engine.arrays.torch_exponents import CountedMagnitudes, OnHost, Spread
from trainprobe.engine.capture.features.feature import QuietFeature, Surroundings, tensors_of, whole, without_autograd
from trainprobe.engine.capture.gradients import edge_of
from trainprobe.engine.core.held_parameters import parameters_in
from trainprobe.engine.stats.histogram import exponent_range
from trainprobe.engine.stats.low_precision import FORMATS, LowPrecisionFormat, amax_scale, limits_of, limits_under
from trainprobe.engine.tape import Tape

F64 = npt.NDArray[np.float64]
Scale = float | Literal["amax"]


class FormatFeature(QuietFeature):
    """See the module text. slots: among output, grad_output, value, grad."""

    def __init__(
        self,
        around: Surroundings,
        *,
        every: int = 1,
        formats: Sequence[str],
        slots: Sequence[str],
        scale: Scale = 1.0,
        exponents: bool = True,
    ) -> None:
        super().__init__(around, every=every)
        self._guard = around.guard
        self._parameters = around.parameters
        self._formats = tuple(formats)
        self._slots = frozenset(slots)
        self._scale: Scale = scale
        self._exponents = exponents
        self._counted: dict[tuple[Any, torch.dtype], CountedFormats] = {}
        self._result_slots: dict[str, tuple[str, ...]] = {}  # slot of a value → slots of its results
        self._handles: list[Any] = []
        self._stepped = False

    def wants(self, name: str, module: Any) -> bool:
        """Look at the outputs of chosen modules."""
        return bool(self._slots & {"output", "grad_output"}) and self._chosen(name)

    def begin(self, tape: Tape, models: Sequence[Any]) -> None:
        """Look at the parameters as they are when the step begins."""
        super().begin(tape, models)
        self._stepped = False
        if "value" in self._slots:
            self._look_at_parameters("value", lambda p: p)

    def before(self, name: str, module: Any, args: Any, kwargs: Any) -> Any:
        """Have `after` called."""
        return True

    def after(self, name: str, module: Any, before: Any, out: Any) -> None:
        """Look at what comes out, and wait for its gradients."""
        outputs = tensors_of(out)
        for i, t in enumerate(outputs):
            number = f".{i}" if len(outputs) > 1 else ""
            if "output" in self._slots:
                self._look(name, f"output{number}", t)
            if "grad_output" in self._slots and t.requires_grad:
                edge = edge_of(t)
                if edge is not None:
                    self._handles.append(
                        edge[0].register_prehook(partial(self._arrived, name, f"grad_output{number}", edge[1]))
                    )

    def stepping(self) -> None:
        """Look at the gradients that the first optimizer of the step sees."""
        if "grad" in self._slots and not self._stepped:
            self._stepped = True
            self._look_at_parameters("grad", lambda p: getattr(p, "main_grad", None) if p.grad is None else p.grad)

    def end(self) -> None:
        """Remove the hooks; what was counted goes to the host."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        counted, self._counted = self._counted, {}
        if self._tape is not None and counted:
            self._guard.run(_finish, counted.values())
        super().end()

    def _look_at_parameters(self, slot: str, of: Callable[[Any], Any]) -> None:
        names = self._parameters()
        for p in parameters_in(self._models):
            name, t = names.get(id(p)), of(p)
            if name is not None and t is not None and self._chosen(name):
                self._look(name, slot, t)

    def _arrived(self, name: str, slot: str, place: int, gradients: Any) -> None:
        if self._tape is not None and gradients[place] is not None:
            with without_autograd():
                self._guard.run(self._look, name, slot, gradients[place])

    def _look(self, name: str, slot: str, t: Any) -> None:
        if self._tape is None or not whole(t) or not t.is_floating_point():
            return
        dtype = torch.float64 if t.dtype == torch.float64 else torch.float32
        counted = self._counted.get((t.device, dtype))
        if counted is None:
            counted = self._counted[t.device, dtype] = CountedFormats(
                self._tape, t.device, dtype, self._formats, self._scale, self._exponents
            )
        results = self._result_slots.get(slot)
        if results is None:
            shares = [f"{lost}_{form}.{slot}" for form in self._formats for lost in ("underflow", "overflow")]
            results = self._result_slots[slot] = (*shares, *([f"exponents.{slot}"] if self._exponents else []))
        self._tape.feature(name, results, counted.deferred, counted.add(t))


class CountedFormats:
    """What formats lose of the tensors of one step, device and dtype: one row of counts for each, one block for all.

    dtype: float32, or float64 for tensors of that dtype. `deferred` is the block, to be read with what `add` returns.
    """

    def __init__(
        self, tape: Tape, device: torch.device, dtype: torch.dtype, formats: Sequence[str], scale: Scale, exponents: bool
    ) -> None:
        self.deferred = tape.defer()
        self._largest = tape.defer()
        self._formats = [FORMATS[name] for name in formats]
        self._exponents = exponents
        self._dtype = np.dtype(str(dtype).rpartition(".")[2])
        self._limits = None if scale == "amax" else limits_under(tuple(formats), float(scale), self._dtype.name)
        kind = OnHost if on_host(device) else CountedMagnitudes
        self._magnitudes = kind(device, dtype, 2 * len(self._formats), self._exceeding, self._limits is None)
        self._texts = tape.library.dtype_text
        self._read: tuple[F64, list[tuple[F64, F64]]] | None = None
        self._dtypes: list[str] = []

    def add(self, t: Tensor) -> Callable[[npt.NDArray[Any]], Sequence[tuple[F64 | None, F64]]]:
        """Count a tensor; return how to read its counts."""
        self._dtypes.append(self._texts[t.dtype])
        return partial(self._results_of, self._magnitudes.add(t))

    def finish(self) -> None:
        """Have the counts carried to the host."""
        self.deferred.tensor, self._largest.tensor = self._magnitudes.counts(), self._magnitudes.largest()

    def _exceeding(self, x: Any, largest: Any, spread: Spread) -> Iterable[Any]:
        """Yield for each format which magnitudes do not underflow, and which overflow; of tensors, or of arrays on the host."""
        if self._limits is not None:
            yield from (x >= limit for limit in self._limits[0].tolist())
        else:
            for form in self._formats:
                scaled = x * spread(_scale_of(largest, form))
                yield scaled > form.smallest / 2
                yield scaled > form.middle if form.even else scaled >= form.middle

    def _results_of(self, row: int, numbers: npt.NDArray[Any]) -> list[tuple[F64 | None, F64]]:
        if self._read is None:
            self._read = self._read_all(numbers)
        shares, exponents = self._read
        results: list[tuple[F64 | None, F64]] = [(None, share) for share in shares[row]]
        return [*results, exponents[row]] if self._exponents else results

    def _read_all(self, numbers: npt.NDArray[Any]) -> tuple[F64, list[tuple[F64, F64]]]:
        """Return the shares [rows, 2 · formats, 1] and for each row (edges, counts) of its exponents."""
        bins = self._magnitudes.bins
        counts = numbers.reshape(-1, bins.bins)
        limits = self._limits
        if limits is None:
            assert self._largest.numbers is not None
            limits = np.concatenate([limits_of([f], amax_scale(self._largest.numbers, f)) for f in self._formats], axis=1)
        below, powers = bins.below(counts, limits.astype(np.float64))
        size = counts.sum(1, keepdims=True)
        shares = np.empty(below.shape)
        shares[:, 0::2] = (below[:, 0::2] - counts[:, :1]) / size
        shares[:, 1::2] = (size - below[:, 1::2]) / size
        lowest = [exponent_range(dtype)[0] - bins.lowest for dtype in self._dtypes]
        return shares[:, :, None], _trimmed(bins.powers(), powers.astype(np.float64), np.array(lowest))


def on_host(device: torch.device) -> bool:
    """Tell whether tensors of a device may be read without waiting for it."""
    return device.type == "cpu"


def _finish(counted: Iterable[CountedFormats]) -> None:
    with without_autograd():
        for each in counted:
            each.finish()


def _scale_of(largest: Any, form: LowPrecisionFormat) -> Any:
    """Return the scale "amax" of tensors whose largest finite magnitudes these are: `amax_scale`, or the same on the device."""
    if not isinstance(largest, Tensor):
        return amax_scale(largest, form)
    factor = (form.largest / largest).clamp_max(torch.finfo(largest.dtype).max)
    return torch.where(largest > 0, factor, 1.0)


def _trimmed(edges: F64, counts: F64, lowest: npt.NDArray[np.int64]) -> list[tuple[F64, F64]]:
    """Return (edges [n + 1], counts [n]) of each row of magnitudes per power of two, from the smallest to the largest there is.

    edges: [bins + 1]. counts: [rows, bins]. lowest: [rows], the bin that is reported for a row without any.
    """
    there = counts > 0
    some = there.any(1)
    first = np.where(some, there.argmax(1), lowest).tolist()
    last = np.where(some, there.shape[1] - there[:, ::-1].argmax(1), lowest + 1).tolist()
    return [(edges[i : j + 1], row[i:j]) for i, j, row in zip(first, last, counts, strict=True)]
