"""Which values of a step that are not finite matter, and which are constants, masks or memory that nobody has filled yet."""

from __future__ import annotations

import numpy as np

from trainprobe.engine.core.addresses import Address
from trainprobe.monitor.frames import Bools, Frame, Health
from trainprobe.monitor.memory import Memory

ENTERS = {
    "forward": {"input", "kwargs", "value", "parameters"},
    "recompute": {"input", "kwargs", "value", "parameters"},
    "backward": {"grad_output"},
}
_MAKERS = frozenset(
    {"tensor", "as_tensor", "scalar_tensor", "full", "full_like", "new_full", "new_tensor", "empty", "empty_like", "new_empty"}
) | {"empty_strided", "new_empty_strided", "empty_permuted"}  # the last ones hand out memory as it is


def that_matter(frame: Frame) -> Bools:
    """Return which values of a step are not finite and reach something, or may: constants and masks do not count."""
    bad = frame.health >= Health.INFINITE
    return np.zeros_like(bad) if stays_inside(frame, bad) else of_interest(frame, Memory(), bad)


def stays_inside(frame: Frame, bad: Bools) -> bool:
    """Tell whether what is not finite stands in single calls alone, and in nothing that is made of them.

    A constant, a mask, memory that nobody has filled yet, a quotient that `where` leaves out: none of it reaches a module's
    result, a gradient, a parameter or the loss. Where no gradients of parameters are collected, those of calls must be finite.
    """
    addresses = [frame.table.addresses[s] for s in frame.addresses.tolist()]
    if any(address.kind != "op" for address, b in zip(addresses, bad.tolist(), strict=True) if b):
        return False
    judged = any(address.kind == "parameter" and address.slot == "grad" for address in addresses)
    if not judged and any(address.phase == "backward" for address, b in zip(addresses, bad.tolist(), strict=True) if b):
        return False
    forward = [
        (address, b)
        for address, b in zip(addresses[: backward_begins(addresses)], bad.tolist(), strict=False)
        if of_forward(address)
    ]
    return not forward or not forward[-1][1]


def not_known(frame: Frame, memory: Memory, bad: Bools, learn: bool = False) -> Bools:
    """Tell which bad values were not bad in a step in which they did not matter; with `learn` remember them as such."""
    places = np.flatnonzero(bad)
    addresses = [frame.table.addresses[s] for s in frame.addresses[places].tolist()]
    keys = ["\t".join((address.phase, address.name, str(address.call), address.slot)) for address in addresses]
    known = memory.array("harmless", fill=False)
    new = np.array([key not in memory.keys or not known[memory.keys[key]] for key in keys])
    if learn:
        rows = [memory.row(key) for key in keys]
        memory.array("harmless", fill=False)[rows] = True
    out = np.zeros(bad.size, dtype=bool)
    out[places[new]] = True
    return out


def of_interest(frame: Frame, memory: Memory, bad: Bools) -> Bools:
    """Leave out what is known not to matter, and constants that a call makes of nothing; all stays if nothing else is bad."""
    if not bad.any():
        return bad
    made = np.array([_makes(frame.table.addresses[s]) for s in frame.addresses.tolist()])
    chosen = not_known(frame, memory, bad) & ~made
    return chosen if chosen.any() else bad


def _makes(address: Address) -> bool:
    """Tell whether a value is what a call makes of numbers or of nothing, and not of tensors."""
    return address.kind == "op" and address.name.rpartition(".")[2] in _MAKERS


def backward_begins(addresses: list[Address]) -> int:
    """Return where the backward pass begins."""
    return next((i for i, address in enumerate(addresses) if address.phase == "backward"), len(addresses))


def of_forward(address: Address) -> bool:
    """Tell whether a value is of a forward pass, run again or not."""
    return address.phase in ("forward", "recompute") and address.kind != "scalar"


def is_input(address: Address) -> bool:
    """Tell whether a value is one that a call is given."""
    return address.slot.split(".")[0] in ENTERS.get(address.phase, ())


def is_given(address: Address) -> bool:
    """Tell whether a value was there before any call of the step could make it: what a call is given, or a weight."""
    return is_input(address) or (address.kind == "parameter" and address.phase == "forward")
