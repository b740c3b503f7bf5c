"""Checks that a watched loop has the steps, the model and the optimizer that `watch` was given."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from trainprobe.engine.capture.patching.step_hooks import StepListener, settle
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.naming import chunks_of
from trainprobe.engine.core.records import Finding
from trainprobe.integrations.left_out import LeftOut
from trainprobe.integrations.live_modules import model_of, parameters_of
from trainprobe.integrations.loop_words import NO_STEP


class LoopChecks:
    """Listens to updates until one is of the model that was given."""

    def __init__(self, model: Any, guard: Guard) -> None:
        self._models: list[Any] = chunks_of(model)
        self._own = False
        self._others = LeftOut()
        self._listener = StepListener(after=partial(guard.run, self._stepped))
        guard.on_trip(self.close)

    def close(self) -> None:
        """Listen no more."""
        self._listener.remove()
        settle()

    def sentence(self, steps: int, judged: bool) -> str:
        """Return what the end of the run has to say; empty where the loop was as declared.

        steps: how many began. judged: whether the plan has a monitor or an audit, which expect updates.
        """
        name, others = type(self._models[0]).__name__, self._others.trained()
        if not steps:
            return NO_STEP
        if self._own or not (others or judged):
            return ""
        if others:
            return (
                f"Nothing updated {name}, the model that was given; trained here: {others}. Give watch the model that trains."
            )
        return (
            f"No update of {name} by an optimizer of torch.optim was seen: gradients, updates and optimizer state are missing."
        )

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._own and not any(holds_any(optimizer, model) for model in self._models) and self._is_another(optimizer):
            self._others.saw(optimizer)
        elif not self._own:
            self._own = True
            self._listener.remove()

    def _is_another(self, optimizer: Any) -> bool:
        """Return whether what it holds is another model's: parameters of no module may be copies in a higher precision."""
        return optimizer in self._others or model_of(optimizer) is not None


def holds_any(optimizer: Any, model: Any) -> bool:
    """Return whether an optimizer holds parameters of a model."""
    own = parameters_of(model)
    return any(id(p) in own for group in optimizer.param_groups for p in group["params"])


def wrong_optimizers(model: Any, optimizer: Any) -> Iterator[Finding]:
    """Yield a finding for each optimizer that holds another model's parameters and none of this one's."""
    models = chunks_of(model)
    for given in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
        if not hasattr(given, "param_groups") or any(holds_any(given, m) for m in models):
            continue
        other = model_of(given)
        if other is not None:
            yield Finding(
                "probe",
                "warning",
                f"the {type(given).__name__} that was given holds no parameter of {type(models[0]).__name__}, the model that "
                f"was given, but those of another {type(other).__name__}",
                next="make the optimizer of the parameters of the model that trains, after that was copied or wrapped; give "
                "both to watch",
            )
