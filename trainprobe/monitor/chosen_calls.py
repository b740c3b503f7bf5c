"""Keeps of a step what the monitor chose of activations and of their gradients, where each has patterns of its own."""

from __future__ import annotations

from collections.abc import Callable

from trainprobe.engine.core.records import Finding, StepData
from trainprobe.engine.plan.selection import Names
from trainprobe.monitor.plan import MonitorPlan


def chosen_calls(plan: MonitorPlan) -> Callable[[StepData], list[Finding]] | None:
    """Return what drops from a collected step the calls of modules that were not chosen; None where both kinds choose the same.

    A step that is dumped in full is left as it is.
    """
    forward, backward = plan.activations, plan.activation_gradients
    if not (forward.on and backward.on) or (forward.names, forward.every) == (backward.names, backward.every):
        return None
    kinds = {"forward": (forward.every, Names(forward.names)), "backward": (backward.every, Names(backward.names))}

    def drop(step_data: StepData) -> list[Finding]:
        if not step_data.dumped:
            due = {phase: names if step_data.step % every == 0 else Names(("!**",)) for phase, (every, names) in kinds.items()}
            step_data.change(
                calls=[c for c in step_data.calls if c.kind != "module" or c.phase not in due or c.name in due[c.phase]]
            )
        return []

    return drop
