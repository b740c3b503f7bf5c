"""What a low-precision format would lose of activations, weights and gradients, and how their exponents are spread.

For each chosen format the share of all elements that would underflow and that would overflow under the scale
(see engine.stats.low_precision), and the count of elements per power of two. Scale "amax" is the largest number of the format
over the largest magnitude of the tensor, as Transformer Engine's current scaling has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainprobe.engine.arrays.torch_extras import exponent_counts
from trainprobe.engine.guard import Guard
from trainprobe.engine.stats.histogram import exponent_range
from trainprobe.engine.stats.low_precision import FORMATS, Format
from trainprobe.engine.tape import Tape
from trainprobe.engine.taps.features import Quiet, apart, tensors_of, whole
from trainprobe.engine.taps.gradients import edge_of

F64 = npt.NDArray[np.float64]


class FormatFeature(Quiet):
    """See the module text. slots: among output, grad_output, value, grad. parameters: id of parameter → recorded name."""

    def __init__(
        self,
        names: Callable[[str], bool],
        every: int,
        guard: Guard,
        parameters: Callable[[], Mapping[int, str]],
        *,
        formats: Sequence[str],
        slots: Sequence[str],
        scale: float | Literal["amax"] = 1.0,
        exponents: bool = True,
    ) -> None:
        super().__init__(names, every)
        self._guard = guard
        self._parameters = parameters
        self._formats = {name: FORMATS[name] for name in formats}
        self._slots = frozenset(slots)
        self._scale: float | Literal["amax"] = scale
        self._exponents = exponents
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

    def after(self, name: str, module: Any, told: Any, out: Any) -> None:
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
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        super().end()

    def _look_at_parameters(self, slot: str, of: Callable[[Any], Any]) -> None:
        names = self._parameters()
        for p in {id(p): p for model in self._models for p in model.parameters()}.values():
            name, t = names.get(id(p)), of(p)
            if name is not None and t is not None and self._chosen(name):
                self._look(name, slot, t)

    def _arrived(self, name: str, slot: str, place: int, gradients: Any) -> None:
        if self._tape is not None and gradients[place] is not None:
            with apart():
                self._guard.run(self._look, name, slot, gradients[place])

    def _look(self, name: str, slot: str, t: Any) -> None:
        if self._tape is None or not whole(t) or not t.is_floating_point():
            return
        magnitude = magnitudes(t)
        for form, told in self._formats.items():
            shares = lost_shares(magnitude, told, self._scale)
            self._tape.feature(name, f"underflow_{form}.{slot}", shares[0])
            self._tape.feature(name, f"overflow_{form}.{slot}", shares[1])
        if self._exponents:
            self._tape.feature(name, f"exponents.{slot}", exponent_counts(t.detach()), partial(powers, dtype=str(t.dtype)))


def magnitudes(t: Tensor) -> Tensor:
    """Return |x|, in float32 (float64 for float64)."""
    x = t.detach()
    return (x if x.dtype == torch.float64 else x.float()).abs()


def lost_shares(magnitude: Tensor, told: Format, scale: float | Literal["amax"]) -> tuple[Tensor, Tensor]:
    """Return the shares of all elements that underflow and that overflow, two numbers on the device."""
    x = magnitude
    if scale == "amax":
        largest = torch.where(x.isfinite(), x, 0.0).amax()
        factor = (told.largest / largest).clamp_max(torch.finfo(x.dtype).max)
        x = x * torch.where(largest > 0, factor, 1.0)
    elif scale != 1.0:
        x = x * scale
    under = (x <= told.smallest / 2).sum() - (magnitude == 0).sum()
    over = x > told.middle if told.even else x >= told.middle
    return under / x.numel(), over.sum() / x.numel()


def powers(counts: F64, dtype: str) -> tuple[F64, F64]:
    """Return (edges [n + 1], counts [n]) of magnitudes per power of two, from the smallest to the largest that is there.

    counts: as `exponent_counts` makes them, by sign; zeros and what is not finite have no power of two.
    """
    lowest, highest = exponent_range(dtype)
    n = highest - lowest + 1
    both = counts[:n] + counts[n : 2 * n]
    there = np.flatnonzero(both)
    first, last = (int(there[0]), int(there[-1]) + 1) if there.size else (0, 1)
    return np.ldexp(1.0, np.arange(lowest + first, lowest + last + 1)), both[first:last]
