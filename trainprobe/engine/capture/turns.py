"""Optimizers that take turns: each steps after a forward pass of its own, as adversaries and alternating objectives do.

Torch numbers the nodes of its autograd graphs. Between the steps of two optimizers that share one backward pass (matrices by
Muon, the rest by AdamW) that number stands still.
"""

from __future__ import annotations

import weakref
from typing import Any

from trainprobe.engine.capture.gradients import sequence_number


class Turns:
    """Tells how many optimizers take turns, once one of them has stepped, then another, then the first again."""

    def __init__(self) -> None:
        self._last: weakref.ref[Any] | None = None
        self._number = -1
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._taking: weakref.WeakSet[Any] = weakref.WeakSet()

    def step(self, optimizer: Any) -> int:
        """Return how many take turns, 0 where none do. The optimizer is about to step."""
        last, number = self._last() if self._last is not None else None, sequence_number()
        if last is not None and last is not optimizer and optimizer in self._stepped and number != self._number:
            self._taking.update((last, optimizer))
        self._stepped.add(optimizer)
        self._last, self._number = weakref.ref(optimizer), number
        return len(self._taking)
