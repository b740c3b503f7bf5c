"""The values and module calls that the monitor requests, for the taps of any framework."""

from __future__ import annotations

from collections.abc import Callable

from trainprobe.engine.capture.requests import FeatureRequest, ModuleRequest, StatesRequest
from trainprobe.engine.plan.selection import Names
from trainprobe.engine.stats.partials import STATS
from trainprobe.monitor.feature_plan import Features
from trainprobe.monitor.plan import Collect, MonitorPlan


def modules_of_monitor(monitor: MonitorPlan) -> ModuleRequest:
    """Return what the monitor requests of modules: inputs, outputs and their gradients."""
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


def looks_when_asked(monitor: MonitorPlan) -> bool:
    """Tell whether the forward pass is looked at only in the step after a NaN whose origin was not seen."""
    return not (monitor.activations.on or monitor.activation_gradients.on)


def states_of_monitor(monitor: MonitorPlan) -> StatesRequest:
    """Return what the monitor requests of parameters, gradients and optimizer state."""
    gradients = monitor.gradients
    return StatesRequest(
        value=flags_where(monitor.parameters),
        gradient=flags_where(gradients),
        state=flags_where(monitor.optimizer_state),
        update=flags_where(monitor.update),
        every={
            "value": monitor.parameters.every,
            "gradient": gradients.every,
            "state": monitor.optimizer_state.every,
            "update": monitor.update.every,
        },
        without=frozenset(([] if gradients.reduced else ["grad"]) + ([] if gradients.unreduced else ["grad_unreduced"])),
    )


def features_of_monitor(features: Features) -> tuple[FeatureRequest, ...]:
    """Return the deeper features that the monitor requests."""
    return tuple(
        FeatureRequest(
            section.OBSERVER,
            tuple(section.names),
            {name: getattr(section, name) for name in type(section).model_fields if name not in ("on", "names")},
        )
        for section in features.chosen()
    )


def flags_where(collect: Collect) -> Callable[[str], int]:
    """Return the tape's flags by name: statistics of what is chosen."""
    names = Names(collect.names)
    return lambda name: STATS if collect.on and name in names else 0
