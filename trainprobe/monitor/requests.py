"""The values and module calls that the monitor requests, for the taps of any framework."""

from __future__ import annotations

from collections.abc import Callable

from trainprobe.engine.capture.requests import ModuleRequest
from trainprobe.engine.plan.selection import Names
from trainprobe.engine.stats.partials import STATS
from trainprobe.monitor.plan import Collect, MonitorPlan


def modules_of_monitor(monitor: MonitorPlan | None) -> ModuleRequest:
    """Return what the monitor requests of modules: inputs, outputs and their gradients; nothing without a monitor."""
    if monitor is None:
        return ModuleRequest(no_flags, lambda name: False, frozenset(), forward=False, backward=False)
    if looks_when_asked(monitor):
        return ModuleRequest(lambda *_: STATS, lambda _: True, frozenset({"input", "output"}), backward=False, recompute=False)
    chosen = [Names(kind.names) for kind in (monitor.activations, monitor.activation_gradients) if kind.on]
    data = {"input", "output"} if monitor.activations.on or monitor.activation_gradients.on else set[str]()
    return ModuleRequest(
        flags=lambda name, module_class="": STATS,
        selected=lambda name: any(name in names for names in chosen),
        data=frozenset(data),
        forward=monitor.activations.on,
        backward=monitor.activation_gradients.on,
        recompute=False,
    )


def looks_when_asked(monitor: MonitorPlan | None) -> bool:
    """Tell whether the forward pass is looked at only in the step after a NaN whose origin was not seen."""
    return monitor is not None and not (monitor.activations.on or monitor.activation_gradients.on)


def intervals_of(monitor: MonitorPlan) -> dict[str, int]:
    """Return every how many steps values, gradients, states and updates of parameters are looked at."""
    return {
        "value": monitor.parameters.every,
        "gradient": monitor.gradients.every,
        "state": monitor.optimizer_state.every,
        "update": monitor.update.every,
    }


def no_flags(name: str, module_class: str = "") -> int:
    """Return the tape's flags for what is not looked at."""
    return 0


def flags_where(collect: Collect) -> Callable[[str], int]:
    """Return the tape's flags by name: statistics of what is chosen."""
    names = Names(collect.names)
    return lambda name: STATS if collect.on and name in names else 0
