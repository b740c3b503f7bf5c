"""Updates that no optimizer of torch.optim makes (`p.data.add_(p.grad, alpha=-lr)`), and gradients that no update uses."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch

from trainprobe.engine.arrays.without_dispatch import without_dispatch
from trainprobe.integrations.live_modules import parameters_of

ELEMENTS = 1 << 20  # of weights that are copied to be compared
ROUNDING = 1e-4  # of a squared cosine: gradients in 16 bits that were clipped are within it


class Weights:
    """The smallest trainable parameters of a model as they were, to tell whether somebody has changed them since."""

    def __init__(self, model: Any) -> None:
        self._model = model
        known = parameters_of(model)
        self._numbers, parameters = known.keys(), known.values()
        with without_dispatch(within_transforms=True), torch.no_grad():
            self._before = [(p, _sample(p).clone()) for p in _smallest(p for p in parameters if _readable(p))]

    def changed(self) -> bool:
        """Return whether any of them has other bits now, or the model other parameters. Waits for the device."""
        if parameters_of(self._model).keys() != self._numbers:
            return True
        with without_dispatch(within_transforms=True), torch.no_grad():
            return any(_differ(_sample(p), before) for p, before in self._before)


class OwnGradients:
    """The smallest gradients of a model as the latest backward left them, to tell whether an update uses those before it.

    A program may run forward and backward first, to learn what fits into memory, and clear the gradients.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._left: list[tuple[Any, Any]] = []

    def left(self) -> None:
        """Take what a backward has left. Waits for nothing."""
        with without_dispatch(within_transforms=True), torch.no_grad():
            having = (
                p
                for p in parameters_of(self._model).values()
                if _readable(p) and p.is_leaf and p.grad is not None and _readable(p.grad)
            )
            self._left = [(p, _sample(p.grad).clone()) for p in _smallest(having)]

    def are_cleared(self) -> bool:
        """Return whether the program has cleared them since. Waits for the device."""
        with without_dispatch(within_transforms=True), torch.no_grad():
            gone = bool(self._left) and all(p.grad is None or not bool(_sample(p.grad).any()) for p, _ in self._left)
            return gone and any(bool(left.any()) for _, left in self._left)

    def are_used_alone(self) -> bool:
        """Return whether the gradients are now what the latest backward left, or as much of it as clipping leaves."""
        with without_dispatch(within_transforms=True), torch.no_grad():
            if not self._left or any(p.grad is None or p.grad.numel() != p.numel() for p, _ in self._left):
                return False
            left = torch.cat([left.float() for _, left in self._left])
            used = torch.cat([_sample(p.grad).float() for p, _ in self._left])
            both, whole = left.dot(used), left.dot(left)
            parallel = both * both > (1 - ROUNDING) * whole * used.dot(used)
            return bool(parallel & (both > 0) & (both < (1 + ROUNDING) * whole))  # a sum of equal ones is more


def _differ(now: Any, before: Any) -> bool:
    if now.shape != before.shape or now.dtype != before.dtype:
        return True
    same = (now == before) | ((now != now) & (before != before))
    return not bool(same.all())


def _smallest(parameters: Iterable[Any]) -> list[Any]:
    ordered = sorted((p for p in parameters if p.requires_grad), key=lambda p: p.numel())
    sizes = accumulate(p.numel() for p in ordered)
    return [p for i, (p, size) in enumerate(zip(ordered, sizes, strict=True)) if size <= ELEMENTS or i == 0]


def _sample(x: Any) -> Any:
    return x.detach().flatten()[:ELEMENTS]


def _readable(x: Any) -> bool:
    return type(x) in (torch.nn.Parameter, torch.Tensor) and not x.is_meta and x.layout == torch.strided
