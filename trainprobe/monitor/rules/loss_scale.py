"""A dynamic loss scale that collapses: it is halved again and again and never recovers, or sinks below one.

After the scale has held still for `settle` collected steps in a row (at the start it is searched downwards from a large number,
which is in order), it collapses when it falls to 1/2^`halvings` or less of its largest value of the last `window` collected
steps. A scale below `least` is a collapse at any time, and so is one that was lower at each of `searches` collected steps in a
row than at the one before: a search from 2^32, the highest that trainers begin with, is over by then.

Source: dynamic loss scaling as in Micikevicius et al. (2018), "Mixed precision training", section 3.2.
"""

from __future__ import annotations

import numpy as np

from trainprobe.engine.core.records import Finding, Site
from trainprobe.monitor.frames import Frame
from trainprobe.monitor.memory import Memory
from trainprobe.monitor.rules import RuleOptions, Severity
from trainprobe.monitor.scalar_names import role_of, scalar


class Options(RuleOptions):
    """Settings of the rule `loss_scale`."""

    severity: Severity = "error"
    """The severity of findings of this rule."""
    halvings: int = 6
    """How many halvings within the window make a collapse."""
    window: int = 64
    """How many collected steps are looked at."""
    settle: int = 16
    """How many collected steps the scale must hold still before it is judged."""
    least: float = 1.0
    """A scale below this is a collapse."""
    searches: int = 32
    """A search takes fewer collected steps."""


def check(frame: Frame, memory: Memory, options: Options) -> list[Finding]:
    """Judge the loss scale of this step."""
    scale = scalar(frame.scalars, "loss scale")
    if scale is None or not np.isfinite(scale):
        return []
    row = memory.row("loss scale")
    still = memory.numbers.get("still", 0.0) + 1 if scale == memory.numbers.get("last") else 0.0
    fell = memory.numbers.get("fell", 0.0) + 1 if scale < memory.numbers.get("last", 0.0) else 0.0
    memory.numbers |= {"last": scale, "still": still, "fell": fell}
    if still >= options.settle:
        memory.numbers["settled"] = 1.0
    ring, n = memory.array("ring", width=options.window, fill=0.0), int(memory.numbers.get("count", 0))
    if memory.numbers.get("settled"):
        ring[row, n % options.window] = scale
        memory.numbers["count"] = n + 1
    peak = float(ring[row].max())
    collapsed = scale < options.least or fell >= options.searches or (peak > 0 and scale <= peak / 2.0**options.halvings)
    if not memory.newly("collapsed", np.array([row]), np.array([collapsed]))[0]:
        return []
    name = next(name for name in frame.scalars if role_of(name) == "loss scale")
    was = f"from {peak:.6g} within {options.window} collected steps" if peak > scale else f"below {options.least:g}"
    was = f"lower at each of {int(fell)} steps in a row" if fell >= options.searches else was
    return [
        options.found(
            frame,
            f"the loss scale collapsed to {scale:.6g}, {was}: every step overflows",
            Site("scalar", name, "value"),
            measured=scale,
            expected=peak or options.least,
            next="find the layer whose gradient overflows first: the rule `nonfinite` names it",
        )
    ]
