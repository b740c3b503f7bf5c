"""Settings of the monitor; true for its defaults."""

from __future__ import annotations

from trainprobe.engine.capture import Tap
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.plan.selection import parse_steps
from trainprobe.engine.program import Making, Program, Schedule, Wants, always, each
from trainprobe.engine.taps import Taps
from trainprobe.monitor.plan import MonitorPlan
from trainprobe.monitor.plan import validate as validate
from trainprobe.monitor.requests import features_of_monitor, looks_when_asked, modules_of_monitor, states_of_monitor

ORDER = 1


def program(making: Making) -> Program:
    """Return the program that judges each step by rules."""
    from trainprobe.monitor.program import MonitorProgram

    return MonitorProgram(validate(making.plan.section("monitor")), making.schedules["monitor"], making.taps.forward_at)


def may_dump(plan: Plan) -> bool:
    """Tell whether a rule may ask for a dump."""
    return validate(plan.section("monitor")).may_dump


def schedule(plan: Plan, taps: Taps) -> Schedule:
    """Ask for the taps of the monitor; return when they run."""
    monitor = validate(plan.section("monitor"))
    wanted = (monitor.activations, monitor.activation_gradients)
    watched = taps.watched(modules_of_monitor(monitor), looks_when_asked(monitor), wanted)
    states = taps.states(states_of_monitor(monitor))
    exchanged = taps.exchanged(monitor.collectives.names) if monitor.collectives.on else None
    gradients, batches = monitor.gradients, monitor.batches
    dumped = {watched: taps.get("modules", Tap), exchanged: taps.get("collectives", Tap)}  # look at the same
    asked: list[tuple[Tap | None, Wants]] = [
        (watched, _unless_dumped(_forward(monitor, taps), plan, dumped[watched])),
        *((tap, always) for tap in (taps.awaited(), states, taps.stepping())),
        (exchanged, _unless_dumped(each(monitor.collectives.every), plan, dumped[exchanged])),
        (taps.batches() if batches.on or plan.section("black_box") else None, each(batches.every)),
        (taps.clipping() if (gradients.on and gradients.unclipped) or plan.section("audit") else None, always),
        (taps.unreduced(gradients.per_micro) if gradients.on and gradients.unreduced else None, always),
        (taps.scaling(), always),
        (taps.features(features_of_monitor(monitor.features)) if monitor.features.on else None, always),
    ]
    found = tuple((tap, wants) for tap, wants in asked if tap is not None)
    replaced = tuple(tap for tap, same in dumped.items() if tap is not None and same is not None)
    return Schedule(parse_steps(monitor.step).__contains__, found, replaced=replaced)


def _forward(monitor: MonitorPlan, taps: Taps) -> Wants:
    """Return on which steps modules are looked at: where nothing else is said, on those that a rule asks for."""
    if looks_when_asked(monitor):
        return taps.forward_at.__contains__
    kinds = [kind.every for kind in (monitor.activations, monitor.activation_gradients) if kind.on]
    return lambda n: any(n % every == 0 for every in kinds)


def _unless_dumped(wants: Wants, plan: Plan, same: Tap | None) -> Wants:
    """Return when a tap of the monitor runs, where a tap of the dump that looks at the same may replace it."""
    return wants if same is None else lambda n: wants(n) and not plan.wants_step(n)
