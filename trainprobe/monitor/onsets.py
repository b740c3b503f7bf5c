"""Where an event began: the first place of its first step, and what is recorded of its cause, in words.

The first place is a rate that left its schedule; a weight that was written; the layer whose output jumped while what it was
given did not; the loss; gradients in the order of the backward pass. What the model was given comes before all layers: a batch
that is out of the ordinary is told of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainprobe.engine.core.addresses import Address
from trainprobe.engine.core.records import Finding
from trainprobe.monitor.frames import F64, I64, Bools, Frame
from trainprobe.monitor.rules import Severity, names_at
from trainprobe.monitor.scalar_names import role_of

SCALARS, OTHERS, GRADIENTS, WEIGHTS, INPUTS, RATES = range(6)
ROUNDING = 1e-6  # of the largest gradient of the model in a step


@dataclass(frozen=True, slots=True, eq=False)
class Onset:
    """A step at which something is out of the ordinary, [n] each: values on the log scale, what is usual, the largest so far.

    at: places in the frame. kinds: SCALARS and so on. jumped: which series jumped. moved: these, and what is told beside them.
    known: which have been seen long enough to tell. turn: 1 for a weight whose norm grew, -1 for one whose norm shrank. risen:
    which learning rate has been rising, in words, or "".
    """

    frame: Frame
    at: I64
    kinds: I64
    x: F64
    middle: F64
    largest: F64
    jumped: Bools
    moved: Bools
    known: Bools
    turn: F64
    risen: str

    def address(self, i: int) -> Address:
        """Return the address of a series."""
        return self.frame.table.series[self.frame.at[self.at[i]]].address

    def of(self, kind: int, which: Bools) -> list[int]:
        """Return the series of a kind that are chosen, in the order of the frame."""
        return np.flatnonzero(which & (self.kinds == kind)).tolist()

    def value(self, i: int) -> float:
        """Return the number of a series."""
        return float(self.frame.values[self.at[i]])


def finding_of(onset: Onset, severity: Severity, announced: str | None) -> Finding:
    """Return the finding of an event that begins. announced: the setting that changed with it, or None."""
    first = _first(onset)
    text, hint = _words(onset, first)
    if announced is not None:
        severity, text, hint = "info", f"{text}, when {announced or 'a setting was changed'}", None
    usual = float(np.exp(onset.middle[first]))
    return Finding(
        rule="spike",
        severity=severity,
        message=text,
        step=onset.frame.step,
        place=onset.frame.place,
        site=onset.address(first).site(),
        measured=onset.value(first),
        expected=usual if onset.kinds[first] != WEIGHTS else f"its norm changes by {usual:.2g} a step",
        names=names_at(onset.frame, onset.at[onset.moved]),
        next=hint,
    )


def _first(onset: Onset) -> int:
    jumped = onset.jumped
    layer = _layer(onset)
    losses = [i for i in onset.of(SCALARS, jumped) if role_of(onset.address(i).name) == "loss"]
    gradients = onset.of(GRADIENTS, jumped)
    real = [i for i in gradients if not _was_rounding(onset, i)]
    found = [*onset.of(RATES, jumped), *onset.of(WEIGHTS, jumped), *layer, *losses, *onset.of(INPUTS, onset.moved)]
    return [*found, *onset.of(SCALARS, jumped), *real, *onset.of(OTHERS, jumped), *gradients][0]


def _layer(onset: Onset) -> list[int]:
    """Return the innermost layer whose output is the first that jumped, unless all before it moved too, or the batch did."""
    outputs = [i for i in onset.of(OTHERS, onset.known) if _is_output(onset, i)]
    jumped = [i for i in outputs if onset.jumped[i]]
    if not jumped or onset.of(INPUTS, onset.moved):
        return []
    here = jumped[0]
    for i in jumped[1:]:
        if _within(onset.address(i).name, onset.address(here).name):
            here = i
    name = onset.address(here).name
    before = [i for i in outputs if i < here and not _within(name, onset.address(i).name)]
    return [here] if before and not onset.moved[before].any() else []


def _is_output(onset: Onset, i: int) -> bool:
    address = onset.address(i)
    number = int(onset.frame.table.addresses_of(onset.frame.at[onset.at[i : i + 1]])[0])
    return address.phase == "forward" and address.slot.startswith("output") and onset.frame.table.dimensions[number] > 0


def _within(name: str, outer: str) -> bool:
    return outer in ("", "root") or name.startswith(f"{outer}.")


def _was_rounding(onset: Onset, i: int) -> bool:
    """Tell whether a gradient was nothing but rounding until now."""
    gradients = [onset.value(j) for j in onset.of(GRADIENTS, np.isfinite(onset.x))]
    return bool(np.exp(onset.middle[i]) < ROUNDING * max(gradients, default=0.0))


def _words(onset: Onset, first: int) -> tuple[str, str]:
    """Return what happened, with its cause as far as it is recorded, and where to look."""
    step, kind = onset.frame.step, onset.kinds[first]
    series, value = onset.frame.table.series[onset.frame.at[onset.at[first]]], onset.value(first)
    usual = float(np.exp(onset.middle[first]))
    if kind == RATES:
        text = f"the learning rate {series} jumped to {value:.4g}, {value / usual:.3g} times the largest so far ({usual:.4g})"
        return text, "look at what sets the rate: a schedule that was begun anew, one in other units, a second one"
    if kind == WEIGHTS:
        was = value * float(np.exp(-onset.turn[first] * np.exp(onset.x[first])))
        text = (
            f"the weight {series.address.name} changed at once: its norm is {value:.4g} and was {was:.4g} at the step before"
            f"{_others(onset, first)}"
        )
        return text, f"look at the update of the step before step {step}, and at what writes to this weight between the steps"
    if kind == GRADIENTS and _was_rounding(onset, first):
        return (
            f"{series} is {value:.4g}, and rounding alone made it until now ({usual:.2g}): what cancelled it is gone"
            f"{_others(onset, first)}",
            "a bias before a normalisation has no gradient in training mode: see whether the layer behind it went into "
            "evaluation mode (no model.train() after an evaluation), or is given a batch that does not vary",
        )
    largest = f" (largest of those remembered: {float(np.exp(onset.largest[first])):.4g})" if onset.known[first] else ""
    compared = "its usual" if onset.known[first] else "the largest so far,"
    cause, hint = _cause(onset, first)
    text = f"{series} jumped to {value:.4g}, {abs(value) / usual:.3g} times {compared} {usual:.4g}{largest}"
    return f"{text}{_others(onset, first)}{cause}", hint


def _others(onset: Onset, first: int) -> str:
    """Say how many other series moved in the same step."""
    found = []
    for kind, what in ((GRADIENTS, "gradients"), (OTHERS, "layer outputs"), (SCALARS, "scalars"), (WEIGHTS, "weights")):
        moved = [i for i in onset.of(kind, onset.moved) if i != first]
        all_of_them = len(onset.of(kind, np.isfinite(onset.x)))
        found += [f"{len(moved)} of {all_of_them} {what}"] if moved else []
    return f"; so did {', '.join(found)}" if found else ""


def _cause(onset: Onset, first: int) -> tuple[str, str]:
    """Say what of the rate, the batch and the weights changed with it."""
    step = onset.frame.step
    given = onset.of(INPUTS, onset.moved)
    if given:
        times = float(np.exp(onset.x[given[0]] - onset.middle[given[0]]))
        return f"; the model was given {times:.3g} times its usual input", f"look at the batch of step {step}"
    moved = sum(map(len, (onset.of(GRADIENTS, onset.moved), onset.of(SCALARS, onset.moved))))
    if onset.risen:
        return f". {onset.risen}", "look at the learning rate: a schedule that rises for too long, or too far"
    if onset.kinds[first] in (SCALARS, GRADIENTS) and moved > 1 and onset.of(RATES, np.isfinite(onset.x)):
        return "; no rate and no weight jumped", f"look at the batch of step {step} and of the one before"
    return "", f"look at the batch of step {step} and the one before; a lower peak learning rate or clipping is the usual cure"
