"""The slots of a call and the values there: of many calls quickly, and of one that is made from others."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from trainprobe.engine.core.records import Call, Value
from trainprobe.engine.core.step_data import slots

_RUNS = ("op", "module", "collective")
_RESULTS = ("output", "grad_input")  # first parts of the slots of what a call gives; the others are what it is given


@lru_cache(maxsize=4096)
def is_result(slot: str) -> bool:
    """Return whether a call gives what stands at a slot, or is given it."""
    return slot.partition(".")[0] in _RESULTS


def named_values(call: Call) -> tuple[tuple[str, ...], list[Value]]:
    """Return the slots of a call, and the value at each.

    Most calls are given a list of tensors, give another, and nothing else; then the slots are one object for all such calls.
    """
    given, results = call.args, call.out
    if call.kwargs is None and call.params is None and type(given) is list and type(results) is list and call.kind in _RUNS:
        values = given + results
        if set(map(type, values)) <= {Value}:
            return _slots_of_lists(call.phase == "backward", len(given), len(results)), values
    found = slots(call)
    return tuple([slot for slot, _ in found]), [value for _, value in found]


@lru_cache(maxsize=4096)
def _slots_of_lists(backward: bool, given: int, results: int) -> tuple[str, ...]:
    call = Call("op", "", 0, "backward" if backward else "forward")
    call.args, call.out = ([Value(-1, "", ())] * count for count in (given, results))
    return tuple([slot for slot, _ in slots(call)])


def fill(call: Call, values: Mapping[str, Value]) -> None:
    """Put values at the slots of a call."""
    if call.kind in ("parameter", "state"):
        call.params = dict(values)
        return
    sides = {
        "input": "args",
        "grad_output": "args",
        "kwargs": "kwargs",
        "parameters": "params",
        "output": "out",
        "grad_input": "out",
    }
    for slot, value in values.items():
        first, _, rest = slot.partition(".")
        side = sides.get(first, "args")
        if not rest:
            setattr(call, side, value)
        else:
            tree = getattr(call, side) or {}
            tree[rest] = value
            setattr(call, side, tree)
