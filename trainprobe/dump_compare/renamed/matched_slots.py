"""Gives a call of B the slots of its partner in A, where two implementations hand on the same values otherwise.

One may take a tensor by keyword, return it in a tuple, keep a matrix transposed, or have samples and tokens in another order.
What only one of them takes or returns is left out, of modules that call others alone: of all others it is told as missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from trainprobe.dump_compare.call_slots import refill
from trainprobe.dump_compare.pairing import CallPair
from trainprobe.dump_compare.renamed.composed import Composed
from trainprobe.engine.core.records import Call, Value
from trainprobe.engine.core.step_data import slots

_Slots = Sequence[tuple[str, Value]]
_GIVEN, _WEIGHTS = ("input", "kwargs", "grad_output"), ("parameters",)


def with_same_slots(pairs: Iterable[CallPair], b: Composed, outer: set[str]) -> None:
    """Change the calls of B, and where one of a module that calls others has values of its own, that of A.

    outer: names in A of modules that call others.
    """
    pairs = [pair for pair in pairs if pair.a is not None and pair.b is not None]
    transposing = {classes for pair in pairs for classes in _transposed(pair)}
    for pair in pairs:
        assert pair.a is not None and pair.b is not None
        mine, theirs = slots(pair.a), slots(pair.b)
        turned = (pair.a.cls, pair.b.cls) in transposing
        if not turned and [(at, tuple(x.shape)) for at, x in mine] == [(at, tuple(x.shape)) for at, x in theirs]:
            continue
        found = _together(pair.a, mine, theirs)
        if pair.a.name in outer:
            refill(pair.a, {at: value for at, value in mine if at in found})
        elif not len(mine) == len(theirs) == len(found):
            continue
        refill(pair.b, {at: _as(value, dict(mine)[at], at, pair.a, turned, b) for at, value in found.items()})


def _together(call: Call, a: _Slots, b: _Slots) -> dict[str, Value]:
    """Return slot of A → value of B: of one sort, the same slot before others, and in order."""
    found: dict[str, Value] = {}
    for sort in {_sort(call, at): None for at, _ in a}:
        mine, theirs = ([(at, value) for at, value in side if _sort(call, at) == sort] for side in (a, b))
        for same_slot in (True, False):
            for at, value in [item for item in mine if item[0] not in found]:
                partner = next((item for item in theirs if (item[0] == at or not same_slot) and _fits(value, item[1])), None)
                if partner is not None:
                    found[at] = partner[1]
                    theirs.remove(partner)
    return found


def _sort(call: Call, slot: str) -> str:
    if call.kind == "parameter" or slot.startswith(_WEIGHTS):
        return "weight"
    return "given" if slot.startswith(_GIVEN) else "result"


def _fits(x: Value, y: Value) -> bool:
    return math.prod(x.shape) == math.prod(y.shape)


def _as(value: Value, like: Value, slot: str, call: Call, turned: bool, side: Composed) -> Value:
    """Return a value of B as its partner in A has it: transposed, or in another shape, whose order is not known."""
    shape = tuple(like.shape)
    if turned and _sort(call, slot) == "weight" and len(shape) == 2 and tuple(value.shape) == shape[::-1]:
        return side.make("transposed", [value], shape)
    return value if tuple(value.shape) == shape else side.make("reshaped", [value], shape)


def _transposed(pair: CallPair) -> set[tuple[str, str]]:
    """Return the classes of both modules where a matrix of one is that of the other transposed: so are its square ones."""
    assert pair.a is not None and pair.b is not None
    for at, value in _together(pair.a, slots(pair.a), slots(pair.b)).items():
        shape = tuple(dict(slots(pair.a))[at].shape)
        if _sort(pair.a, at) == "weight" and len(shape) == 2 and shape[0] != shape[1] and tuple(value.shape) == shape[::-1]:
            return {(pair.a.cls, pair.b.cls)}
    return set()
