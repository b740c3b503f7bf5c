"""What the graph of a loss shows as its backward pass begins: probabilities normalised again, and terms without a gradient."""

from __future__ import annotations

from typing import Any

from trainprobe.engine.capture.graph import parameters_behind_node
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.facts.gradients import LossGraphs
from trainprobe.monitor.audit.observers import Observer
from trainprobe.monitor.audit.observers.backward_starts import BackwardStarts

_MOST = 4096  # nodes that are looked at
_SOFTMAX = ("SoftmaxBackward0", "SafeSoftmaxBackward0")
_ALIKE = ("ToCopyBackward0", "CloneBackward0", "AliasBackward0")  # hand on the numbers in their order
_SUMS = ("AddBackward0", "SubBackward0")
_FACTORS = ("MulBackward0", "DivBackward0", "NegBackward0", *_ALIKE)


class LossGraph(Observer):
    """Looks at the first pass of a step."""

    needs = (BackwardStarts,)

    def forget(self) -> None:
        """Forget the last step."""
        self._seen = LossGraphs()

    def backward_begins(self, root: Any) -> None:
        """Look at the graph."""
        if root is not None and root.grad_fn is not None and self._audited.of(BackwardStarts).count == 1:
            self._seen = LossGraphs(_normalised_twice(root.grad_fn, self._audited.names()), *_terms(root.grad_fn))

    def facts(self, step_data: StepData) -> LossGraphs:
        """Return what was seen."""
        return self._seen


def _normalised_twice(root: Any, names: dict[int, str]) -> str:
    """Return the parameter nearest to a softmax of a softmax along the same dimension; empty where there is none."""
    nodes, seen = [root], {root}
    for node in nodes:  # grows
        if node.name() in _SOFTMAX:
            inner = node.next_functions[0][0]
            while inner is not None and inner.name() in _ALIKE:
                inner = inner.next_functions[0][0]
            if inner is not None and inner.name() in _SOFTMAX and _dimension(inner) == _dimension(node):
                return next(parameters_behind_node(inner, names), "root")
        fresh = dict.fromkeys(inner for inner, _ in node.next_functions if inner is not None and inner not in seen)
        if len(nodes) < _MOST:
            nodes.extend(fresh)
            seen.update(fresh)
    return ""


def _dimension(softmax: Any) -> int:
    dim = int(softmax._saved_dim)
    return (dim - (1 << 64) if dim >= 1 << 63 else dim) % max(1, len(softmax._input_metadata[0].shape))


def _terms(root: Any) -> tuple[int, int]:
    """Return how many terms of a sum have a gradient, and how many have none."""
    found, nodes = [0, 0], [root]
    for node in nodes:  # grows
        if node is None:
            found[1] += 1
        elif node.name() in _SUMS:
            nodes.extend(inner for inner, _ in node.next_functions)
        else:
            inside = [inner for inner, _ in node.next_functions if inner is not None]
            if node.name() in _FACTORS and len(inside) == 1:
                nodes.append(inside[0])
            else:
                found[0] += 1
    return found[0], found[1]
