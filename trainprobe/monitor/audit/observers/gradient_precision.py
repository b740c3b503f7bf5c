"""Whether gradients of float32 are rounded between the last backward pass and the update.

A sample of what a pass left is kept until the update; what is counted goes to the host with all else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainprobe.engine.arrays.torch_arrays import reason_without_statistics
from trainprobe.engine.arrays.without_dispatch import in_a_transform, without_dispatch
from trainprobe.engine.core.library import Deferred
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.observers import Observer
from trainprobe.monitor.audit.observers.backward_starts import BackwardStarts
from trainprobe.monitor.audit.relations.rounded_gradients import GradientPrecision

_MOST, _SAMPLE, _FEWEST = 8, 1024, 16  # parameters, elements of each, and elements with further bits
_FORMATS = (torch.bfloat16, torch.float16)


class GradientPrecisionWatch(Observer):
    """See the module text."""

    needs = (BackwardStarts,)

    def forget(self) -> None:
        """Forget the last step."""
        self._left: dict[int, Tensor] = {}  # id of a parameter → elements of what the last pass left
        self._seen: dict[str, Deferred] = {}

    def end(self) -> None:
        """Hold nothing."""
        self._left = {}

    def backward_ends(self) -> None:
        """Keep a sample of the gradients that a pass left."""
        if not self._audited.plain or self._audited.tape is None or in_a_transform():
            return
        names = self._audited.names()
        held = [p for model in self._audited.models for p in model.parameters() if id(p) in names and _is_plain(p.grad)]
        held.sort(key=lambda p: -p.numel())
        self._left = {id(p): _sample(p.grad).clone() for p in held[:_MOST]}

    def unclipped(self, parameters: Sequence[Any]) -> None:
        """Set what is about to be used against it."""
        tape, names = self._audited.tape, self._audited.names()
        if tape is None or in_a_transform():
            return
        for p in parameters:
            left = self._left.pop(id(p), None)
            if left is not None and _is_plain(p.grad) and p.grad.device == left.device:
                with without_dispatch(), torch.no_grad():
                    used, found = _sample(p.grad), list[Tensor]()
                    for dtype in _FORMATS:
                        rounded = left.to(dtype).float()
                        found += [(rounded != left).sum(), (rounded != used).sum()]
                    self._seen[names[id(p)]] = tape.defer(torch.stack(found).float())

    def facts(self, step_data: StepData) -> GradientPrecision:
        """Return the parameters whose gradients were rounded."""
        rounded: list[tuple[str, str]] = []
        for name, deferred in self._seen.items():
            numbers = [] if deferred.numbers is None else deferred.numbers.tolist()
            for dtype, further, off in zip(_FORMATS, numbers[::2], numbers[1::2], strict=False):
                if further >= _FEWEST and not off:
                    rounded.append((name, str(dtype).removeprefix("torch.")))
                    break
        return GradientPrecision(tuple(rounded), len(self._seen))


def _is_plain(grad: Any) -> bool:
    return type(grad) is Tensor and grad.dtype == torch.float32 and not reason_without_statistics(grad)


def _sample(grad: Tensor) -> Tensor:
    """Return elements at even distances."""
    with without_dispatch(), torch.no_grad():
        return grad.detach().reshape(-1)[:: max(1, grad.numel() // _SAMPLE)][:_SAMPLE]
