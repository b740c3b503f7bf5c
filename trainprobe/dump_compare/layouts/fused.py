"""A module of one layout that is several of another (q, k and v in one projection): what all ranks hold of these, side by side.

Each of the several is joined from its ranks as any other value is, all in the same way; together they are as large as the one.
The order of rows is another in each family of models: where it is not known (see renamed.fused_rows), or not where each rank's
part lies, statistics tell how far the two are apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from trainprobe.dump_compare.layouts.joined import Join, RankPart
from trainprobe.dump_compare.layouts.split_table import SplitRule
from trainprobe.dump_compare.layouts.splits import Role, by_boxes, readings, sum_of, whole_shape
from trainprobe.dump_compare.layouts.state_slots import Slots, comparable, is_known, with_zeros
from trainprobe.dump_compare.renamed.fused import Fused
from trainprobe.dump_compare.renamed.fused_rows import Laid, RowOrder

_SHARED = ("input", "kwargs")  # what all of them are given
_SHARES = "grad_input"


@dataclass(frozen=True, slots=True)
class Beside:
    """The values of modules that are one on one side and several on the other.

    joined: slot of the one module → how its parts make a whole, and how those of the several do. alone: slots that the one
    module has and one of the several has not. alone_in_parts: which of the several has a slot that the one has not. unjoined:
    slots that both have and for which no way to join them is known.
    """

    joined: Mapping[str, tuple[Join, Join]]
    alone: Sequence[str]
    alone_in_parts: Sequence[tuple[int, str]]
    unjoined: Sequence[str]


def beside(
    whole: Slots,
    parts: Sequence[Slots],
    role_of: Mapping[str, Role],
    rules: Callable[[str], tuple[SplitRule | None, SplitRule | None]],
) -> Beside:
    """Return what the values of several modules come to beside those of one.

    Left out are gradients at inputs, of which each of the several has a share. rules: slot → what a table of splits says of the
    one, and of the several.
    """
    joined: dict[str, tuple[Join, Join]] = {}
    alone, unjoined, met = list[str](), list[str](), set[tuple[int, str]]()
    for slot, mine in whole.items():
        if slot.startswith(_SHARES):
            continue
        places = [(i, at) for i, each in enumerate(parts) if (at := _place(slot, each, whole)) is not None]
        met.update(places)
        if len(places) < len(parts):
            alone += [slot] if _held(mine) else []
            continue
        theirs = [parts[i][at] for i, at in (places[:1] if slot.startswith(_SHARED) else places)]
        made = _terms(mine, theirs) if role_of[slot] == "weight gradient" else _parts(mine, theirs, role_of[slot], rules(slot))
        if made is not None:
            joined[slot] = made
        elif any(map(_held, (mine, *theirs))):
            unjoined.append(slot)
    own = ((i, at) for i, each in enumerate(parts) for at, of in each.items() if _held(of) and not at.startswith(_SHARES))
    return Beside(joined, alone, [place for place in own if place not in met], unjoined)


def _held(parts: Sequence[RankPart]) -> bool:
    return any(part.size for part in parts)


def _place(slot: str, there: Slots, whole: Slots) -> str | None:
    """Return the slot that stands where the one module has `slot`: the same, or the only one of its sort."""
    if slot in there:
        return slot
    sort = slot.partition(".")[0]
    alike = [[at for at in each if at.partition(".")[0] == sort] for each in (there, whole)]
    return alike[0][0] if len(alike[0]) == len(alike[1]) == 1 else None


def _parts(
    whole: Sequence[RankPart], parts: Sequence[Sequence[RankPart]], role: Role, rules: tuple[SplitRule | None, SplitRule | None]
) -> tuple[Join, Join] | None:
    ways = [joins for joins in zip(*(readings(each, role, rules[1]) for each in parts), strict=False) if _lie_beside(joins)]
    for mine, joins in product([join for join in readings(whole, role, rules[0]) if _lie_beside([join])], ways):
        theirs = _together(joins)
        made = (_as_formed(mine, joins) or _of_one_size(mine, theirs)) if mine.size == theirs.size else None
        if made is not None:
            return made
    return None


def _of_one_size(mine: Join, theirs: Join) -> tuple[Join, Join] | None:
    shape = whole_shape(mine, theirs)
    return None if shape is None else (replace(mine, shape=shape), replace(theirs, shape=shape))


def _as_formed(mine: Join, joins: Sequence[Join]) -> tuple[Join, Join] | None:
    """Return the joins of the one and of the several in the shape of the one, None where a shape is not known."""
    forms = [join.form for join in joins]
    if mine.form is None or len(joins) == 1:
        return None
    several = [replace(join, shape=form) for join, form in zip(joins, forms, strict=True) if form is not None]
    made = replace(_together(joins), shape=mine.form, several=several)
    return (replace(mine, shape=mine.form), made) if len(several) == len(joins) else None


def _lie_beside(joins: Sequence[Join]) -> bool:
    return all(join.how == "parts" for join in joins)


def _together(joins: Sequence[Join]) -> Join:
    """Return the join of all parts; where in the whole each lies is not known."""
    first = joins[0]
    terms = first.terms if len({join.terms for join in joins}) == 1 else 1
    copies = [copy for join in joins for copy in join.replicas]
    return Join([part for join in joins for part in join.parts], first.how, (), copies, terms=terms)


def _terms(whole: Sequence[RankPart], parts: Sequence[Sequence[RankPart]]) -> tuple[Join, Join] | None:
    """Join gradients of weights before they are reduced (see splits.joins)."""
    for split, of_whole in product((False, True), (False, True)):
        mine, theirs = sum_of(whole, of_whole), [sum_of(each, split) for each in parts]
        found = [each for each in theirs if each is not None]
        if mine is None or len(found) < len(theirs) or len({join.how for join, _ in found}) > 1:
            continue
        size = sum(part.size for part in mine[1])
        if size == sum(part.size for _, of_one in found for part in of_one):
            theirs, forms = _together([join for join, _ in found]), [_form_of_sum(*each) for each in (mine, *found)]
            several = [replace(join, shape=form) for (join, _), form in zip(found, forms[1:], strict=True) if form is not None]
            if forms[0] is None or len(several) < len(found):
                return replace(mine[0], shape=(size,)), replace(theirs, shape=(size,))
            return replace(mine[0], shape=forms[0]), replace(theirs, shape=forms[0], several=several)
    return None


def _form_of_sum(join: Join, of_sample: Sequence[RankPart]) -> tuple[int, ...] | None:
    """Return the shape of a gradient that is added up, None where it is not known."""
    return join.form if join.how == "parts" else of_sample[0].shape if len(of_sample) == 1 else None


def matrix(found: Beside) -> tuple[Join, Join] | None:
    """Return how the one and the several make their only matrix of weights, None where they have several, or none."""
    weights = [both for slot, both in found.joined.items() if slot.startswith("parameters.") and both[1].several]
    matrices = [both for both in weights if len(both[0].shape) == 2]
    return matrices[0] if len(matrices) == 1 else None


@dataclass(frozen=True, slots=True)
class FusedRows:
    """Modules of one side that are one on the other, and how the rows of these lie in the one where that is known."""

    fused: Fused
    rows: RowOrder | None = None


def fused_states(
    each: FusedRows, held: Sequence[Mapping[str, Slots]]
) -> Iterator[tuple[tuple[str, str], dict[str, tuple[Join, Join]]]]:
    """Yield the names of a parameter on both sides, and slot → how each side makes it, of modules that are one on one side.

    held: of each side, parameter → slot → what ranks hold.
    """
    fused = each.fused
    of_whole, of_parts = held[1 - fused.split], held[fused.split]
    prefix = f"{fused.whole.name}."
    for name in [name for name in of_whole if name.startswith(prefix) and "." not in name.removeprefix(prefix)]:
        short = name.removeprefix(prefix)
        mine, theirs = of_whole[name], [of_parts.get(f"{part.name}.{short}", {}) for part in fused.parts]
        slots = [slot for slot in comparable(mine, theirs[0]) if all(slot in of or slot in mine for of in theirs)]
        joins = {slot: made for slot in slots if (made := _of_states(each, slot, mine, theirs)) is not None}
        names = (name, f"{fused.name}.{short}") if fused.split == 1 else (f"{fused.name}.{short}", name)
        yield names, {slot: (one, more) if fused.split == 1 else (more, one) for slot, (one, more) in joins.items()}


def _of_states(each: FusedRows, slot: str, mine: Slots, theirs: Sequence[Slots]) -> tuple[Join, Join] | None:
    """Return how the one and the several make what stands in a slot of a parameter, None where no way is known."""
    whole, parts = with_zeros(slot, mine, theirs[0]), [with_zeros(slot, of, mine) for of in theirs]
    if (
        not whole
        or not all(parts)
        or not is_known(slot, whole, mine)
        or not all(map(is_known, [slot] * len(parts), parts, theirs))
    ):
        return None
    one, several = by_boxes(whole), [by_boxes(part) for part in parts]
    if one.size != sum(join.size for join in several):
        if {join.size for join in several} != {one.size}:
            return None
        first = several[0]  # a count of steps, which all of them have
        copies = [*first.replicas, *((first.parts[0], join.parts[0]) for join in several[1:])]
        return replace(one, shape=(one.size,)), replace(first, shape=(one.size,), replicas=copies)
    together, forms = _together(several), [join.form for join in several]
    shaped = [replace(join, shape=form) for join, form in zip(several, forms, strict=True) if form is not None]
    if each.rows is None or one.form is None or len(shaped) < len(several):
        return replace(one, shape=(one.size,)), replace(together, shape=(one.size,))
    laid = Laid(each.rows, each.fused.short_names, weights=True)
    return replace(one, shape=one.form), replace(together, shape=one.form, several=shaped, laid=laid)
