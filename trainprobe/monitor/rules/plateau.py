"""A loss that no longer falls: the newer half of a long window is not lower than the older half.

Over the last `window` losses, with the means a (older half) and b (newer half) and their standard errors,

    t = (a - b) / sqrt(var_a/n_a + var_b/n_b) < 1        and        b > a · (1 - `least`)

is judged every `window`/8 collected steps. Every training reaches a plateau in the end, so this is a note and not an alarm.

Source: the two-sample statistic of Welch (1947).
"""

from __future__ import annotations

import numpy as np

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.frames import Frame
from trainprobe.monitor.memory import Memory
from trainprobe.monitor.rules import RuleOptions, Severity
from trainprobe.monitor.scalar_names import scalar


class Options(RuleOptions):
    """Settings of the rule `plateau`."""

    severity: Severity = "info"
    """The severity of findings of this rule."""
    window: int = 2000
    """How many collected losses are looked at."""
    least: float = 0.002
    """The share by which the newer half must be lower."""

    def needs(self) -> int:
        """Return how many steps must be collected until the rule can find something."""
        return self.window


def check(frame: Frame, memory: Memory, options: Options) -> list[Finding]:
    """Compare the two halves of the window from time to time."""
    loss = scalar(frame.scalars, "loss")
    if loss is None or not np.isfinite(loss):
        return []
    row, n = memory.row("loss"), int(memory.numbers.get("count", 0))
    ring = memory.array("ring", width=options.window, fill=np.nan)
    ring[row, n % options.window] = loss
    memory.numbers["count"] = n + 1
    if n + 1 < options.window or (n + 1) % max(1, options.window // 8):
        return []
    ordered = np.roll(ring[row], -((n + 1) % options.window))
    older, newer = ordered[: options.window // 2], ordered[options.window // 2 :]
    error = float(np.sqrt(older.var(ddof=1) / older.size + newer.var(ddof=1) / newer.size))
    flat = older.mean() - newer.mean() < error and newer.mean() > older.mean() - options.least * abs(older.mean())
    if not memory.newly("flat", np.array([row]), np.array([bool(flat)]), rearm=8)[0]:
        return []
    return [
        options.found(
            frame,
            f"the loss has not fallen over the last {options.window} collected steps: "
            f"{older.mean():.5g} in the older half, {newer.mean():.5g} in the newer",
            None,
            measured=float(newer.mean()),
            expected=float(older.mean()),
            floor=error,
            next="if it should still fall, look at the learning rate and at frozen or dead layers",
        )
    ]
