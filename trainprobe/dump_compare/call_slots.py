"""The slots of a call and the values there: of many calls quickly, and of one that is made from others."""

from __future__ import annotations

import copyreg
from collections.abc import Mapping
from copy import copy
from functools import lru_cache
from typing import Any

from trainprobe.engine.core.records import Call, Opaque, Value
from trainprobe.engine.core.step_data import slots

_CALL = ("args", "kwargs", "out", "params", "node")
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


def refill(call: Call, values: Mapping[str, Value]) -> None:
    """Put values at the slots of a call, which holds no others any more."""
    call.args, call.kwargs, call.params, call.out = None, None, None, None
    fill(call, values)


def refilled(call: Call, values: Mapping[str, Value]) -> Call:
    """Return a copy of a call that holds these values and no others."""
    made = copy(call)
    refill(made, values)
    return made


def with_shape(value: Value, shape: tuple[int, ...]) -> Value:
    """Return the same value with another shape."""
    made = copy(value)
    made.shape = shape
    return made


def group_ranks(call: Call) -> list[int]:
    """Return the ranks of a collective's group as the dump has them; an empty list where it does not say."""
    for thing in (
        *(call.kwargs.values() if isinstance(call.kwargs, dict) else ()),
        *(call.args if isinstance(call.args, list) else ()),
    ):
        ranks = (thing.extra or {}).get("group_ranks") if isinstance(thing, Opaque) else None
        if isinstance(ranks, list):
            return [rank for rank in ranks if isinstance(rank, int)]  # pyright: ignore[reportUnknownVariableType]
    return []


def _value(row: int, dtype: str, shape: tuple[int, ...], others: dict[str, Any]) -> Value:
    return Value(row, dtype, shape, **others)


def _take_value_apart(value: Value) -> tuple[Any, ...]:
    names = ("type", "device", "requires_grad", "note", "tensor", "extra")
    return _value, (value.row, value.dtype, value.shape, {name: getattr(value, name) for name in names})


def _call(about: tuple[Any, ...], others: dict[str, Any], content: dict[str, Any]) -> Call:
    call = Call(*about, **others)
    for name, tree in content.items():
        setattr(call, name, tree)
    return call


def _take_call_apart(call: Call) -> tuple[Any, ...]:
    others = {name: getattr(call, name) for name in ("cls", "micro", "parent", "stack")}
    content = {name: tree for name in _CALL if (tree := getattr(call, name)) is not None}
    return _call, ((call.kind, call.name, call.call, call.phase), others, content)


copyreg.pickle(Value, _take_value_apart)  # to be copied, and handed to processes of our own
copyreg.pickle(Call, _take_call_apart)
