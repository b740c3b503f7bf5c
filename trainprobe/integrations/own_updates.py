"""Updates that no optimizer of torch.optim makes: `p.data.add_(p.grad, alpha=-lr)`, or another library's optimizer."""

from __future__ import annotations

from typing import Any

import torch

from trainprobe.engine.arrays.without_dispatch import without_dispatch
from trainprobe.integrations.live_modules import parameters_of

ELEMENTS = 1 << 20  # of weights that are copied to be compared


class Weights:
    """The smallest trainable parameters of a model as they were, to tell whether somebody has changed them since."""

    def __init__(self, model: Any) -> None:
        self._model = model
        known = parameters_of(model)
        self._numbers, parameters = known.keys(), known.values()
        self._before: list[tuple[Any, Any]] = []
        with without_dispatch(within_transforms=True), torch.no_grad():
            room = ELEMENTS
            for p in sorted((p for p in parameters if _readable(p)), key=lambda p: p.numel()):
                room -= p.numel()
                if room < 0 and self._before:
                    break
                self._before.append((p, p.detach().flatten()[:ELEMENTS].clone()))

    def changed(self) -> bool:
        """Return whether any of them has other bits now, or the model other parameters. Waits for the device."""
        if parameters_of(self._model).keys() != self._numbers:
            return True
        with without_dispatch(within_transforms=True), torch.no_grad():
            return any(_differ(p.detach().flatten()[:ELEMENTS], before) for p, before in self._before)


def _differ(now: Any, before: Any) -> bool:
    if now.shape != before.shape or now.dtype != before.dtype:
        return True
    same = (now == before) | ((now != now) & (before != before))
    return not bool(same.all())


def _readable(p: Any) -> bool:
    return p.requires_grad and type(p) in (torch.nn.Parameter, torch.Tensor) and not p.is_meta and p.layout == torch.strided
