"""Level debug on torch tensors; see `saved_values`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C import DisableTorchFunction

from trainprobe.engine.capture.gradients import edge_of
from trainprobe.engine.capture.saved_values import SavedValues


class SavedTap(SavedValues):
    """Records saved torch tensors; the gradient at one is what arrives at the node that made it."""

    def hook(self, t: Any, seen: Callable[[Any], None]) -> Any:
        """See the base class."""
        edge = edge_of(t)
        return None if edge is None else edge[0].register_prehook(lambda gradients: seen(gradients[edge[1]]))

    def save(self, value: Any, name: str, save_backward: bool = True) -> None:
        """See the base class."""
        with DisableTorchFunction():
            super().save(value, name, save_backward)

    def record(self, name: str, number: int, path: tuple[str | int, ...], gradient: Any) -> None:
        """See the base class."""
        with DisableTorchFunction():
            super().record(name, number, path, gradient)
