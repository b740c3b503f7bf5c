"""What dumps hold of parameters and their reduced gradients: joined by the rectangles that each rank says it holds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from trainprobe.dump_compare.dump_side import Side
from trainprobe.dump_compare.layouts.cuts import Cut, cut_of_boxes
from trainprobe.dump_compare.layouts.fused import fused_states
from trainprobe.dump_compare.layouts.grouping import owner_of
from trainprobe.dump_compare.layouts.joined import Join, JoinedSide, Part
from trainprobe.dump_compare.layouts.rectangles import Box, box_of, elements_of_whole
from trainprobe.dump_compare.layouts.splits import by_boxes
from trainprobe.dump_compare.pairing import CallPair
from trainprobe.dump_compare.renamed.fused import Fused
from trainprobe.engine.core.records import Call, Value

_SLOTS = ("value", "grad_unclipped", "grad")


def add_states(
    pairs: list[CallPair],
    sides: tuple[JoinedSide, JoinedSide],
    rename: Callable[[str], str] = str,
    fused: Sequence[Fused] = (),
) -> list[str]:
    """Put the weights before all calls, and the gradients that the optimizer steps with behind them.

    Returns a sentence for what one side alone holds. rename: is given each name of A's parameters. fused: modules of one side
    that are several of the other.
    """
    held = [held_values(side.ranks) for side in sides]
    made_of: dict[str, list[CallPair]] = {slot: [] for slot in _SLOTS}
    for name in held[0]:
        for slot, found in ((slot, held[0][name].get(slot)) for slot in _SLOTS):
            others = held[1].get(rename(name), {}).get(slot)
            if found is None or others is None:
                continue
            joins = [
                replace(join, shape=(sum(part.size for part in join.parts),)) for join in (by_boxes(found), by_boxes(others))
            ]
            made_of[slot].append(_pair(sides, (name, rename(name)), slot, joins))
    for slot in _SLOTS:
        made_of[slot] += [_pair(sides, names, slot, joins) for names, joins in fused_states(fused, held, slot)]
    weights, unclipped, stepped = (made_of[slot] for slot in _SLOTS)
    pairs[:] = [*weights, *pairs, *unclipped, *stepped]
    return _alone(({rename(name): slots for name, slots in held[0].items()}, held[1]))


def _alone(held: tuple[Mapping[str, Mapping[str, object]], Mapping[str, Mapping[str, object]]]) -> list[str]:
    """Return a sentence for each side with weights or gradients of its own, of modules of which both sides hold some.

    A stage of a pipeline may hold a copy of a weight that one process has once, in a module without weights there.
    """
    said: list[str] = []
    for what, slots in (("weights", _SLOTS[:1]), ("gradients", _SLOTS[1:])):
        names = [{name for name, of in side.items() if any(slot in of for slot in slots)} for side in held]
        modules = {owner_of(name) for name in names[0]} & {owner_of(name) for name in names[1]}
        for side, mine, others in (("A", *names), ("B", *names[::-1])):
            lone = [name for name in held["AB".index(side)] if name in mine - others and owner_of(name) in modules]
            if lone:
                said.append(f"parameters whose {what} are in {side} alone: {len(lone)}; the first is {lone[0]}")
    return said


def _pair(sides: tuple[JoinedSide, JoinedSide], names: tuple[str, str], slot: str, joins: Sequence[Join]) -> CallPair:
    values = [side.add(join) for side, join in zip(sides, joins, strict=True)]
    return CallPair(0, _call(names[0], slot, values[0]), _call(names[1], slot, values[1]))


def held_gradients(ranks: Sequence[Side]) -> set[str]:
    """Return the parameters whose gradients a dump holds as the optimizer sees them."""
    return {call.name for side in ranks for call in side.step_data.states if "grad" in (call.params or {})}


def cuts_of_weights(sides: tuple[JoinedSide, JoinedSide], rename: Callable[[str], str]) -> dict[str, Cut]:
    """Return parameter as B has it → which part each rank holds, of those that the ranks of one side hold in parts."""
    found: dict[str, Cut] = {}
    for side in sides:
        for name, slots in held_values(side.ranks).items():
            parts = slots.get("value", [])
            shard = (parts[0].value.extra or {}).get("shard") if len(parts) > 1 else None
            whole = shard.get("whole") if isinstance(shard, Mapping) else None
            cut = cut_of_boxes([part.box for part in parts], tuple(whole)) if isinstance(whole, list) else None
            if cut is not None:
                found[rename(name) if side is sides[0] else name] = cut
    return found


def held_values(ranks: Sequence[Side]) -> dict[str, dict[str, list[Part]]]:
    """Return parameter → slot → the rectangles that ranks hold before the optimizer steps."""
    found: dict[str, dict[str, list[Part]]] = defaultdict(lambda: defaultdict(list))
    for side in ranks:
        for call in side.step_data.states:
            for slot, value in (call.params or {}).items():
                if slot in _SLOTS and isinstance(value, Value):
                    place = side.step_data.place
                    box = box_of(value, place.rank, place.world_size)
                    found[call.name][slot].append(Part(side, value, place.rank, box=box))
    return found


def left_out(ranks: Sequence[Side]) -> list[str]:
    """Return a sentence on what dumps hold of parameters and is not compared across layouts, such as Adam's moments."""
    slots = [slot for side in ranks for call in side.step_data.states for slot in call.params or {} if slot not in _SLOTS]
    if not slots:
        return []
    names = ", ".join(dict.fromkeys(slots))
    return [f"{len(slots)} values that dumps hold of parameters beside weights and gradients are not compared: {names}"]


def are_cut_otherwise(a: Side, b: Side) -> bool:
    """Return whether one rank of either side holds another part of a weight, as with DDP and FSDP of as many ranks."""
    one, other = _cuts_of(a), _cuts_of(b)
    return any(name in other and other[name] != cut for name, cut in one.items())


def _cuts_of(side: Side) -> dict[str, object]:
    """Return weight → the part that a rank holds, None for all of it: as sources say it, or as modules are given it."""
    place = side.step_data.place
    found: dict[str, object] = {}
    for call in side.step_data.calls:
        if call.kind == "module" and call.phase == "forward":
            for short, value in (call.params or {}).items():
                if isinstance(value, Value):
                    found.setdefault(f"{call.name}.{short}", _cut(box_of(value, place.rank, place.world_size), value))
    for name, slots in held_values([side]).items():
        for part in slots.get("value", ()):
            found[name] = _cut(part.box, part.value)
    return found


def _cut(box: Box | None, value: Value) -> object:
    whole = None if box is None else elements_of_whole(value)
    return None if box is None or whole in (None, math.prod(box.shape)) else (box.offset, box.shape, box.within)


def _call(name: str, slot: str, value: Value) -> Call:
    """Return the call that shows a weight to be given, or the gradient of one as what a module's backward gives."""
    call = Call("state", name, 0, "step" if slot == "value" else "backward")
    call.params = {"parameters": {name.rpartition(".")[2]: value}} if slot == "value" else {slot: value}
    return call
