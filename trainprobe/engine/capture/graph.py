"""Which parameters a tensor depends on, read off the autograd graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_MOST = 512  # nodes that are looked at


def parameters_behind(t: Any, names: Mapping[int, str]) -> Iterator[str]:
    """Yield the parameters that a tensor depends on, nearest first, of its nearest nodes. names: id of parameter → name."""
    if id(t) in names:
        yield names[id(t)]
    yield from parameters_behind_node(t.grad_fn, names)


def parameters_behind_node(node: Any, names: Mapping[int, str]) -> Iterator[str]:
    """Yield the parameters that the output of a node depends on: see `parameters_behind`."""
    nodes, seen = [node], set[Any]()
    for node in nodes:
        if node is None or node in seen or len(seen) >= _MOST:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) in names:
            yield names[id(leaf)]
        nodes.extend(inner for inner, _ in node.next_functions)
