"""What dumps hold of parameters and their optimizer: joined by the rectangles that each rank says it holds.

Weights, and what an optimizer keeps of each before it steps, stand before all calls; gradients and what it makes of a parameter
stand behind them. Ranks that hold no state yet that they hold behind the step begin with zeros, as optimizers do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainprobe.dump_compare.dump_side import Side
from trainprobe.dump_compare.layouts.cuts import Cut, cut_of_boxes
from trainprobe.dump_compare.layouts.fused import FusedRows, fused_states
from trainprobe.dump_compare.layouts.grouping import owner_of
from trainprobe.dump_compare.layouts.joined import Join, JoinedSide, RankPart
from trainprobe.dump_compare.layouts.rank_boxes import box_of, cut_by
from trainprobe.dump_compare.layouts.splits import by_boxes
from trainprobe.dump_compare.layouts.state_slots import (
    SLOTS,
    UNREDUCED,
    Slots,
    comparable,
    is_known,
    is_quantised,
    with_zeros,
)
from trainprobe.dump_compare.pairing import CallPair
from trainprobe.dump_compare.parameter_states import AFTER, is_made
from trainprobe.engine.core.records import Call, Value

_COPIES = ("main_value", f"main_value{AFTER}", "main_update", f"value{AFTER}", "step", f"step{AFTER}")  # some keep or show none


def add_states(
    pairs: list[CallPair],
    sides: tuple[JoinedSide, JoinedSide],
    rename: Callable[[str], str] = str,
    fused: Sequence[FusedRows] = (),
) -> tuple[list[str], list[str]]:
    """Put the weights before all calls, and the gradients that the optimizer steps with and what it makes behind them.

    Returns a sentence for what one side alone holds and should not, and what else is to be said. rename: is given each name of
    A's parameters. fused: modules of one side that are several of the other.
    """
    held = [held_values(side.ranks, everything=True) for side in sides]
    made = _JoinedStates(sides)
    for name, mine in held[0].items():
        theirs = held[1].get(rename(name))
        if theirs is not None:
            made.add_parameter((name, rename(name)), mine, theirs)
    for each in fused:
        for names, joins in fused_states(each, held):
            made.add((names[0], names[1]), joins)
    pairs[:] = [*made.given(), *pairs, *made.gradients("grad_unclipped"), *made.gradients("grad"), *made.results()]
    renamed = {rename(name): slots for name, slots in held[0].items()}
    return [*_alone((renamed, held[1])), *made.missing()], made.notes()


@dataclass(slots=True)
class _JoinedStates:
    """The values that two layouts both hold of parameters. found: names on both sides → slot → the value of each side."""

    sides: tuple[JoinedSide, JoinedSide]
    found: dict[tuple[str, str], dict[str, tuple[Value, Value]]] = field(default_factory=dict)
    unjoined: dict[str, None] = field(default_factory=dict)
    holes: dict[str, str] = field(default_factory=dict)  # what the ranks of a side, which is named, hold only a part of
    alone: tuple[dict[str, list[str]], dict[str, list[str]]] = field(default_factory=lambda: ({}, {}))  # slot → parameters
    met: tuple[set[str], set[str]] = field(default_factory=lambda: (set(), set()))  # slots of any parameter

    def add(self, names: tuple[str, str], joins: Mapping[str, tuple[Join, Join]]) -> None:
        """Add what both sides make of the values of a parameter, slot by slot."""
        of_both = self.found.setdefault(names, {})
        for slot, made in joins.items():
            values = [side.add(join) for side, join in zip(self.sides, made, strict=True)]
            of_both[slot] = values[0], values[1]

    def add_parameter(self, names: tuple[str, str], mine: Slots, theirs: Slots) -> None:
        """Add what ranks of both sides hold of one parameter."""
        joins: dict[str, tuple[Join, Join]] = {}
        for met, of_side in zip(self.met, (mine, theirs), strict=True):
            met.update(of_side)
        for slot in comparable(mine, theirs):
            both = [with_zeros(slot, *of) for of in ((mine, theirs), (theirs, mine))]
            if all(both):
                known = slot in SLOTS or all(is_known(slot, parts, of) for parts, of in zip(both, (mine, theirs), strict=True))
                made = [by_boxes(parts) for parts in both]
                if known and (slot in SLOTS or made[0].size == made[1].size):
                    joins[slot] = _flat(made[0]), _flat(made[1])
                elif known and all(part.box is not None for part in both[made[0].size > made[1].size]):
                    self.holes.setdefault(f"{slot} of {names[0]}", "AB"[made[0].size > made[1].size])
                else:
                    self.unjoined.setdefault(f"{slot} of {names[0]}")
            elif slot not in SLOTS:
                self.alone[0 if both[0] else 1].setdefault(slot, []).append(names[0])
        self.add(names, joins)

    def given(self) -> list[CallPair]:
        """Return the weights of each parameter, and what the optimizer keeps of it before it steps."""

        def slots(name: str) -> dict[str, str]:
            return {"value": f"parameters.{name.rpartition('.')[2]}"}

        return self._calls(lambda slot: not slot.startswith("grad") and not is_made(slot), "step", slots)

    def gradients(self, wanted: str) -> list[CallPair]:
        """Return the gradients of one slot."""
        return self._calls(lambda slot: slot == wanted, "backward")

    def results(self) -> list[CallPair]:
        """Return what the optimizer makes of each parameter."""
        return self._calls(is_made, "optimizer")

    def _calls(
        self, wanted: Callable[[str], bool], phase: str, renamed: Callable[[str], Mapping[str, str]] = lambda name: {}
    ) -> list[CallPair]:
        pairs: list[CallPair] = []
        for names, of_both in self.found.items():
            slots = [slot for slot in of_both if wanted(slot)]
            calls = [
                _call(name, phase, {renamed(name).get(slot, slot): of_both[slot][i] for slot in slots})
                for i, name in enumerate(names)
            ]
            pairs += [CallPair(0, *calls)] if slots else []
        return pairs

    def missing(self) -> list[str]:
        """Return a sentence for each side that alone keeps a state of some parameters, or all of it."""
        said = [f"{what} is held by ranks of {side} in part alone" for what, side in self.holes.items()]
        return [
            *said[:1],
            *([f"so are {len(said) - 1} other states"] if len(said) > 1 else []),
            *(
                f"parameters whose {slot} is in {side} alone: {len(names)}; the first is {names[0]}"
                for side, alone, other in zip("AB", self.alone, reversed(self.met), strict=True)
                for slot, names in alone.items()
                if slot in other or slot not in _COPIES
            ),
        ]

    def notes(self) -> list[str]:
        """Return what is not compared: what one side alone keeps, and what is no part of a whole."""
        said: list[str] = []
        for side, alone, other in zip("AB", self.alone, reversed(self.met), strict=True):
            copies = [slot for slot in alone if slot in _COPIES and slot not in other]
            if copies:
                count = max(len(alone[slot]) for slot in copies)
                said.append(f"{side} alone holds {', '.join(copies)} of parameters ({count}): these are not compared")
        if self.unjoined:
            first = next(iter(self.unjoined))
            said.append(f"{len(self.unjoined)} values that optimizers keep could not be joined; the first is {first}")
        return said


def _flat(join: Join) -> Join:
    return replace(join, shape=(sum(part.size for part in join.parts),))


def _alone(held: tuple[Mapping[str, Mapping[str, object]], Mapping[str, Mapping[str, object]]]) -> list[str]:
    """Return a sentence for each side with weights or gradients of its own, of modules of which both sides hold some.

    A stage of a pipeline may hold a copy of a weight that one process has once, in a module without weights there.
    """
    said: list[str] = []
    for what, slots in (("weights", SLOTS[:1]), ("gradients", SLOTS[1:])):
        names = [{name for name, of in side.items() if any(slot in of for slot in slots)} for side in held]
        modules = {owner_of(name) for name in names[0]} & {owner_of(name) for name in names[1]}
        for side, mine, others in (("A", *names), ("B", *names[::-1])):
            lone = [name for name in held["AB".index(side)] if name in mine - others and owner_of(name) in modules]
            if lone:
                said.append(f"parameters whose {what} are in {side} alone: {len(lone)}; the first is {lone[0]}")
    return said


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


def held_values(ranks: Sequence[Side], *, everything: bool = False) -> dict[str, dict[str, list[RankPart]]]:
    """Return parameter → slot → the rectangles that ranks hold: of weights and gradients, or of everything.

    Left out are gradients before they are reduced, which come in the order of the reduction, and which each layout has its own.
    """
    found: dict[str, dict[str, list[RankPart]]] = defaultdict(lambda: defaultdict(list))
    for side in ranks:
        for call in side.step_data.states:
            for slot, value in (call.params or {}).items():
                if slot != UNREDUCED and (everything or slot in SLOTS) and isinstance(value, Value):
                    place = side.step_data.place
                    box = box_of(value, place.rank, place.world_size)
                    found[call.name][slot].append(RankPart(side, value, place.rank, box=box))
    return found


def left_out(ranks: Sequence[Side]) -> list[str]:
    """Return a sentence on what dumps hold of parameters and no layout shares, such as gradients before they are reduced."""
    calls = [call for side in ranks for call in side.step_data.states]
    left = [UNREDUCED for call in calls if UNREDUCED in (call.params or {})]
    for of_parameter in held_values(ranks, everything=True).values():
        left += [slot for slot, parts in of_parameter.items() if is_quantised(parts) for _ in parts]
    if not left:
        return []
    names = ", ".join(dict.fromkeys(left))
    return [f"{len(left)} values that dumps hold of parameters are not compared, as each layout has its own: {names}"]


def are_cut_otherwise(a: Side, b: Side) -> bool:
    """Return whether one rank of either side holds another part of a weight or of its states.

    So it is with DDP and FSDP of as many ranks, and where one optimizer is distributed and holds its states flat.
    """
    one, other = _cuts_of(a), _cuts_of(b)
    return any(name in other and other[name] != cut for name, cut in one.items())


def _cuts_of(side: Side) -> dict[str, object]:
    """Return weight → the part that a rank holds, None for all of it: as sources say it, or as modules are given it.

    Of what its optimizer holds it is the number of dimensions, under `WEIGHT#SLOT`.
    """
    place = side.step_data.place
    found: dict[str, object] = {}
    for call in side.step_data.calls:
        if call.kind == "module" and call.phase == "forward":
            for short, value in (call.params or {}).items():
                if isinstance(value, Value):
                    found.setdefault(f"{call.name}.{short}", cut_by(box_of(value, place.rank, place.world_size), value))
    for name, slots in held_values([side]).items():
        for part in slots.get("value", ()):
            found[name] = cut_by(part.box, part.value)
        found |= {f"{name}#{slot}": len(parts[0].value.shape) for slot, parts in slots.items() if slot != "value" and parts}
    return found


def _call(name: str, phase: str, values: Mapping[str, Value]) -> Call:
    """Return the call that shows weights and states to be given, or gradients or what an optimizer makes as results."""
    call = Call("state", name, 0, "backward" if phase == "backward" else "step")
    call.parent = "optimizer" if phase == "optimizer" else None
    call.params = dict(values)
    return call
