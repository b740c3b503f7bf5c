"""Level debug on MindSpore tensors; see `saved_values`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainprobe.engine.capture.mindspore.tensor_hooks import hooked
from trainprobe.engine.capture.saved_values import SavedValues


class SavedTensors(SavedValues):
    """Records saved MindSpore tensors; the gradient at one is the whole gradient that arrives there."""

    def hook(self, t: Any, seen: Callable[[Any], None]) -> Any:
        """See the base class."""
        return hooked(t, seen)
