"""A parameter does not change although it has a gradient: its fingerprint (or all its statistics) stays the same.

A parameter is frozen when its value is bit-equal (by checksum; without one, if norm, largest magnitude and mean are all equal)
at `patience` collected steps in a row, while its gradient and the learning rate are not zero. A gradient below 1e-6 of the
largest one counts as zero: that of a bias before a normalisation is only rounding. So does one below 1e-4 of the parameter's
largest so far: a converged training stands still. A parameter that has moved and whose largest magnitude is that of another
too is not judged: the program clips both. If gradients are not collected, a parameter counts only if it has changed before. A
parameter that is frozen on purpose has no gradient and is not judged. A parameter of 16 bits that has changed before needs
`patience_short` steps, because small updates round away for a while in a healthy training.

Typical causes: the optimizer holds other tensors than the model (accelerate issue 2665), or the update is smaller than half
a unit in the last place of a bfloat16 weight and rounds away.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np

from trainprobe.engine.core.addresses import Address
from trainprobe.engine.core.records import Finding
from trainprobe.monitor.frames import F64, I64, Bools, Frame, Selection
from trainprobe.monitor.memory import Memory
from trainprobe.monitor.rules import Patterns, RuleOptions
from trainprobe.monitor.scalar_names import scalar

_NOISE = 1e-6  # of the largest gradient of the model in a step
_AT_REST = 1e-4  # of the largest gradient that a parameter has had: below it, a training has come to rest


class Options(RuleOptions):
    """Settings of the rule `frozen`."""

    patience: int = 10
    """At how many collected steps in a row nothing may have moved."""
    patience_short: int = 100
    """The same for parameters of 16 bits that have moved before."""

    def needs(self) -> int:
        """Return how many steps must be collected until the rule can find something."""
        return self.patience + 1


def check(frame: Frame, memory: Memory, options: Options) -> list[Finding]:
    """Find parameters that have not moved for too long."""
    places, rows = memory.watch(frame, _chosen(options.names))
    if not places.size:
        return []
    last, values = memory.array("last", fill=np.nan), frame.values[places]
    same, new = last[rows] == values, np.isnan(last[rows])
    last[rows] = values
    addresses, keys, member, exact, short = memory.worked_out("parameters", places, lambda: _parameters(frame, memory, places))
    stays = _per_address(member, len(addresses), exact, same)
    ever = memory.array("ever", fill=False)
    ever[keys] |= ~stays & (np.bincount(member, new, len(addresses)) == 0)
    gradients = memory.worked_out("gradients", places, lambda: _gradients(frame, addresses))
    pulled = _pulled(frame, gradients, stays, ever[keys], memory.array("pull", fill=0.0), keys)
    held = memory.lasting("still", keys, stays & pulled)
    ripe = memory.newly("frozen", keys, held >= np.where(short & ever[keys], options.patience_short, options.patience))
    clamped = _clamped(frame, places, [addresses[i].name for i in member.tolist()]) if ripe.any() else set()
    moved = {address.name for address, key in zip(addresses, keys.tolist(), strict=True) if ever[key]}
    found = [i for i in np.flatnonzero(ripe).tolist() if addresses[i].name not in moved & clamped]
    if not found:
        return []
    of_16_bits = bool(short[found].all())
    return [_finding(frame, options, [addresses[i] for i in found], len(addresses), int(held[found[0]]), of_16_bits)]


@cache
def _chosen(names: Patterns) -> tuple[Selection, ...]:
    return (Selection(("parameter",), ("value",), ("checksum", "norm", "absmax", "mean"), names),)


def _parameters(frame: Frame, memory: Memory, places: I64) -> tuple[list[Address], I64, I64, Bools, Bools]:
    """Return the parameters at `places`, their rows; for each place its parameter, and whether a checksum stands there; and
    which parameters are of 16 bits.
    """
    numbers, member = np.unique(frame.table.addresses_of(frame.at[places]), return_inverse=True)
    addresses = [frame.table.addresses[s] for s in numbers.tolist()]
    keys = np.array([memory.row(f"parameter\t{address.name}\t{address.call}") for address in addresses])
    exact = np.array([frame.table.series[t].statistic == "checksum" for t in frame.at[places].tolist()])
    return addresses, keys, member, exact, np.array([frame.table.short[s] for s in numbers.tolist()])


def _clamped(frame: Frame, places: I64, names: list[str]) -> set[str]:
    """Return the parameters whose largest magnitude is that of others too, in every bit. names: at each place.

    So are the weights of a critic that is clipped to bounds (Arjovsky et al., 2017).
    """
    statistics = [frame.table.series[t].statistic for t in frame.at[places].tolist()]
    at = zip(names, statistics, frame.values[places].tolist(), strict=True)
    largest = {(name, value) for name, statistic, value in at if statistic == "absmax" and value > 0}
    numbers = Counter(value for _, value in largest)
    return {name for name, value in largest if numbers[value] > 1}


def _per_address(member: I64, n: int, exact: Bools, same: Bools) -> Bools:
    """Tell for each parameter whether all its statistics stayed; its checksum alone decides where there is one."""
    has_exact = np.bincount(member, exact, n) > 0
    moved = np.bincount(member, ~same & (exact | ~has_exact[member]), n) > 0
    return ~moved


def _gradients(frame: Frame, addresses: list[Address]) -> tuple[bool, I64, I64, I64]:
    """Return whether there are gradients, the places of those of the parameters in question, whose they are, and whose each
    address is: several have one name where a module is called more than once.
    """
    numbers = {name: i for i, name in enumerate(dict.fromkeys(address.name for address in addresses))}
    found: list[tuple[int, int]] = []
    for place, number in enumerate(frame.at.tolist()):
        address, statistic = frame.table.series[number]
        if address.kind == "parameter" and address.slot == "grad" and statistic in ("norm", "absmax"):
            found.append((place, numbers.get(address.name, -1)))
    places, whose = np.array([f for f in found if f[1] >= 0], np.int64).reshape(-1, 2).T
    return bool(found), places, whose, np.array([numbers[address.name] for address in addresses], np.int64)


def _pulled(frame: Frame, gradients: tuple[bool, I64, I64, I64], stays: Bools, ever: Bools, pull: F64, keys: I64) -> Bools:
    """Tell whether something should have moved each parameter: a gradient, or where none is seen, that it moved before.

    pull: the largest gradient that each parameter has had, written to. keys: the row of each.
    """
    rate, (some, places, whose, own) = scalar(frame.scalars, "learning rate"), gradients
    if rate == 0:
        return np.zeros(stays.size, dtype=bool)
    if not some:
        return ever
    sizes = np.nan_to_num(frame.values[places], nan=0.0, posinf=0.0, neginf=0.0)
    noise = _NOISE * float(np.max(sizes, initial=0.0))
    largest = np.zeros(stays.size)
    np.maximum.at(largest, whose, sizes)
    largest = largest[own]
    pull[keys] = np.maximum(pull[keys], largest)
    return (largest > noise) & (largest > _AT_REST * pull[keys])


def _finding(frame: Frame, options: Options, addresses: list[Address], of: int, held: int, of_16_bits: bool = False) -> Finding:
    hint = "check that the optimizer holds this very parameter, and that its update does not round away in its dtype"
    if of_16_bits:
        hint = (
            "its numbers have 16 bits, in which a small update rounds away. Keep the weights in float32 and compute under "
            "autocast, or use master weights. Check that the optimizer holds this very parameter"
        )
    others = f" and {len(addresses) - 1} more of {of} parameters" if len(addresses) > 1 else ""
    return options.found(
        frame,
        f"{addresses[0].name}{others} did not change over {held} collected steps although it has a gradient",
        addresses[0].site(),
        measured="unchanged",
        expected="changed by every update",
        names=tuple(dict.fromkeys(address.name for address in addresses)),
        next=hint,
    )
