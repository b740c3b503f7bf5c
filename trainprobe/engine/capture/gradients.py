"""Gradients at the inputs and outputs of a part of the model, read beside the autograd graph and never inside it.

The gradient of an output arrives at the autograd node that made it, where a pre-hook reads it. The gradient of an input is this
part's own contribution, as a full-backward hook would report it: the sum over those edges of the graph that lead from nodes
inside the part to the input's own edge. Autograd numbers its nodes in the order of creation, so nodes inside the part have a
sequence number at or above the one at entry. A full-backward hook would put an identity node around the part. That changes the
order in which gradients are added: different bits, a different training.

Node hooks see tensors and return None. They insert nothing, change no value and disappear with the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import _get_sequence_nr  # pyright: ignore[reportPrivateImportUsage]
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy

from trainprobe.engine.arrays.without_dispatch import without_dispatch

sequence_number: Callable[[], int] = _get_sequence_nr

__all__ = ["Edge", "edge_of", "node_of", "plus", "sequence_number"]

Edge = tuple[Any, int]


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
    with without_dispatch(within_transforms=True):
        try:
            edge = get_gradient_edge(t)  # it makes a view
        except RuntimeError:  # which sparse and nested leaves do not have
            with torch.enable_grad():
                return t.clone().grad_fn.next_functions[0]
    return edge.node, edge.output_nr


def plus(total: Any, gradient: Any) -> Any:
    """Return the sum of two gradients, out of place and in their own dtype; no part of any graph."""
    with without_dispatch(within_transforms=True):
        if not torch.is_grad_enabled():  # as mostly in a backward pass: to switch it off takes longer than the sum
            return total + gradient
        with torch.no_grad():
            return total + gradient


def hook_on_gradient(t: Any, seen: Callable[[Any], None]) -> Any:
    """Have `seen` called with what arrives at the node that made a tensor; return the hook's handle, None without a node."""
    edge = edge_of(t)
    return None if edge is None else edge[0].register_prehook(lambda gradients: seen(gradients[edge[1]]))


functions_off = torch._C.DisableTorchFunction  # a context in which no `__torch_function__` is called
