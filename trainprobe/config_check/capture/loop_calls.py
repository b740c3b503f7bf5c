"""What a training loop calls beside model and optimizer: gradient clipping and loss scalers."""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any

import torch
from torch.nn.utils import clip_grad

from trainprobe.config_check.capture.patches import Patches, after, before
from trainprobe.config_check.capture.plain_values import plain
from trainprobe.config_check.capture.setting_files import source
from trainprobe.engine.core.guard import Guard

CLIPPING = ("clip_grad_norm_", "clip_grad_value_")
_SPEED = frozenset({"foreach", "parameters"})
GROWTH = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}  # as torch has them by default


class LoopWatch:
    """Sees with which settings gradients are clipped, and the loss scalers that are made."""

    def __init__(self, guard: Guard) -> None:
        self._patches = Patches()
        self._guard = guard
        self._clipping: dict[str, dict[str, Any]] = {}
        self._scalers: list[weakref.ref[Any]] = []

    def install(self) -> None:
        """Replace the functions, wherever they have been imported by name, and the constructor."""
        for name in CLIPPING:
            signature = inspect.signature(getattr(clip_grad, name))
            self._patches.replace(clip_grad, name, before(functools.partial(self._clip, name, signature)))
        self._patches.replace(torch.amp.GradScaler, "__init__", after(self._made))
        self._patches.spread()

    def remove(self) -> None:
        """Put everything back."""
        self._patches.undo()

    def _clip(self, name: str, signature: inspect.Signature, /, *args: Any, **kwargs: Any) -> None:
        if name not in self._clipping and not torch.compiler.is_compiling():
            self._guard.run(self._take, name, signature, args, kwargs)

    def _take(self, name: str, signature: inspect.Signature, args: Any, kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        self._clipping[name] = {k: plain(v) for k, v in bound.arguments.items() if k not in _SPEED}

    def _made(self, _: None, scaler: Any, /, *args: Any, **kwargs: Any) -> None:
        self._scalers.append(weakref.ref(scaler))

    def sources(self) -> list[dict[str, Any]]:
        """Return one source of settings for clipping, and one a loss scaler."""
        clipping = {"function": " and ".join(sorted(self._clipping)) or None}
        for values in self._clipping.values():
            clipping |= values
        alive = [scaler for ref in self._scalers if (scaler := ref()) is not None]
        found = [source("scaler", str(index), _scaler_values(scaler)) for index, scaler in enumerate(alive)]
        return [source("clipping", "torch.nn.utils", clipping), *found] if self._clipping else found


def _scaler_values(scaler: Any) -> dict[str, Any]:
    """Return the first loss scale, `off` for a scaler that does nothing, and how it grows where that is not torch's way."""
    if not scaler.is_enabled():
        return {"loss_scale": "off"}
    growth = {name: getattr(scaler, f"_{name}", None) for name in GROWTH}
    return {"loss_scale": getattr(scaler, "_init_scale", None), **({} if growth == GROWTH else growth)}
