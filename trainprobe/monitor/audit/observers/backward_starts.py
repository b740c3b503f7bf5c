"""When the backward passes of a step begin and end, from what, and whether gradients were cleared after that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._C import _current_graph_task_id

from trainprobe.engine.capture.optimizers import parameters_of
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.held_parameters import parameters_in
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.facts.gradients import Backwards
from trainprobe.monitor.audit.observers import StepReplacing


def owned(owner: Any) -> Iterable[Any]:
    """Return the parameters of what `cleared` is told of: an optimizer or a module."""
    return parameters_of(owner) if hasattr(owner, "param_groups") else parameters_in([owner])


class BackwardStarts(StepReplacing):
    """Tells the other observers when a backward pass begins and ends, and when gradients are cleared.

    count: how many passes have begun; one that runs within another (reentrant checkpointing) is a part of it. unused: those
    since the last update, or since their gradients were cleared for good. was_cleared: whether `zero_grad` came after the
    first.
    """

    essential = True

    def forget(self) -> None:
        """Forget the last step."""
        self.count, self.unused, self.was_cleared = 0, 0, False

    def replaced(self) -> Iterator[Replaced]:
        """Replace `torch.autograd.backward` and the two `zero_grad`."""
        yield Replaced(torch.autograd, "backward", self._backward(torch.autograd.backward))
        for owner in (torch.optim.Optimizer, torch.nn.Module):
            yield Replaced(owner, "zero_grad", self._clearing(owner.zero_grad))

    def stepped(self) -> None:
        """An update has used what there was."""
        self.unused = 0

    def facts(self, step_data: StepData) -> Backwards:
        """Return how many passes there were."""
        return Backwards(self.count)

    def _backward(self, original: Any) -> Any:
        def backward(*args: Any, **kwargs: Any) -> Any:
            within = torch.compiler.is_compiling() or _current_graph_task_id() != -1
            if not backward.ended and not within:  # type: ignore[attr-defined]
                self.count += 1
                if self.count == 1:
                    self._guard.run(self._audited.notify, "first_backward")
                self._guard.run(lambda: self._audited.notify("backward_begins", _root(args, kwargs)))
                self.unused += 1
                result = original(*args, **kwargs)
                self._guard.run(self._audited.notify, "backward_ends")
                return result
            return original(*args, **kwargs)

        return backward

    def _clearing(self, original: Any) -> Any:
        def zero_grad(*args: Any, **kwargs: Any) -> Any:
            if self.count and not zero_grad.ended:  # type: ignore[attr-defined]
                self.was_cleared = True
                self._guard.run(self._audited.notify, "cleared", args[0])
            return original(*args, **kwargs)

        return zero_grad


def _root(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the one number that a backward pass begins from, or None where it begins from more."""
    tensors = args[0] if args else kwargs.get("tensors")
    single = next(iter(tensors)) if isinstance(tensors, list | tuple) and len(tensors) == 1 else tensors
    weights = args[1] if len(args) > 1 else kwargs.get("grad_tensors")
    return single if isinstance(single, torch.Tensor) and single.numel() == 1 and weights is None else None
