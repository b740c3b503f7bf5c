"""Which modules apply a dropout as in training, seen at the functions of `torch.nn.functional` while they are replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import functional

from trainprobe.engine.capture.patching.replaced import Replaced

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_ATTENTION = "scaled_dot_product_attention"


class DropoutWatch:
    """Calls `applied()` whenever a dropout that drops something is called, between `start` and `stop`."""

    def __init__(self, applied: Callable[[], None]) -> None:
        self._applied = applied
        self._replaced: list[Replaced] = []

    def start(self) -> None:
        """Begin to listen."""
        pairs = [(name, _drops) for name in _DROPOUTS] + [(_ATTENTION, _attention_drops)]
        self._replaced = [
            Replaced(functional, name, self._watched(getattr(functional, name), drops), traced=True) for name, drops in pairs
        ]

    def stop(self) -> None:
        """Put the functions back."""
        for replaced in self._replaced:
            replaced.back()
        self._replaced = []

    def _watched(self, original: Any, drops: Callable[..., bool]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not call.ended and drops(*args, **kwargs):  # type: ignore[attr-defined]
                self._applied()
            return original(*args, **kwargs)

        return call


def _drops(_input: Any = None, p: Any = 0.5, training: Any = True, *_: Any, **_kwargs: Any) -> bool:
    return bool(training) and p > 0


def _attention_drops(*args: Any, **kwargs: Any) -> bool:
    return (kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0) or 0.0) > 0
