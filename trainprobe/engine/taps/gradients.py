"""Gradients at the inputs and outputs of a part of the model, read beside the autograd graph and never inside it.

The gradient at an output is what arrives at the autograd node that made it: a pre-hook on that node sees it. The gradient at
an input is this part's own contribution, as a full-backward hook would report it: the sum of what flows along those edges of
the graph that end in the input's own edge and start at nodes made *inside* the part. Such nodes are known by their
sequence numbers, which autograd hands out in the order of creation: those made inside carry a number at or above the
one at entry. A full-backward hook would instead put an identity node around the part, and so change the order in
which gradients are added: other bits, another training.

Node hooks see tensors and return None; they insert nothing, change no value and leave with the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import _get_sequence_nr  # pyright: ignore[reportPrivateImportUsage]
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy

from trainprobe.engine.arrays.torch_apart import apart

sequence_number: Callable[[], int] = _get_sequence_nr

__all__ = ["Contribution", "Edge", "Graph", "edge_of", "node_of", "sequence_number"]

Edge = tuple[Any, int]
Arrive = Callable[[Any], None]


def node_of(t: Any) -> Any | None:
    """Return the autograd node that made a tensor, or None; a view that autograd itself refuses to place has none."""
    try:
        return t.grad_fn
    except RuntimeError:  # made under no_grad, base written in place with grad on: autograd raises on the question
        return None


def edge_of(t: Any) -> Edge | None:
    """Return the gradient edge (node, output number) of a tensor, or None when no gradient reaches it."""
    if not t.requires_grad:
        return None
    node = node_of(t)
    if node is not None:
        return node, t.output_nr
    if not t.is_leaf or is_lazy(t):  # an accumulator that is made for a parameter without a shape refuses its gradient
        return None
    with apart(within_transforms=True):
        try:
            edge = get_gradient_edge(t)  # it makes a view
        except RuntimeError:  # which sparse and nested leaves do not have
            with torch.enable_grad():
                return t.clone().grad_fn.next_functions[0]
    return edge.node, edge.output_nr


class Graph:
    """What is known of the autograd graph of the forward that is running: who consumes which edge.

    Each node is visited once a step. Nodes are held only while the outermost part runs (the graph holds them
    anyway), so that their ids cannot be reused.
    """

    def __init__(self) -> None:
        self._visited: dict[int, Any] = {}
        self._outside: dict[int, Any] = {}
        self._consumers: dict[tuple[int, int], list[tuple[Any, int, int]]] = {}

    def visit(self, roots: Sequence[Any], floor: int) -> None:
        """Walk from nodes `roots` towards the inputs, through nodes numbered `floor` or above that were not visited yet.

        A node below the floor lies outside the part that just returned; it waits for the enclosing part, whose floor is lower.
        """
        visited, consumers = self._visited, self._consumers
        walk = [*roots, *self._outside.values()]
        outside: dict[int, Any] = {}
        while walk:
            node = walk.pop()
            key = id(node)
            if key in visited:
                continue
            number = node._sequence_nr()
            if number < floor:
                outside[key] = node
                continue
            visited[key] = node
            for i, (parent, slot) in enumerate(node.next_functions):
                if parent is not None:
                    consumers.setdefault((id(parent), slot), []).append((node, i, number))
                    walk.append(parent)
        self._outside = outside

    def consumers(self, edge: Edge, floor: int) -> list[tuple[Any, int]]:
        """Return (node, input number) for every visited node numbered `floor` or above that consumes `edge`."""
        found = self._consumers.get((id(edge[0]), edge[1]), ())
        return [(node, i) for node, i, number in found if number >= floor]

    def clear(self) -> None:
        """Let go of the nodes; called when the outermost part has returned."""
        self._visited.clear()
        self._outside.clear()
        self._consumers.clear()


def plus(total: Any, gradient: Any) -> Any:
    """Return the sum of two gradients, out of place and in their own dtype; no part of any graph."""
    with apart(within_transforms=True):
        if not torch.is_grad_enabled():  # as mostly in a backward pass: to switch it off takes longer than the sum
            return total + gradient
        with torch.no_grad():
            return total + gradient


class Contribution:
    """Sums what the consumers of one input send back and hands on the sum when the last one has sent.

    With one consumer nothing is computed. With several the sum is taken out of place, in the order of arrival and in the
    gradients' own dtype, which is what autograd itself would have done for an identity node at this input.
    """

    __slots__ = ("_arrive", "_left", "_sum")

    def __init__(self, consumers: int, arrive: Arrive) -> None:
        self._left = consumers
        self._sum: Any = None
        self._arrive = arrive

    def add(self, gradient: Any) -> None:
        """Take one consumer's gradient; None (no gradient along this edge) counts as sent."""
        if self._left <= 0:
            return  # a second backward through a retained graph: the first one is what was recorded
        if gradient is not None:
            if self._sum is None:
                self._sum = gradient
            else:
                self._sum = plus(self._sum, gradient)
        self._left -= 1
        if self._left == 0:
            self.flush()

    def flush(self) -> None:
        """Hand on what has arrived."""
        if self._sum is not None:
            total, self._sum = self._sum, None
            self._left = 0
            self._arrive(total)
