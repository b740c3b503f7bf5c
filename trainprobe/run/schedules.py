"""The taps of a probe, and the steps on which each of them runs: the same for every framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trainprobe.engine.capture import Tap, part_of
from trainprobe.engine.capture.pauses import Pauses
from trainprobe.engine.core.guard import Guard, PartGuard
from trainprobe.engine.core.position import Position
from trainprobe.engine.plan.detail import Detail
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.plan.selection import parse_steps
from trainprobe.engine.program import Schedule, Wants
from trainprobe.monitor.audit.plan import AuditPlan
from trainprobe.monitor.plan import MonitorPlan
from trainprobe.monitor.requests import looks_when_asked

_LEVELS = ("L0", "L1", "mix")  # those that record calls


@dataclass(slots=True, kw_only=True)
class Parts:
    """The taps of one probe; None where the plan does not ask for one, or the framework has none.

    naming: knows the model's names in any case. stepping: tells when the optimizer runs. watched: modules that the monitor
    looks at. awaited: what functional collectives still write. exchanged: collectives that the monitor looks at. position: told
    where the training is. records_update: operators of the update are recorded too. dumps_when_asked: the plan's level is off,
    and rules or the black box may ask for a dump. forward_at: steps whose forward pass the monitor
    looks at because a rule asked for it.
    """

    guard: Guard
    naming: Any
    saved: Any
    stepping: Any = None
    modules: Any = None
    buffers: Any = None
    ops: Any = None
    collectives: Any = None
    awaited: Any = None
    watched: Any = None
    states: Any = None
    clipping: Any = None
    unreduced: Any = None
    scaling: Any = None
    exchanged: Any = None
    batches: Any = None
    features: Any = None
    audit: Any = None
    position: Position | None = None
    monitor: MonitorPlan | None = None
    audit_plan: AuditPlan | None = None
    records_update: bool = False
    cuts: list[Detail] = field(default_factory=list[Detail])
    dumps_when_asked: bool = False
    pauses: Pauses = field(default_factory=Pauses)
    forward_at: set[int] = field(default_factory=set[int])

    def follow(self, position: Position) -> None:
        """Have `position` told where the training is, as far as the taps that run see it."""
        self.position = position
        for tap in (self.modules, self.watched, self.batches):
            if tap is not None:
                tap.position = position

    def let(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call a method of a tap, whose fault costs that tap alone. For code that runs within `Guard.run`."""
        return self.guard.part(part_of(type(getattr(call, "__self__", None))), call, *args)

    def notes(self) -> list[str]:
        """Return what could not be seen, and why."""
        taps = (self.naming, self.modules, self.watched, self.ops, self.exchanged, self.features)
        return list(dict.fromkeys(note for tap in taps if tap is not None for note in getattr(tap, "notes", ())))


def dumps_when_asked(plan: Plan, monitor: MonitorPlan | None) -> bool:
    """Tell whether the plan's level is off, and its rules or its black box may ask for a dump."""
    return plan.level == "off" and (bool(plan.section("black_box")) or (monitor is not None and monitor.may_dump))


def guard_of(guard: Guard, kind: type) -> PartGuard:
    """Return the guard that taps of a class have of their own."""
    return guard.of(part_of(kind))


def schedules(plan: Plan, parts: Parts) -> dict[str, Schedule]:
    """Return when the taps run, by the names of the programs that they belong to."""
    found = {"dump": _of_dump(plan, parts)}
    if parts.monitor is not None:
        found["monitor"] = _of_monitor(plan, parts, parts.monitor)
    if parts.audit_plan is not None:
        found["audit"] = _of_audit(parts, parts.audit_plan)
    return found


def _of_dump(plan: Plan, parts: Parts) -> Schedule:
    stepping = parts.stepping if plan.level in _LEVELS or parts.dumps_when_asked else None
    batches = parts.batches if parts.monitor is None else None
    dump = _there(parts.awaited, parts.saved, parts.modules, parts.buffers, parts.ops, parts.collectives, stepping, batches)
    opened = _there(parts.naming)  # and begun only where another schedule has it
    taps = (*((tap, plan.wants_step) for tap in dump), *((tap, _never) for tap in opened))
    level = "" if not parts.dumps_when_asked else "mix" if parts.ops is not None else "L0"
    return Schedule(plan.wants_step, taps, asked=dump, level=level, dumps=True, waits=plan.level == "off")


def _of_monitor(plan: Plan, parts: Parts, monitor: MonitorPlan) -> Schedule:
    taps: list[tuple[Tap | None, Wants]] = []
    kinds = [kind.every for kind in (monitor.activations, monitor.activation_gradients) if kind.on]
    if kinds:
        due = lambda n: any(n % every == 0 for every in kinds)  # noqa: E731
        taps.append((parts.watched, _unless_dumped(due, plan, parts.modules)))
    elif looks_when_asked(monitor):
        taps.append((parts.watched, _unless_dumped(parts.forward_at.__contains__, plan, parts.modules)))
    taps += [(parts.awaited, _always), (parts.states, _always), (parts.stepping, _always)]
    taps.append((parts.exchanged, _unless_dumped(_each(monitor.collectives.every), plan, parts.collectives)))
    taps.append((parts.batches, _each(monitor.batches.every)))
    taps += [(tap, _always) for tap in (parts.clipping, parts.unreduced, parts.scaling, parts.features)]
    twice = {parts.watched: parts.modules, parts.exchanged: parts.collectives}
    replaced = _there(*(tap for tap, other in twice.items() if other is not None))
    found = tuple((tap, wants) for tap, wants in taps if tap is not None)
    return Schedule(parse_steps(monitor.step).__contains__, found, replaced=replaced)


def _of_audit(parts: Parts, plan: AuditPlan) -> Schedule:
    tap = parts.audit

    def reads(n: int) -> bool:
        return tap.awaits or plan.wants(n, "fingerprints")

    taps = ((tap, _always), (parts.states, reads), (parts.clipping, _always), (parts.scaling, reads), (parts.stepping, _always))
    found = tuple((one, wants) for one, wants in taps if one is not None)
    return Schedule(lambda n: tap.awaits or plan.wants_step(n), found, looks=False)


def _there(*taps: Tap | None) -> tuple[Tap, ...]:
    return tuple(tap for tap in taps if tap is not None)


def _unless_dumped(wants: Wants, plan: Plan, same: Tap | None) -> Wants:
    """Return when a tap of the monitor runs, where a tap of the dump that looks at the same may replace it."""
    return wants if same is None else lambda n: wants(n) and not plan.wants_step(n)


def _each(every: int) -> Callable[[int], bool]:
    return lambda n: n % every == 0


def _always(step: int) -> bool:
    return True


def _never(step: int) -> bool:
    return False
