"""What mapping files say, carried out: other names of modules and operators, and values that belong together one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from trainprobe.dump_compare.call_slots import refilled
from trainprobe.dump_compare.dump_side import Side
from trainprobe.dump_compare.pairing import CallPair
from trainprobe.dump_compare.renamed.mapping_files import TOP, MappingFile
from trainprobe.dump_compare.sheet import classic_name
from trainprobe.engine.core.naming import ROOT
from trainprobe.engine.core.records import Call
from trainprobe.engine.core.step_data import entry_name, slots

Places = Mapping[str, tuple[Call, str]]  # name of a value → its call and slot


def renaming(mapping: MappingFile, a: Side, rename: Callable[[str], str]) -> tuple[Callable[[str], str], list[str]]:
    """Return what gives a name of A as B has it, and a sentence for what fits no module of A. rename: is asked for others."""
    classes = {call.name: call.cls for call in a.step_data.calls if call.kind in ("module", "parameter")}
    found: dict[str, str] = {}
    used: set[str] = set()
    for name, cls in classes.items():
        new = _by_cell(name, cls, mapping.cells, used) or _by_layers(name, classes, mapping.layers, used)
        if new is not None:
            found[name] = new
    written = [*mapping.cells, *(f"{cls}: {path}" for cls, pairs in mapping.layers.items() for path, _ in pairs)]
    idle = [text for text in written if text not in used]
    said = f"{len(idle)} of {len(written)} names of the mapping fit no module of A; the first is {idle[0]}" if idle else ""
    return lambda name: found.get(name) or rename(name), [said] if said else []


def _by_cell(name: str, cls: str, cells: Mapping[str, str], used: set[str]) -> str | None:
    """Return the name in B of a module by its whole name and class, or else with each part that is mapped replaced once."""
    whole = f"{name}.{cls}"
    if whole in cells:
        used.add(whole)
        return cells[whole].rpartition(".")[0]
    new = whole
    for text, other in cells.items():
        if text in new:
            used.add(text)
            new = new.replace(text, other, 1)
    return new.rpartition(".")[0] if new != whole else None


def _by_layers(
    name: str, classes: Mapping[str, str], layers: Mapping[str, Sequence[tuple[str, str]]], used: set[str]
) -> str | None:
    """Return the name in B of a module, layer by layer from above; a list of modules goes by its own name for a class."""
    parts, made, at = name.split("."), list[str](), 0
    while at < len(parts):
        around = [TOP, classes.get(ROOT, "")] if at == 0 else [classes.get(".".join(parts[:at]), parts[at - 1])]
        rest = ".".join(parts[at:])
        fitting = ((cls, path, new) for cls in around for path, new in layers.get(cls, ()) if f"{rest}.".startswith(f"{path}."))
        cls, path, new = next(fitting, ("", parts[at], parts[at]))
        used.add(f"{cls}: {path}")
        made.append(new)
        at += path.count(".") + 1
    new = ".".join(made)
    return new if new != name else None


def with_mapped_values(pairs: list[CallPair], a: Side, b: Side, values: Mapping[str, str]) -> tuple[list[CallPair], list[str]]:
    """Return the pairs with the calls of mapped values beside each other, and a sentence for names that a dump does not have.

    What a mapping does not name keeps its slot. Calls that lose their partner so have none.
    """
    places = _places(a, values), _places(b, values.values())
    lost = [
        (side, name)
        for mine, theirs in values.items()
        for side, name, known in (("A", mine, places[0]), ("B", theirs, places[1]))
        if name not in known
    ]
    wanted: dict[tuple[str, str], tuple[Call, Call, dict[str, str]]] = {}
    for mine, theirs in values.items():
        if mine in places[0] and theirs in places[1]:
            (call, slot), (other, other_slot) = places[0][mine], places[1][theirs]
            key = _entry(call, a), _entry(other, b)
            wanted.setdefault(key, (call, other, {}))[2][slot] = other_slot
    said = [f"{len(lost)} values of the mapping are in no dump; the first is {lost[0][1]}, of {lost[0][0]}"] if lost else []
    return _repaired(pairs, a, b, wanted), said


def _repaired(
    pairs: Sequence[CallPair], a: Side, b: Side, wanted: Mapping[tuple[str, str], tuple[Call, Call, dict[str, str]]]
) -> list[CallPair]:
    taken = {mine for mine, _ in wanted}, {theirs for _, theirs in wanted}
    found: list[tuple[float, Call | None, Call | None]] = []
    places: dict[str, int] = {}
    for pair in pairs:
        mine, theirs = (None if call is None else _entry(call, side) for call, side in ((pair.a, a), (pair.b, b)))
        if mine is not None:
            places[mine] = pair.place
        kept_a = pair.a if mine not in taken[0] else None
        kept_b = pair.b if theirs not in taken[1] else None
        if kept_a is not None or kept_b is not None:
            found.append((pair.place, kept_a, kept_b))
    for (mine, _), (call, other, mapped) in wanted.items():
        found.append((places.get(mine, len(pairs)), *_side_by_side(call, other, mapped)))
    found.sort(key=lambda each: each[0])
    return [CallPair(i, x, y) for i, (_, x, y) in enumerate(found)]


def _side_by_side(a: Call, b: Call, mapped: Mapping[str, str]) -> tuple[Call, Call]:
    """Return copies of two calls of which the second has its values at the slots of the first."""
    mine, theirs = dict(slots(a)), dict(slots(b))
    for slot in mine:
        if slot not in mapped and slot in theirs and slot not in mapped.values():
            mapped = {**mapped, slot: slot}
    return refilled(a, {slot: mine[slot] for slot in mapped}), refilled(b, {slot: theirs[at] for slot, at in mapped.items()})


def _entry(call: Call, side: Side) -> str:
    return entry_name(call, side.step_data.framework)


def _places(side: Side, names: Iterable[str]) -> Places:
    """Return where the named values of a dump stand. Gradients of weights may be named without the number of their call."""
    wanted = set(names)
    found: dict[str, tuple[Call, str]] = {}
    for call in side.step_data.calls:
        for slot, _ in slots(call):
            name = classic_name(call, slot, side.step_data.framework)
            for each in (name, name.replace(".parameters_grad.0.", ".parameters_grad.", 1), _by_keyword(name, slot)):
                if each in wanted:
                    found.setdefault(each, (call, slot))
    return found


def _by_keyword(name: str, slot: str) -> str:
    """Return how dumps with stored tensors name what is given by keyword: `kwargs` where the others say `input`."""
    key = slot.removeprefix("kwargs.")
    return f"{name[: -len(key) - len('input.')]}kwargs.{key}" if slot.startswith("kwargs.") else name
