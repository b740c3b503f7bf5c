"""The loss of a step in a loop without instrumentation: what backward passes begin from, or what a GradScaler scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunction

from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.integrations.session import Session


class Losses:
    """Hands losses to `add`, and scales to the session that `session` returns.

    in_backward: how many backward passes are under way. backwards: those that were seen while there was no model.
    """

    def __init__(self, session: Callable[[], Session], add: Callable[[Any], None]) -> None:
        self._session = session
        self._add = add
        self._scaled = False
        self.in_backward = 0
        self.backwards = 0

    def scalers(self, asked: Callable[[Any], None], decided: Callable[[bool], None]) -> list[Replaced]:
        """Watch every GradScaler.

        asked: called with each optimizer that one is to step, before it decides. decided: called behind its update; given
        whether it was asked for any optimizer since the update before.
        """
        scaler = torch.amp.GradScaler
        return [
            Replaced(scaler, "scale", self._scale(scaler.scale)),
            Replaced(scaler, "step", _before_step(scaler.step, asked)),
            Replaced(scaler, "update", _after_update(scaler.update, decided)),
        ]

    def before_a_model(self, has_model: Callable[[], bool]) -> Replaced:
        """Count backward passes until a model is known, to say at the end if none was."""
        original = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            self.backwards += not has_model()
            return original(*args, **kwargs)

        return Replaced(torch.autograd, "backward", backward)

    def collecting(self, ended: Callable[[], None]) -> Replaced:
        """Add the scalars that backward passes begin from, until it is taken off. ended: called after each pass."""
        original = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not backward.ended and not self._scaled and is_scalar(tensors):  # type: ignore[attr-defined]
                self._add(tensors)
            self.in_backward += 1
            try:
                return original(tensors, *args, **kwargs)
            finally:
                self.in_backward -= 1
                ended()

        return Replaced(torch.autograd, "backward", backward)

    def _scale(self, original: Any) -> Any:
        def scale(scaler: Any, outputs: Any) -> Any:
            if not scale.ended and scaler.is_enabled():  # type: ignore[attr-defined]
                self._scaled = True  # what backward is then called on is no loss
                if is_scalar(outputs):
                    self._add(outputs)
                scaled = original(scaler, outputs)
                self._session().note("loss_scale", scaler._scale)
                return scaled
            return original(scaler, outputs)

        return scale


def _before_step(original: Any, asked: Callable[[Any], None]) -> Any:
    def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not step.ended:  # type: ignore[attr-defined]
            asked(optimizer)
        return original(scaler, optimizer, *args, **kwargs)

    return step


def _after_update(original: Any, decided: Callable[[bool], None]) -> Any:
    def update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        stepped = bool(getattr(scaler, "_per_optimizer_states", None))  # one that is off has none
        result = original(scaler, *args, **kwargs)
        if not update.ended:  # type: ignore[attr-defined]
            decided(stepped)
        return result

    return update


def is_scalar(x: Any) -> bool:
    """Return whether a value is a tensor of one element."""
    with DisableTorchFunction():
        return isinstance(x, torch.Tensor) and x.numel() == 1
