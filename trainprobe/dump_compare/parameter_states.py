"""What two dumps of one layout hold of parameters and their optimizer, as calls: gradients as it sees them, and its step.

A dump holds this beside the calls where a monitor looked at the same step. What the optimizer makes of a parameter is compared
behind all calls, so that an operator of it, where the dump has those, is named before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from trainprobe.dump_compare.pairing import CallPair
from trainprobe.engine.core.records import Call, Phase

AFTER = "_after"  # ends the slots of what the optimizer leaves
UPDATES = ("update", "main_update")  # what it adds to a parameter
_Values = Mapping[str, object]


def is_made(slot: str) -> bool:
    """Tell whether a slot of a parameter shows what the optimizer makes."""
    return slot.endswith(AFTER) or slot in UPDATES


def state_slot(slot: str) -> str:
    """Return the slot of a parameter's state that a value of a call shows: a weight stands as `parameters.NAME` in it."""
    return "value" if slot.startswith("parameters.") else slot


def pair_states(
    a: Sequence[Call], b: Sequence[Call], rename: Callable[[str], str], place: int, common: Callable[[str], str] = str
) -> list[CallPair]:
    """Return the gradients that the optimizer is given, of all parameters, and behind them what it makes of each.

    a, b: the states of both dumps. rename: is given the name of each module of A. place: the first that is free. common: is
    given the name of each parameter, of A as B has it.
    """
    held = _by_parameter(a, lambda name: common(renamed_parameter(name, rename))), _by_parameter(b, common)
    pairs: list[CallPair] = []
    phases: tuple[tuple[bool, Phase], ...] = ((True, "backward"), (False, "step"))
    for wanted, phase in phases:
        for name in {**held[0], **held[1]}:
            calls = [_call(of.get(name), wanted, phase) for of in held]
            if any(calls):
                pairs.append(CallPair(place + len(pairs), *calls))
    return pairs


def _by_parameter(states: Sequence[Call], rename: Callable[[str], str]) -> dict[str, tuple[str, dict[str, object]]]:
    """Return parameter as B has it → its own name, and its values by slot."""
    found: dict[str, tuple[str, dict[str, object]]] = {}
    for call in states:
        for slot, value in (call.params or {}).items():
            found.setdefault(rename(call.name), (call.name, {}))[1].setdefault(slot, value)
    return found


def renamed_parameter(parameter: str, rename: Callable[[str], str]) -> str:
    """Return the name of a parameter of A as B has it."""
    module, dot, short = parameter.rpartition(".")
    return f"{rename(module)}{dot}{short}" if dot else parameter


def _call(held: tuple[str, _Values] | None, gradients: bool, phase: Phase) -> Call | None:
    values = {} if held is None else {at: value for at, value in held[1].items() if at.startswith("grad") == gradients}
    given = {} if held is None or gradients else {at: value for at, value in held[1].items() if at == "grad"}
    if held is None or not values:
        return None
    call = Call("state", held[0], 0, phase, parent=None if gradients else "optimizer")
    call.params = {**values, **given}
    return call
