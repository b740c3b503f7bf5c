"""Which linear recurrences the state of any optimizer follows, learned from sums: s' = a s + b g, or s' = a s + b g².

The sums of a tensor over its elements obey what each element does. With the parameters of a group as equations, a and b (and
c of c p, where a decay is in the gradient) follow by least squares, each equation weighed by 16 ε √n (‖s‖ + ‖s'‖ + ‖g‖), the
noise of float32 in a sum of n elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.updates import UpdateCounts, UsedGroups

F64 = npt.NDArray[np.float64]
Key = tuple[int, str]  # parameter group, slot
HOLDS, BROKEN = 8.0, 1e3  # how far an equation may be off where it holds, and must be where it does not, in units of its noise
_EPSILON = 2.0**-23
_KNOWN = frozenset({"Adam", "AdamW"})  # whose rule is known and judged as such


@dataclass(frozen=True, slots=True)
class Recurrence:
    """s' = a s + b g of a slot of state, or a s + b g² where `squared`.

    factors: a, b, and that of the parameter itself if it could be found. steps: audited steps in a row at which it held.
    """

    squared: bool
    factors: tuple[float, ...]
    steps: int


class Equations(NamedTuple):
    """The sums of one slot of a group. after, noise: [parameters]. linear, square: [parameters, terms], of g and of g²."""

    names: list[str]
    after: F64
    linear: F64
    square: F64
    noise: F64

    def terms(self, squared: bool) -> F64:
        """Return the terms of which the sum after the update is made up."""
        return self.square if squared else self.linear

    def off(self, squared: bool, factors: Sequence[float]) -> F64:
        """Return how far each equation is off, in units of its noise."""
        return np.abs(self.after - self.terms(squared) @ np.array(factors)) / self.noise

    def solved(self, squared: bool) -> tuple[float, ...]:
        """Return the factors that fit best."""
        weighed = self.terms(squared) / self.noise[:, None]
        return tuple(float(x) for x in np.linalg.lstsq(weighed, self.after / self.noise, rcond=None)[0])


def learned(evidence: Evidence, known: Mapping[Key, Recurrence]) -> dict[Key, Recurrence]:
    """Return the recurrences that hold in this step, and at how many audited steps in a row they did."""
    found = dict(known) if not evidence.of(UpdateCounts).updates else dict[Key, Recurrence]()
    for key, equations in equations_of(evidence).items():
        for squared in (False, True):
            factors = equations.solved(squared)
            if equations.off(squared, factors).max() <= HOLDS:
                before = known.get(key)
                found[key] = Recurrence(squared, factors, before.steps + 1 if before and before.squared == squared else 1)
                break
    return found


def equations_of(evidence: Evidence) -> dict[Key, Equations]:
    """Return the finite sums of every slot of state whose rule is not known, of groups in which four parameters have it."""
    seen, out = evidence.tensors, dict[Key, Equations]()
    if not evidence.of(UpdateCounts).once:
        return out
    slots = dict.fromkeys(slot for _, slot in seen.rows if (slot + "_after") not in ("value_after", "main_value_after"))
    for i, group in enumerate(evidence.of(UsedGroups).groups):
        for slot in () if group.kind in _KNOWN else slots:
            names = [
                name for name in seen.with_slot(f"{slot}_after") if name in group.names and _is_plain(evidence, name, slot)
            ]
            equations = _equations(evidence, names, slot) if len(names) >= 4 else None
            if equations is not None and all(np.isfinite(numbers).all() for numbers in equations[1:]):
                out[i, slot] = equations
    return out


def _is_plain(evidence: Evidence, name: str, slot: str) -> bool:
    seen = evidence.tensors
    there = (name, slot) in seen and (name, "grad") in seen and seen.number(name, slot, "count") > 1
    return there and seen.dtypes[name, slot] == "float32" == seen.dtypes[name, "grad"] and seen.number(name, "grad", "norm") > 0


def _equations(evidence: Evidence, names: list[str], slot: str) -> Equations:
    numbers = _columns(evidence, names, {"s": slot, "after": f"{slot}_after", "g": "grad", "p": "value"})
    decayed = [numbers["p", "sum"]] if len(names) >= 6 else []
    size = numbers["s", "norm"] + numbers["after", "norm"] + numbers["g", "norm"]
    noise = 16 * _EPSILON * np.sqrt(numbers["s", "count"]) * size + 1e-30
    linear = np.stack([numbers["s", "sum"], numbers["g", "sum"], *decayed], 1)
    square = np.stack([numbers["s", "sum"], numbers["g", "norm"] ** 2], 1)
    return Equations(names, numbers["after", "sum"], linear, square, noise)


def _columns(evidence: Evidence, names: list[str], slots: Mapping[str, str]) -> dict[tuple[str, str], F64]:
    seen, statistics = evidence.tensors, ("sum", "norm", "count")
    return {
        (short, statistic): np.array([seen.number(name, slot, statistic) for name in names])
        for short, slot in slots.items()
        for statistic in statistics
    }
