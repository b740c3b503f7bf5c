"""Modules that one side has as one and the other as several: q, k and v as one projection, gate and up as one.

Several modules belong to one where they run within the partner of what that one runs within, one after the other, are given the
same tensor, and their results and weights together are as large as its; or maps of names say so (see by_maps). They are
compared as one call: results, weights and gradients of these side by side, element by element where it is known how rows lie
(see fused_rows) and else by their statistics; gradients at the input added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from trainprobe.dump_compare.call_slots import fill
from trainprobe.dump_compare.dump_side import Side
from trainprobe.dump_compare.pairing import CallPair
from trainprobe.dump_compare.renamed.composed import Composed
from trainprobe.dump_compare.renamed.fused_rows import Laid, RowOrder, find_rows
from trainprobe.dump_compare.renamed.modules import Looks, Module, has_weights, value_look
from trainprobe.engine.core.records import Call, Value
from trainprobe.engine.core.step_data import slots

_MOST = 4  # modules that are one elsewhere
_Key = tuple[str, str, int, int]  # kind, phase, number and micro-batch of a call


@dataclass(frozen=True, slots=True)
class Fused:
    """Modules of one side that are one on the other. split: 0 where A has the parts, 1 where B has them.

    named: whether maps of names say so (see by_maps), and the order of the parts with it; else their input and sizes do.
    groups: in how many groups their rows are interleaved, 0 where no map says it (see fused_rows).
    """

    parts: tuple[Module, ...]
    whole: Module
    split: int
    named: bool = False
    groups: int = 0

    @property
    def evidence(self) -> str:
        """Return what it was paired by."""
        return "names of both families" if self.named else "sizes that add up"

    @property
    def name(self) -> str:
        """Return what the parts are called together: `layers.0.attention.q+k+v`."""
        names = [part.name for part in self.parts]
        around = names[0].rpartition(".")[0]
        alike = all(name.rpartition(".")[0] == around for name in names)
        return f"{names[0]}{''.join('+' + name.rpartition('.')[2] for name in names[1:])}" if alike else "+".join(names)

    @property
    def short_names(self) -> list[str]:
        """Return the last names of the parts: q, k, v."""
        return [part.name.rpartition(".")[2] for part in self.parts]

    def names(self, side: int) -> list[str]:
        """Return the names of these modules on one side."""
        return [part.name for part in self.parts] if side == self.split else [self.whole.name]


def find_fused(
    lone: tuple[Sequence[Module], Sequence[Module]], partners: Mapping[str, Module], looks: tuple[Looks, Looks]
) -> list[Fused]:
    """Return which modules without a partner are one on the other side. partners: of the others, name in A → module of B."""
    a, b = lone
    inverse = {module.name: name for name, module in partners.items()}
    found: list[Fused] = []
    for split, (several, single) in enumerate(((a, b), (b, a))):
        names = (set(partners), set(inverse))[split]  # of the side that has the parts
        others = {name: module.name for name, module in partners.items()} if split else inverse
        for whole in single:
            if whole.within or not has_weights(whole):
                continue
            around = _around(whole, set(others))
            here = [
                module
                for module in several
                if not module.within and has_weights(module) and _around(module, names) == (others[around] if around else "")
            ]
            fitting = [parts for parts in _runs(here, looks[split]) if make(parts, whole, looks, split)]
            if len(fitting) == 1:
                found.append(Fused(tuple(fitting[0]), whole, split))
    return found


def _around(module: Module, names: set[str]) -> str:
    """Return the name of the innermost module with a partner around one, "" where there is none."""
    return next((outer.name for outer in module.around() if outer.name in names), "")


def _runs(modules: Sequence[Module], looks: Looks) -> Iterator[Sequence[Module]]:
    """Yield sequences of modules that are given one tensor, one after the other."""
    for _, group in groupby(modules, lambda module: _given(module, looks.side_of(module))):
        alike = list(group)
        for start in range(len(alike)):
            for end in range(start + 2, min(len(alike), start + _MOST) + 1):
                yield alike[start:end]


def _given(module: Module, side: Side) -> Hashable:
    """Return what tells the tensor that a module is given; the module itself where the dump holds no numbers of it."""
    value = next((value for slot, value in slots(module.first) if slot.startswith(("input", "kwargs"))), None)
    look = None if value is None else value_look(side, value)
    return module.name if look is None else look


def make(parts: Sequence[Module], whole: Module, looks: tuple[Looks, Looks], split: int) -> bool:
    """Return whether the results and the weights of modules are together as large as those of one."""
    of_parts = zip(*map(looks[split].sizes, parts), strict=True)
    return tuple(map(sum, of_parts)) == looks[1 - split].sizes(whole) and {part.calls for part in parts} == {whole.calls}


def as_one(
    pairs: Sequence[CallPair], fused: Sequence[Fused], sides: tuple[Composed, Composed], *, shares: bool = True
) -> tuple[list[CallPair], str]:
    """Return the pairs with the calls of such modules as one pair each, and what is to be said of how these are compared.

    A call that lacks one of its parts stays alone.

    shares: whether each module shows its share of the gradient at its input, so that these add up; else they are left out.
    """
    calls: dict[tuple[int, str], dict[_Key, CallPair]] = defaultdict(dict)
    for pair in pairs:
        for side, call in enumerate((pair.a, pair.b)):
            if call is not None and call.kind in ("module", "parameter"):
                calls[side, call.name][call.kind, str(call.phase), call.call, call.micro or 0] = pair
    gone: set[int] = set()
    made: list[CallPair] = []
    known = [_rows(each, sides) for each in fused]
    for each, rows in zip(fused, known, strict=True):
        for key, pair in calls[1 - each.split, each.whole.name].items():
            here = [of[key] for part in each.parts if key in (of := calls[each.split, part.name])]
            whole = pair.b if each.split == 0 else pair.a
            split = [call for part in here if (call := part.a if each.split == 0 else part.b) is not None]
            if whole is not None and len(split) == len(each.parts):
                if not shares and whole.kind == "module" and whole.phase == "backward":
                    whole.out = None
                joined = _joined(each, split, whole, sides[each.split], rows, shares)
                place = max(part.place for part in here) if each.split == 0 else pair.place
                made.append(CallPair(place, *((joined, whole) if each.split == 0 else (whole, joined))))
                gone |= {id(pair), *map(id, here)}
    kept = [*(pair for pair in pairs if id(pair) not in gone), *made]
    found = [CallPair(i, pair.a, pair.b) for i, pair in enumerate(sorted(kept, key=lambda pair: pair.place))]
    return found, about_rows(known)


def about_rows(known: Sequence[RowOrder | None]) -> str:
    """Return what is to be said of how several modules are compared with the one that they are. known: how its rows lie."""
    count = sum(rows is not None for rows in known)
    if not count:
        return (
            "several modules that are one are compared by statistics: neither a map of names nor weights that both dumps store "
            "say how its rows lie"
        )
    of_all = "" if count == len(known) else f" in {count} of {len(known)} of them; the others are compared by statistics"
    return f"how the rows of several modules lie in the one that they are is known{of_all}"


def _rows(fused: Fused, sides: tuple[Composed, Composed]) -> RowOrder | None:
    """Return how the rows of several modules lie in the one that they are."""
    split, single = sides[fused.split], sides[1 - fused.split]
    whole, *parts = [_matrix(module) for module in (fused.whole, *fused.parts)]
    matrices = [part for part in parts if part is not None]
    if whole is None or len(matrices) < len(parts):
        return None

    def load() -> list[Any]:
        return [single.array(whole), *map(split.array, matrices)]

    shapes = [tuple(part.shape) for part in matrices]
    return find_rows(tuple(whole.shape), shapes, fused.groups, load, named=fused.named)


def _matrix(module: Module) -> Value | None:
    """Return the only matrix among the weights of a module."""
    found = [value for slot, value in slots(module.first) if slot.startswith("parameters") and len(value.shape) == 2]
    return found[0] if len(found) == 1 else None


def _joined(fused: Fused, parts: Sequence[Call], whole: Call, side: Composed, rows: RowOrder | None, shares: bool) -> Call:
    """Return the call that those of several modules make, with the slots of the call of the one."""
    first = parts[0]
    made = Call(first.kind, fused.name, first.call, first.phase, cls=first.cls, micro=first.micro, parent=first.parent)
    values: dict[str, Value] = {}
    values_of = [dict(slots(part)) for part in parts]
    met: set[tuple[int, str]] = set()
    for slot, like in slots(whole):
        places = [(i, at) for i, part in enumerate(parts) if (at := _at(part, slot, whole)) in values_of[i]]
        there = [values_of[i][at] for i, at in places]
        met.update(places)
        if slot.startswith(("input", "kwargs")) and there:
            one = there[0]
            same = tuple(one.shape) == tuple(like.shape)
            values[slot] = one if same else side.make("reshaped", [one], tuple(like.shape))
        elif len(there) == len(parts):
            how = "added" if slot.startswith("grad_input") else "side by side"
            weights = first.kind == "parameter" or slot.startswith("parameters")
            laid = None if rows is None or how == "added" else Laid(rows, fused.short_names, weights)
            values[slot] = side.make(how, there, tuple(like.shape), laid)
    for i, of_part in enumerate(values_of):
        for slot, value in of_part.items():
            if (i, slot) not in met and (shares or not slot.startswith("grad_input")):
                values.setdefault(slot, value)  # in these alone
    fill(made, values)
    return made


def _at(call: Call, slot: str, whole: Call) -> str:
    """Return the slot of a part that stands for a slot of the one module: of its name, or the only one of its sort; or ""."""
    if any(at == slot for at, _ in slots(call)):
        return slot
    first = slot.partition(".")[0]
    of_sort = [[at for at, _ in slots(each) if at.partition(".")[0] == first] for each in (call, whole)]
    return of_sort[0][0] if call.kind == "module" and len(of_sort[0]) == len(of_sort[1]) == 1 else ""
