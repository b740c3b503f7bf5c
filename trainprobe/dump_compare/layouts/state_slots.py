"""What dumps hold of one parameter, slot by slot: what another layout can be compared with, and how what is lacking counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace

from trainprobe.dump_compare.intervals import format_name
from trainprobe.dump_compare.layouts.joined import RankPart
from trainprobe.dump_compare.layouts.rank_boxes import cut_by
from trainprobe.dump_compare.layouts.unstepped_states import NoState
from trainprobe.dump_compare.parameter_states import AFTER, UPDATES, is_made
from trainprobe.engine.compare.number_formats import FORMATS

SLOTS = ("value", "grad_unclipped", "grad")
UNREDUCED = "grad_unreduced"
_NO_STATE = ("value", "main_value", *UPDATES)
Slots = Mapping[str, Sequence[RankPart]]


def comparable(mine: Slots, theirs: Slots) -> list[str]:
    """Return the slots of either side that can be the same in another layout."""
    return [slot for slot in {**mine, **theirs} if not is_quantised([*mine.get(slot, ()), *theirs.get(slot, ())])]


def is_quantised(parts: Sequence[RankPart]) -> bool:
    """Return whether a state is kept in whole numbers: in blocks of a scale each, which begin elsewhere in another layout."""
    formats = [FORMATS.get(format_name(part.value.dtype)) for part in parts if part.size > 1]
    return any(each is None or each.mantissa is None for each in formats)


def with_zeros(slot: str, mine: Slots, theirs: Slots) -> list[RankPart]:
    """Return what ranks hold at a slot; zeros for the state that an optimizer makes in this step and did not hold before.

    Where neither side holds it before, there is nothing to compare.
    """
    parts = list(mine.get(slot, ()))
    if slot.startswith("grad") or slot in _NO_STATE or is_made(slot) or not (parts or theirs.get(slot)):
        return parts
    here = {(part.rank, part.box) for part in parts}
    return [*parts, *(_zeros(part) for part in mine.get(f"{slot}{AFTER}", ()) if (part.rank, part.box) not in here)]


def _zeros(part: RankPart) -> RankPart:
    value = copy(part.value)
    value.extra = {name: told for name, told in (value.extra or {}).items() if name != "share"}
    return replace(part, side=NoState(part.side), value=value)


def is_known(slot: str, parts: Sequence[RankPart], of_parameter: Slots) -> bool:
    """Return whether it is known which part of a parameter each rank's value is, or that all of them are copies."""
    if any(part.box is not None and part.box.term for part in parts):
        return False
    if all(part.box is not None for part in parts) or slot.removesuffix(AFTER) == "step":
        return True
    others = [part for at in ("value", "grad", "main_value") for part in of_parameter.get(at, ())]
    return not any(cut_by(part.box, part.value) for part in others)
