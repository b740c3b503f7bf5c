"""When the first backward pass of a step begins, and whether gradients were cleared after that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainprobe.engine.guard import Guard
from trainprobe.engine.taps.replaced import Replaced


class BackwardStarts:
    """Calls `first` before the first backward pass of a step.

    count: how many there were. cleared: whether `zero_grad` came after the first.
    """

    def __init__(self, guard: Guard, first: Callable[[], None]) -> None:
        self.count = 0
        self.cleared = False
        self._guard = guard
        self._first = first
        self._replaced: list[Replaced] = []

    def begin(self) -> None:
        """Replace `torch.autograd.backward` and the two `zero_grad`."""
        self.count, self.cleared = 0, False
        if self._replaced:
            return
        self._replaced = [
            Replaced(torch.autograd, "backward", self._backward(torch.autograd.backward)),
            *(
                Replaced(owner, "zero_grad", self._clearing(owner.zero_grad))
                for owner in (torch.optim.Optimizer, torch.nn.Module)
            ),
        ]

    def end(self) -> None:
        """Put them back."""
        for replaced in self._replaced:
            replaced.back()
        self._replaced = []

    def _backward(self, original: Any) -> Any:
        def backward(*args: Any, **kwargs: Any) -> Any:
            if not backward.ended and not torch.compiler.is_compiling():  # type: ignore[attr-defined]
                self.count += 1
                if self.count == 1:
                    self._guard.run(self._first)
            return original(*args, **kwargs)

        return backward

    def _clearing(self, original: Any) -> Any:
        def zero_grad(*args: Any, **kwargs: Any) -> Any:
            if self.count:
                self.cleared = True
            return original(*args, **kwargs)

        return zero_grad
