"""Puts values at the slots of a call that is made from others."""

from __future__ import annotations

from collections.abc import Mapping

from trainprobe.engine.core.records import Call, Value


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
