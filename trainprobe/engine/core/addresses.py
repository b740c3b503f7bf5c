"""Addresses of the values of a step, and the order in which those values arose.

The value of a parameter is ("parameter", "layers.0.weight", "value") and its gradient has the slot "grad", whether a module,
the parameter itself or the optimizer's step showed it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from trainprobe.engine.core.records import Call, Phase, Site, StepData, Value
from trainprobe.engine.core.step_data import slots


class Address(NamedTuple):
    """Where a value stands in a step: phase, kind, name, call and slot."""

    phase: Phase
    kind: str
    name: str
    call: int
    slot: str

    def site(self) -> Site:
        """Return the engine's address."""
        return Site(self.kind, self.name, self.slot, self.call)  # pyright: ignore[reportArgumentType]


_GRADIENTS = {"grad_unreduced": 1, "grad_unclipped": 2, "grad": 3}


def address(phase: Phase, kind: str, name: str, call: int, slot: str) -> Address:
    """Return the address of a value; a module's own parameters have the address that they have everywhere."""
    if kind == "module" and slot.startswith("parameters."):
        short = slot.removeprefix("parameters.")
        return Address(phase, "parameter", f"{name}.{short}" if name else short, call, "value")
    return Address(phase, kind, name, call, slot)


def stage_and_phase(slot: str) -> tuple[int, Phase]:
    """Return the stage of the step at which a value of a parameter stands, and its phase.

    Values and optimizer state before the step come first of all (-1). Gradients come after the calls (1 to 3), last layer
    first, as they are made. What is seen after the step comes last (4).
    """
    if slot in _GRADIENTS:
        return _GRADIENTS[slot], "backward"
    return (4, "optimizer") if slot.endswith("_after") or slot in ("update", "updated") else (-1, "forward")


def stage_and_address(call: Call, slot: str) -> tuple[int, Address]:
    """Return the stage of a call's value (0 for what is no parameter's) and its address."""
    stage, phase, name = 0, call.phase, call.name
    if call.kind == "state":
        stage, phase = stage_and_phase(slot)
    elif call.kind == "parameter":
        name, slot = f"{name}.{slot}" if name else slot, "grad"
    return stage, address(phase, "parameter" if call.kind == "state" else call.kind, name, call.call, slot)


def order(stage: int, call: int) -> tuple[int, int]:
    """Return what sorts the values of a stage in which the call with this number shows them."""
    return stage, call if stage == 4 or stage < 1 else -call


def in_order(step_data: StepData) -> list[tuple[Address, Call, Value]]:
    """Return every value of a collected step at every place, in the order of execution."""
    found = sorted(_each(step_data), key=lambda entry: order(entry[1], entry[0]))
    return [(where, call, value) for _, _, where, call, value in found]


def _each(step_data: StepData) -> Iterator[tuple[int, int, Address, Call, Value]]:
    for i, call in enumerate(step_data.calls):
        for slot, value in slots(call):
            yield i, *stage_and_address(call, slot), call, value
