"""A backend of `torch.compile` that compiles the beginning of the graphs of a step, and runs the rest as it is."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.fx.passes.split_module import split_module

Placed = tuple[Any, list[tuple[Any, Any]]]  # an operator, and the inputs of its graph, each with what was given


class Beginning:
    """Gives the first operators of all graphs, in the order of the graphs, to a backend. An object serves one run.

    backend: its name. most: how many operators. graphs, nodes: what Dynamo made, filled while the step runs. handed: name →
    what the beginning of the graph that is cut returned.
    """

    def __init__(self, backend: str, most: int = 10**9) -> None:
        self._backend: Any = lookup_backend(backend)
        self._left, self.graphs = most, 0
        self.nodes: list[Placed] = []
        self.handed: dict[str, Tensor] = {}

    def __call__(self, graph: Any, inputs: list[Any]) -> Any:
        """Return what runs a graph; Dynamo calls this for each."""
        nodes = [node for node in graph.graph.nodes if node.op.startswith("call")]
        holders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        given = list(zip(holders, inputs, strict=False))
        self.nodes += [(node, given) for node in nodes]
        self.graphs += bool(nodes)
        taken, self._left = min(self._left, len(nodes)), max(self._left - len(nodes), 0)
        while 0 < taken < len(nodes) and nodes[taken].target is operator.getitem:  # what unpacks a result stays with it
            taken += 1
        if taken == len(nodes):
            return self._backend(graph, inputs)
        if not taken:
            return graph.forward
        first = set(nodes[:taken])
        cut: Any = split_module(graph, None, lambda node: int(node not in first), keep_original_order=True)  # pyright: ignore
        cut.submod_0 = _Beginning(cut.submod_0, self._backend, self.handed)
        return cut


class _Beginning(nn.Module):
    """The beginning of a graph, compiled at its first call."""

    def __init__(self, part: Any, backend: Any, handed: dict[str, Tensor]) -> None:
        super().__init__()
        self._backend, self._handed, self._run = backend, handed, None
        end = next(node for node in part.graph.nodes if node.op == "output")
        self._alone = not isinstance(end.args[0], tuple)
        self._ends = [end.args[0]] if self._alone else list(end.args[0])
        end.args = (tuple(self._ends),)
        part.recompile()
        self.part = part

    def forward(self, *args: Any) -> Any:
        """Return what the rest of the graph needs."""
        if self._run is None:
            self._run = self._backend(self.part, list(args))
        out = self._run(*args)
        for node, x in zip(self._ends, out, strict=True):
            if isinstance(x, Tensor) and x.is_floating_point():
                self._handed[str(node)] = x.detach().clone()
        return out[0] if self._alone else out


def module_and_line(placed: Placed, owners: Mapping[int, str]) -> tuple[str, str, str]:
    """Return the module, the name and the line of an operator. owners: id of a parameter → its module.

    A graph may begin inside a layer, and names modules from there: what is before is told by its parameters.
    """
    node, given = placed
    inner = _below(node)
    known = [(_below(holder), owners[id(x)]) for holder, x in given if id(x) in owners]
    before = next((full.removesuffix(part) for part, full in known if part and full.endswith(part)), "")
    trace = re.findall(r'File "(.+?)", line (\d+), in .+\n\s*(.+)', node.meta.get("stack_trace") or "")
    line = "{}:{}: {}".format(*trace[-1]) if trace else ""
    return (before + inner).strip("."), str(getattr(node.target, "__name__", node.target)), line


def _below(node: Any) -> str:
    """Return the name of an operator's module below the one whose frame is compiled: L['self'].layers.0 gives layers.0."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return re.sub(r"^\w+\[.*?\]\.?(__self__(\.|$))?", "", stack[-1][0]) if stack else ""
