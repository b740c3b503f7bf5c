"""Pairs the calls of two dumps by names, and by structure where names fail."""

from __future__ import annotations

from collections.abc import Callable

from trainprobe.dump_compare.dump_side import Side
from trainprobe.dump_compare.pairing import CallPair, pair_calls
from trainprobe.dump_compare.renamed.by_structure import pair_modules
from trainprobe.dump_compare.renamed.composed import Composed
from trainprobe.dump_compare.renamed.other_ops import without_other_ops
from trainprobe.dump_compare.renamed.same_slots import with_same_slots


def pair_renamed(
    a: Side, b: Side, rename: Callable[[str], str] = str
) -> tuple[list[CallPair], tuple[Side, Side], list[str], dict[str, str]]:
    """Return all calls with their partners, the sides as they are to be compared, and what was not paired by name.

    That is said in sentences, and as module of A → evidence. rename: is given each name of A.
    """
    calls = a.step_data.calls, b.step_data.calls
    structure = pair_modules(a, b, rename)
    if not structure.pairs:
        return pair_calls(*calls, rename), (a, b), [], {}
    names, partners = structure.renaming(rename), {other for other, _ in structure.pairs.values()}
    calls, left_out = without_other_ops(calls, structure.looked_through, names, partners)
    pairs = pair_calls(*calls, names, structure.looked_through)
    composed = Composed(b)
    by_structure = {name: evidence for name, (_, evidence) in structure.pairs.items()}
    paired = [pair for pair in pairs if pair.a is not None and pair.b is not None and pair.a.name in by_structure]
    with_same_slots(paired, composed, {name for name, evidence in by_structure.items() if evidence == "what it calls"})
    return pairs, (a, composed), [*structure.note(), *left_out], dict(by_structure)
