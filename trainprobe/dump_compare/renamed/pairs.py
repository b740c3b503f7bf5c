"""Pairs the calls of two dumps by names, and by structure where names fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainprobe.dump_compare.dump_side import Side
from trainprobe.dump_compare.pairing import CallPair, pair_calls
from trainprobe.dump_compare.parameter_states import pair_states
from trainprobe.dump_compare.renamed.by_structure import pair_modules
from trainprobe.dump_compare.renamed.composed import Composed
from trainprobe.dump_compare.renamed.differing_ops import without_other_ops
from trainprobe.dump_compare.renamed.fused import Fused, as_one
from trainprobe.dump_compare.renamed.matched_slots import with_same_slots


def pair_renamed(
    a: Side, b: Side, rename: Callable[[str], str] = str
) -> tuple[list[CallPair], tuple[Side, Side], list[str], dict[str, str]]:
    """Return all calls with their partners, the sides as they are to be compared, and what was not paired by name.

    That is said in sentences, and as module of A → evidence. rename: is given each name of A.
    """
    calls = a.step_data.calls, b.step_data.calls
    structure = pair_modules(a, b, rename)
    if not structure:
        pairs = pair_calls(*calls, rename)
        return [*pairs, *_states(a, b, rename, pairs)], (a, b), [], {}
    names, fused = structure.renaming(rename), structure.fused
    partners = {other for other, _ in structure.pairs.values()} | _around(fused, names)
    of_fused = {names(name) for each in fused for name in each.names(0)} | {name for each in fused for name in each.names(1)}
    calls, left_out = without_other_ops(calls, structure.looked_through, names, partners, of_fused)
    pairs = pair_calls(*calls, names, structure.looked_through)
    composed = Composed(a), Composed(b)
    by_structure = structure.pairs
    paired = [pair for pair in pairs if pair.a is not None and pair.b is not None and pair.a.name in by_structure]
    with_same_slots(paired, composed[1], {name for name, (_, how) in by_structure.items() if how == "what it calls"})
    if fused:
        pairs, said = as_one(pairs, fused, composed)
        left_out = [said, *left_out]
    pairs += _states(a, b, names, pairs)
    return pairs, composed, [*structure.note(), *left_out], structure.evidence()


def _states(a: Side, b: Side, rename: Callable[[str], str], pairs: Sequence[CallPair]) -> list[CallPair]:
    place = max((pair.place for pair in pairs), default=-1) + 1
    return pair_states(a.step_data.states, b.step_data.states, rename, place)


def _around(fused: Sequence[Fused], names: Callable[[str], str]) -> set[str]:
    """Return the names in B of the modules that call such ones: there, other ops take them apart."""
    outer = [(each.split, part.parent) for each in fused for part in each.parts]
    outer += [(1 - each.split, each.whole.parent) for each in fused]
    return {names(module.name) if side == 0 else module.name for side, module in outer if module is not None}
