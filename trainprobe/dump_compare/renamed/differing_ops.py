"""The ops of modules that were paired by structure: where two implementations run others, none of them are compared.

A module may do the same by other ops, by the same ops in another order, or with their operands the other way round, and one
`add` of many says little of which of another's it is. Where a module is of one class on both sides and runs the same sequence
of ops there, by names and shapes, they are compared as any others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence, Set

from trainprobe.dump_compare.pairing import operator
from trainprobe.engine.core.naming import ROOT
from trainprobe.engine.core.records import Call
from trainprobe.engine.core.step_data import slots

Sides = tuple[Sequence[Call], Sequence[Call]]


def without_other_ops(
    calls: Sides,
    looked_through: tuple[Set[str], Set[str]],
    rename: Callable[[str], str],
    partners: Set[str],
    fused: Set[str],
) -> tuple[Sides, list[str]]:
    """Return the calls of both sides without ops that are others, and a sentence that counts these.

    partners: names in B of modules that were paired by structure; ops outside of all modules belong to the model. fused: names,
    A's as B has them, of modules that are several on the other side, whose ops are others.
    """
    within = _by_module(calls[0], looked_through[0], rename), _by_module(calls[1], looked_through[1], str)
    places = {*within[0], *within[1]}
    others = {place for place in places if place[0] in fused}
    for place in places:
        if place[0] in partners or place[0] == ROOT:
            looks = [_looks(of.get(place, ())) for of in within]
            others |= {place} if looks[0] != looks[1] else set()
    kept: list[Sequence[Call]] = []
    for side, of in zip(calls, within, strict=True):
        gone = {(call.name, call.call) for place in others for call in of.get(place, ())}
        kept.append([call for call in side if call.kind != "op" or (call.name, call.call) not in gone])
    counts = [len(before) - len(after) for before, after in zip(calls, kept, strict=True)]
    said = f"{counts[0]} op calls of A and {counts[1]} of B are not compared: what was paired by structure runs other ops there"
    return (kept[0], kept[1]), [said] if any(counts) else []


def _by_module(
    calls: Sequence[Call], looked_through: Set[str], rename: Callable[[str], str]
) -> dict[tuple[str, int, Hashable], list[Call]]:
    """Return (name in B of the module around, number of its call, optimizer or not) → forwards of ops, in order."""
    found: dict[tuple[str, int, Hashable], list[Call]] = defaultdict(list)
    for call in calls:
        if call.kind != "op" or call.phase == "backward":
            continue
        parent = call.parent
        while isinstance(parent, Call) and (parent.kind != "module" or parent.name in looked_through):
            parent = parent.parent
        name, number = (rename(parent.name), parent.call) if isinstance(parent, Call) else (ROOT, 0)
        found[name, number, parent if isinstance(parent, str) else call.phase].append(call)
    return found


def _looks(ops: Sequence[Call]) -> Hashable:
    """Return what must be equal for ops within one call of a module to be compared: its class, names and shapes."""
    cls = next((call.parent.cls for call in ops if isinstance(call.parent, Call)), "")
    return cls, [(operator(call.name), [tuple(value.shape) for _, value in slots(call)]) for call in ops]
