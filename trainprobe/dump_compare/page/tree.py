"""The tree of the page: the calls of one rank and step under what they run within, in order of execution.

At the top stand the parts of a step (forward, backward, optimizer, …), one for each micro-batch where there are several.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainprobe.dump_compare.judge import Judged
from trainprobe.engine.core.naming import ROOT
from trainprobe.engine.core.records import Call

_PARTS = {
    "recompute": "forward",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "save": "saved values",
    "step": "step",
}
Part = tuple[int | None, str]  # micro-batch, part of the step
_PARENTS = {"optimizer": "optimizer", "clip_grad": "gradient clipping"}


@dataclass(frozen=True, slots=True)
class Node:
    """A line of the tree. call: place in the list of judged calls, -1 for a part of the step. depth: 0 for such a part."""

    depth: int
    call: int
    label: str
    aside: str


def build_tree(judged: Sequence[Judged]) -> list[Node]:
    """Return the lines of the tree, each followed by those below it."""
    parts: dict[Part, list[int]] = defaultdict(list)
    below: dict[int, list[int]] = {}
    for i, parent in enumerate(_parents(judged)):
        (below.setdefault(parent, []) if isinstance(parent, int) else parts[parent]).append(i)
    several = len({one.call.micro for one in judged if one.call.micro is not None}) > 1
    nodes: list[Node] = []
    for (micro, name), calls in parts.items():
        nodes.append(Node(0, -1, name, f"micro-batch {micro}" if several and micro is not None else ""))
        waiting = [(i, 1) for i in reversed(calls)]
        while waiting:
            i, depth = waiting.pop()
            nodes.append(Node(depth, i, *_label(judged[i].call)))
            waiting += [(child, depth + 1) for child in reversed(below.get(i, []))]
    return nodes


def _parents(judged: Sequence[Judged]) -> list[int | Part]:
    """Return for each call the place of the one that it runs within, or (micro-batch, part of the step)."""
    places = {id(call): i for i, one in enumerate(judged) for call in (one.pair.a, one.pair.b) if call is not None}
    backwards = {
        (one.call.name, one.call.micro): i
        for i, one in enumerate(judged)
        if one.call.kind == "module" and one.call.phase == "backward"
    }
    found: list[int | Part] = []
    for one in judged:
        call = one.call
        place = places.get(id(call.parent)) if isinstance(call.parent, Call) else None
        if call.kind == "parameter":
            place = backwards.get((call.name, call.micro))
        found.append(_part(call) if place is None else place)
    _cut_circles(found, judged)
    return found


def _cut_circles(parents: list[int | Part], judged: Sequence[Judged]) -> None:
    """Put a call under its part of the step where the calls around it, as a file has them, lead back to it."""
    ends: set[int] = set()  # calls from which the way up is known to end
    for start in range(len(parents)):
        way: set[int] = set()
        for i in _upwards(parents, start):
            if i in ends:
                break
            if i in way:
                parents[i] = _part(judged[i].call)
                break
            way.add(i)
        ends |= way


def _upwards(parents: Sequence[int | Part], start: int) -> Iterator[int]:
    at: int | Part = start
    while isinstance(at, int):
        yield at
        at = parents[at]


def _part(call: Call) -> Part:
    if call.kind == "saved":
        return None, "saved values"
    if isinstance(call.parent, str) and call.parent in _PARENTS:
        return None, _PARENTS[call.parent]
    part = _PARTS.get(call.phase, call.phase)
    return (call.micro if part in ("forward", "backward") else None), part


def _label(call: Call) -> tuple[str, str]:
    """Return the name of a call within what is around it, and what else to say of it: its class or namespace, its number."""
    number = f" ·{call.call}" if call.call else ""
    if call.kind in ("module", "parameter"):
        parent = call.parent
        within = f"{parent.name}." if isinstance(parent, Call) and parent.kind == "module" and parent.name != ROOT else ""
        name = call.name.removeprefix(within) if call.name != ROOT else "model"
        if call.kind == "parameter":
            return "gradients of parameters", f"{call.name}{number}"
        return name, f"{call.cls}{number}"
    space, _, last = call.name.rpartition(".")
    return last or call.name, f"{space}{number}"
