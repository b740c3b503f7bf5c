"""How far a series may go, for the rules that know one limit for the loss and one for norms."""

from __future__ import annotations

import re

import numpy as np

from trainprobe.monitor.frames import F64, I64, Bools, Frame, Series
from trainprobe.monitor.memory import Memory
from trainprobe.monitor.scalar_names import role_of

_WHOLE = re.compile(r"((train|training|total|reported|lm)[ _./-]?)?loss([ _./-](total|train|sum))?")
_FADES = 1 - 2**-10
LEAST = 1e-6  # of the largest value that a series has had: a smaller one is what rounding leaves


def limits(frame: Frame, memory: Memory, places: I64, rows: I64, *, loss: float, norms: float) -> F64:
    """Return the limit of each series, [n]: `loss`, `norms`, or 0 for a scalar that is neither the loss nor a gradient norm.

    A loss that nobody minimises as a whole has the limit of norms (see `falling`).
    """

    def limit(series: Series) -> float:
        role = role_of(series.address.name) if series.address.kind == "scalar" else "gradient norm"
        return {"loss": loss, "gradient norm": norms}.get(role or "", 0.0)

    def work() -> F64:
        found = memory.learned("limit", frame, places, rows, limit)
        return np.where(losses(frame, memory, places, rows) & ~falling(frame, memory, places, rows), norms, found)

    return memory.worked_out(f"limits {loss} {norms} {in_turns(frame)}", places, work)


def losses(frame: Frame, memory: Memory, places: I64, rows: I64) -> Bools:
    """Tell which series are losses, [n]."""
    return memory.worked_out("losses", places, lambda: memory.learned("loss", frame, places, rows, _kind_of_loss) > 0)


def falling(frame: Frame, memory: Memory, places: I64, rows: I64) -> Bools:
    """Tell which series are losses that a healthy training never lets rise for long, [n].

    That is the one loss of a training, or the one that its name calls the whole. Parts of a loss trade places, a loss of
    validation rises when a model is overfitted, and where optimizers take turns (adversaries) each undoes what another did.
    """

    def work() -> Bools:
        kinds = memory.learned("loss", frame, places, rows, _kind_of_loss)
        alone = sum(role_of(name) == "loss" for name in frame.scalars) == 1
        return kinds < 0 if in_turns(frame) else (kinds == 1) | ((kinds == 2) & alone)

    return memory.worked_out(f"falling {in_turns(frame)}", places, work)


def in_turns(frame: Frame) -> bool:
    """Tell whether several optimizers take turns in a step."""
    return not frame.scalars.get("objectives", 0.0) < 2


def above_rounding(memory: Memory, rows: I64, size: F64) -> F64:
    """Return magnitudes, [n], raised where they are nothing but rounding compared with what their series has been.

    The loss of a model that has learned its data by heart wanders over decades, and says nothing by it. What is remembered of
    the largest value rises by no more than a factor of three at a time, because of outliers, and fades slowly.
    """
    largest = memory.array("largest", fill=0.0)
    known = largest[rows] * _FADES
    finite = np.isfinite(size)
    seen = size if finite.all() else np.where(finite, size, 0.0)
    new = known == 0
    risen = np.minimum(seen, 3 * known)
    now = np.maximum(known, np.where(new, seen, risen) if new.any() else risen)
    largest[rows] = now
    return np.maximum(size, LEAST * now)


def _kind_of_loss(series: Series) -> float:
    """Return 1 for a loss that is called the whole, 2 for another, 0 for what is none."""
    name = series.address.name.lower()
    if series.address.kind != "scalar" or role_of(name) != "loss":
        return 0.0
    return 1.0 if _WHOLE.fullmatch(name) else 2.0
