"""One step of a loop without instrumentation: what it has seen so far, and whether its update has been made."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainprobe.engine.capture.gradients import node_of, sequence_number
from trainprobe.integrations.own_updates import OwnGradients, Weights

_MOST = 100_000  # nodes of a graph that are looked at


@dataclass(slots=True)
class LoopStep:
    """What a step has seen so far.

    entry: id of the module whose call began it. weights: as they were then, until an optimizer of torch.optim was seen.
    gradients: as backward passes leave them, of a step that began before that. cleared: the program has cleared some.
    forwards: calls of `entry`. backward: whether a backward has ended since the last forward. stepped: ids of what optimizers
    have stepped. scaled: a GradScaler was asked to step one of them. follows: whether each forward is looked at. nodes: the
    number of autograd's next node as it began. since: that number after the last backward. unused: numbers of nodes of which
    no loss has used the first half. compiled: frames that `torch.compile` had traced by then, which makes nodes, too.
    """

    entry: int
    weights: Weights | None
    gradients: OwnGradients | None = None
    cleared: bool = False
    forwards: int = 0
    backward: bool = False
    stepped: set[int] = field(default_factory=set[int])
    scaled: bool = False
    follows: bool = False
    nodes: int = field(default_factory=sequence_number)
    since: int = field(default_factory=sequence_number)
    unused: list[range] = field(default_factory=list[range])
    compiled: int = field(default_factory=lambda: _compiled_frames())

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

    def makes(self, loss: Any, usual: int) -> int:
        """Return how many nodes of the graph were made since the last backward, for a loss and whatever came before it.

        usual: the smallest such number of this training. Where they may be those of two forward passes, the loss's graph says
        whether it depends on the first half; if not, they are kept in `unused` until another loss does.
        """
        made = range(self.since, sequence_number())
        before, self.compiled = self.compiled, _compiled_frames()
        if before != self.compiled:
            return len(made)
        if self.unused or not usual or may_be_two(len(made), usual):
            first = _first_used(loss, min([made.start, *(before.start for before in self.unused)]))
            self.unused = [before for before in self.unused if 2 * first > before.start + before.stop]
            if 2 * first >= made.start + made.stop:
                self.unused.append(made)
        return len(made)

    def waits(self, parameters: Mapping[int, Any], held: Iterable[set[int]]) -> bool:
        """Return whether a gradient is there for an optimizer that has not stepped.

        parameters: id → parameter of the model. held: ids of what each of the model's optimizers steps.
        """
        known = set[int]().union(*held)
        left = (p for number, p in parameters.items() if number not in self.stepped and p.requires_grad)
        return any(id(p) in known or (p.is_leaf and p.grad is not None) for p in left)


def _compiled_frames() -> int:
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return counters["frames"]["total"] if counters else 0


def may_be_two(made: int, usual: int) -> bool:
    """Return whether so many nodes may be those of two forward passes, where one takes the usual number."""
    return 2 * made >= 3 * usual


def _first_used(loss: Any, since: int) -> int:
    """Return the least number from `since` on of the nodes that a loss depends on, 0 where the graph is too large."""
    waiting, seen, first = [node_of(loss)], set[Any](), sequence_number()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        number = node._sequence_nr()
        if len(seen) > _MOST:
            return 0
        if number >= since:  # what is older was made before, and depends on nothing that is younger
            first = min(first, number)
            waiting += [edge[0] for edge in node.next_functions]
    return first
