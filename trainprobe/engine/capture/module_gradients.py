"""The gradients at the outputs and inputs of a module call, by hooks on autograd nodes that exist anyway.

How they are found stands in `gradients.py`. `native/gradients.c` does it; the functions here answer it in rare cases.
"""

from __future__ import annotations

from types import NoneType
from typing import Any

from trainprobe.engine.capture.gradients import Edge, edge_of
from trainprobe.engine.core.containers import children
from trainprobe.engine.core.guard import attempt
from trainprobe.engine.tape import Tape

UNTOUCHED = "handed on untouched, input and output are one tensor: this is that tensor's whole gradient, whoever uses it"
Edges = list[tuple[str, Edge]]


def places(paths: list[str], inputs: bool) -> tuple[list[tuple[int, str]], dict[int, tuple[str, list[int]]], int]:
    """Turn paths into places in a list: `2` is place 2; what is nested or named stands behind them, with its path.

    Of places that share one tensor (`0|2`) the first counts. Returns (place, path) of each, then, for inputs, number of the
    path → (note, other places of its tensor), and how long the list is.
    """
    merged: dict[int, tuple[str, list[int]]] = {}
    slots: list[tuple[int, str]] = []
    firsts = [path.partition("|")[0] for path in paths]
    behind = max([int(p) for p in firsts if p.isdigit()], default=-1) + 1
    for i, (whole, path) in enumerate(zip(paths, firsts, strict=True)):
        if path.isdigit():
            slots.append((int(path), ""))
        else:
            slots.append((behind, path))
            behind += 1
        if inputs and whole != path:
            first, *others = whole.split("|")
            text = f"inputs {', '.join([first, *others])} are one tensor: at input {first} stands the sum over them"
            merged[i] = (text, [int(other) for other in others if other.isdigit()])
    taken = [place for place, _ in slots] + [place for _, others in merged.values() for place in others]
    return slots, merged, 1 + max(taken, default=-1)


_NO_EDGES = frozenset({int, float, bool, str, NoneType})


def edges_of_other(tape: Tape, x: Any, path: str) -> Edges:
    """Return the edges of all tensors in something that the compiled parts do not look into."""
    found: Edges = []
    collect_edges(tape, x, path, found)
    return found


def _add_edge(x: Any, path: str, found: Edges) -> None:
    edge = edge_of(x)
    for i, (other, known) in enumerate(found):
        if edge is not None and known[0] is edge[0] and known[1] == edge[1]:
            found[i] = (f"{other}|{path or '0'}", known)
            return
    if edge is not None:
        found.append((path or "0", edge))


def _nothing(_: Exception) -> Any:
    return None


def collect_edges(tape: Tape, x: Any, path: str, found: Edges, depth: int = 0) -> None:
    """Collect the gradient edges of all tensors in a structure, with paths; places of one tensor share one, `0|1`."""
    kind = type(x)
    if kind in _NO_EDGES:
        return
    if kind in tape.library.plain or attempt(tape.library.is_tensor, x, otherwise=_nothing):
        attempt(_add_edge, x, path, found, otherwise=_nothing)
        return
    if depth > 8 or issubclass(kind, set | frozenset):
        return
    inside = (
        [(str(i), item) for i, item in enumerate(tuple.__iter__(x))]
        if issubclass(kind, tuple)
        else attempt(children, x, otherwise=_nothing)
    )
    for name, item in inside or ():
        collect_edges(tape, item, f"{path}.{name}" if path else name, found, depth + 1)
