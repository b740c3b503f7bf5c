"""What changes between two steps: weights, or an optimizer's state, that are no longer what the step before has left.

Where both dumps hold a step and the next one, each weight and state is as far apart at the beginning of the second as it was
behind the first. If it is further apart, something has changed it on one side: a checkpoint that was loaded without it, say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trainprobe.dump_compare.distances import SLACK, Distance
from trainprobe.dump_compare.judge import Judged
from trainprobe.dump_compare.parameter_states import AFTER

Left = Mapping[tuple[str, str], float]  # parameter and slot → how far apart a step has left it


def is_step(judged: Judged) -> bool:
    """Return whether a call is what an optimizer makes of a parameter."""
    return judged.call.kind == "state" and any(value.slot.endswith(AFTER) for value in judged.values)


def left_by(calls: Sequence[Judged]) -> dict[tuple[str, str], float]:
    """Return how far apart a step has left weights and states, where both dumps hold them."""
    return {
        (one.call.name, value.slot.removesuffix(AFTER)): value.interval.high
        for one in calls
        if is_step(one)
        for value in one.values
        if value.slot.endswith(AFTER)
    }


def changed(judged: Judged, left: Left) -> tuple[Distance, float] | None:
    """Return the first weight or state that is further apart than the step before has left it, and how far that was."""
    if judged.call.kind != "state" or judged.call.phase != "step":
        return None
    for value in judged.values:
        slot = "value" if value.slot.startswith("parameters.") else value.slot
        was = left.get((judged.call.name, slot), math.inf)
        if not value.result and value.interval.low > SLACK * max(was, value.epsilon):
            return value, was
    return None
