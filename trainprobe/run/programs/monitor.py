"""Settings of the monitor; true for its defaults."""

from __future__ import annotations

from trainprobe.engine.capture import Tap
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.plan.selection import parse_steps
from trainprobe.engine.program import Making, Program, Schedule, Wants
from trainprobe.monitor.plan import validate as validate
from trainprobe.monitor.requests import looks_when_asked
from trainprobe.run.schedules import Parts, always, each, there, unless_dumped

ORDER = 1


def program(making: Making) -> Program:
    """Return the program that judges each step by rules."""
    from trainprobe.monitor.program import MonitorProgram

    return MonitorProgram(validate(making.plan.section("monitor")), making.schedules["monitor"], making.parts.forward_at)


def schedule(plan: Plan, parts: Parts) -> Schedule:
    """Return when the taps of the monitor run."""
    monitor = parts.monitor
    assert monitor is not None
    taps: list[tuple[Tap | None, Wants]] = []
    kinds = [kind.every for kind in (monitor.activations, monitor.activation_gradients) if kind.on]
    if kinds:
        due = lambda n: any(n % every == 0 for every in kinds)  # noqa: E731
        taps.append((parts.watched, unless_dumped(due, plan, parts.modules)))
    elif looks_when_asked(monitor):
        taps.append((parts.watched, unless_dumped(parts.forward_at.__contains__, plan, parts.modules)))
    taps += [(parts.awaited, always), (parts.states, always), (parts.stepping, always)]
    taps.append((parts.exchanged, unless_dumped(each(monitor.collectives.every), plan, parts.collectives)))
    taps.append((parts.batches, each(monitor.batches.every)))
    taps += [(tap, always) for tap in (parts.clipping, parts.unreduced, parts.scaling, parts.features)]
    twice = {parts.watched: parts.modules, parts.exchanged: parts.collectives}
    replaced = there(*(tap for tap, other in twice.items() if other is not None))
    found = tuple((tap, wants) for tap, wants in taps if tap is not None)
    return Schedule(parse_steps(monitor.step).__contains__, found, replaced=replaced)
