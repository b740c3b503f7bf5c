"""The share of units that are silent: |x| <= limit for every token or image of a call.

A unit is an index of the last dimension, or of the second one of tensors of four and more dimensions [batch, channels, …].
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trainprobe.engine.capture.features.feature import QuietFeature, Surroundings, tensors_of, whole


class DeadUnits(QuietFeature):
    """See the module text."""

    def __init__(self, around: Surroundings, *, every: int = 1, limit: float = 0.0) -> None:
        super().__init__(around, every=every)
        self._limit = limit

    def wants(self, name: str, module: Any) -> bool:
        """Look at the outputs of chosen modules."""
        return self._chosen(name)

    def before(self, name: str, module: Any, args: Any, kwargs: Any) -> Any:
        """Have `after` called."""
        return True

    def after(self, name: str, module: Any, before: Any, out: Any) -> None:
        """Tell the share for each tensor that comes out."""
        outputs = tensors_of(out)
        for i, t in enumerate(outputs):
            if self._tape is not None and whole(t) and t.is_floating_point() and t.dim() >= 2:
                number = f".{i}" if len(outputs) > 1 else ""
                self._tape.feature(name, f"dead_units.output{number}", dead_share(t, self._limit))


def dead_share(t: Tensor, limit: float) -> Tensor:
    """Return the share of silent units of float [..., units] or [batch, units, …] of four and more dimensions."""
    unit = 1 if t.dim() >= 4 else t.dim() - 1
    largest = t.detach().float().abs().amax([d for d in range(t.dim()) if d != unit])
    return (largest <= limit).float().mean()
