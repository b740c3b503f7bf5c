"""One step of a loop without instrumentation: what it has seen so far, and whether its update has been made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainprobe.engine.capture.gradients import sequence_number
from trainprobe.integrations.own_updates import Gradients, Weights


@dataclass(slots=True)
class Step:
    """What a step has seen so far.

    entry: id of the module whose call began it. weights: as they were then, until an optimizer of torch.optim was seen.
    gradients: as backward passes leave them, of a step that began before that. cleared: the program has cleared some.
    forwards: calls of `entry`. backward: whether a backward has ended since the last forward. stepped: ids of what optimizers
    have stepped. follows: whether each forward is looked at. nodes: the number of autograd's next node as it began.
    """

    entry: int
    weights: Weights | None
    gradients: Gradients | None = None
    cleared: bool = False
    forwards: int = 0
    backward: bool = False
    stepped: set[int] = field(default_factory=set[int])
    follows: bool = False
    nodes: int = field(default_factory=sequence_number)

    def has_own_update(self) -> bool:
        """Return whether the weights have changed since a backward, though no optimizer of torch.optim has stepped."""
        return self.backward and self.weights is not None and self.weights.changed()

    def uses_later_losses(self) -> bool:
        """Return whether its update uses no gradients that were cleared before. True once at most."""
        cleared, self.cleared = self.cleared, False
        return cleared and self.gradients is not None and self.gradients.are_used_alone()

    def made(self) -> int:
        """Return how many nodes of autograd's graph were made since it began."""
        return sequence_number() - self.nodes

    def waits(self, parameters: Mapping[int, Any], held: Iterable[set[int]]) -> bool:
        """Return whether a gradient is there for an optimizer that has not stepped.

        parameters: id → parameter of the model. held: ids of what each of the model's optimizers steps.
        """
        known = set[int]().union(*held)
        left = (p for number, p in parameters.items() if number not in self.stepped and p.requires_grad)
        return any(id(p) in known or (p.is_leaf and p.grad is not None) for p in left)
