"""When gradients are multiplied by a loss scale: torch's gradient scalers, watched only while a step is collected."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from trainprobe.engine.capture import Tap
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.tape import Tape


class LossScalingTap(Tap):
    """Calls `scaled(scale)` when a loss is multiplied, with the tensor of one element it is multiplied by, and `unscaled()`
    once gradients are divided by it again.
    """

    def __init__(self, guard: Guard, scaled: Callable[[Any], None], unscaled: Callable[[], None]) -> None:
        self._guard = guard
        self._scaled = scaled
        self._unscaled = unscaled
        self._replaced: list[Replaced] = []

    def begin(self, tape: Tape) -> None:
        """Replace the methods."""
        if self._replaced:
            return
        sharded = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")
        kinds: list[Any] = [torch.amp.GradScaler, *([sharded.ShardedGradScaler] if sharded is not None else [])]
        for kind in kinds:
            self._replaced.append(Replaced(kind, "scale", self._around_scale(kind.scale)))
            self._replaced.append(Replaced(kind, "unscale_", self._around_unscale(kind.unscale_)))

    def end(self, again: bool = False) -> None:
        """Put the methods back."""
        for replaced in reversed(self._replaced):
            replaced.back()
        self._replaced.clear()

    def _around_scale(self, original: Any) -> Any:
        def scale(scaler: Any, outputs: Any) -> Any:
            result = original(scaler, outputs)
            if not scale.ended and scaler.is_enabled() and scaler._scale is not None:  # type: ignore[attr-defined]
                self._guard.run(self._scaled, scaler._scale)
            return result

        return scale

    def _around_unscale(self, original: Any) -> Any:
        def unscale_(scaler: Any, optimizer: Any) -> Any:
            result = original(scaler, optimizer)
            if not unscale_.ended and scaler.is_enabled():  # type: ignore[attr-defined]
                self._guard.run(self._unscaled)
            return result

        return unscale_
