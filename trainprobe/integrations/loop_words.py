"""Messages about a loop without instrumentation: updates cannot be seen, or there are none."""

from __future__ import annotations

from typing import Any

from trainprobe.engine.core.naming import chunks_of

OWN_UPDATES = (
    "the weights change and no optimizer of torch.optim makes the update: a step ends where a forward follows a backward and "
    "the weights have changed; gradients, updates and optimizer state cannot be seen"
)
NO_UPDATE = (
    "{} forwards of the model in training mode and no update: nothing more is collected until an optimizer of "
    "torch.optim updates it; if this is no training, call model.eval() or attach to the model that trains"
)
NO_MODEL = (
    "{} and no model: nothing was watched. Hand the model to trainprobe.watch or to trainprobe.integrations.torch_loop.attach."
)
NO_STEP = "No step was seen: put `with probe.step():` around the forward, the backward and the update of each step."
SKIPPED = (
    "Not judged: at least {} at the end with gradients enabled, which no backward pass and no update followed; a loop that "
    "skips steps whose loss is not finite does so."
)
JOINED = (
    "step {} holds a forward pass that no backward pass used: it is recorded as a part of this step; a loop does so that "
    "skips steps whose loss is not finite, or that acts or samples without torch.no_grad()"
)
ALL_JOINED = "Recorded as parts of the step that followed: forward passes that no backward pass used, of {}."


def no_update(model: Any, own: int) -> str:
    """Return the sentence for a model that no optimizer of torch.optim updated. own: its updates by other means."""
    seen = f", {own} by other means" if own else ""
    return f"No update of {type(chunks_of(model)[0]).__name__} by an optimizer of torch.optim was seen{seen}."
