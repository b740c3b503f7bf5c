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
from trainprobe.engine.program import Schedule, Wants
from trainprobe.monitor.audit.plan import AuditPlan
from trainprobe.monitor.plan import MonitorPlan

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
    said = {name: file.schedule(plan, parts) for name, file in plan.programs.items() if hasattr(file, "schedule")}
    return {"dump": _of_dump(plan, parts), **said}


def _of_dump(plan: Plan, parts: Parts) -> Schedule:
    stepping = parts.stepping if plan.level in _LEVELS or parts.dumps_when_asked else None
    batches = parts.batches if parts.monitor is None else None
    dump = there(parts.awaited, parts.saved, parts.modules, parts.buffers, parts.ops, parts.collectives, stepping, batches)
    opened = there(parts.naming)  # and begun only where another schedule has it
    taps = (*((tap, plan.wants_step) for tap in dump), *((tap, _never) for tap in opened))
    level = "" if not parts.dumps_when_asked else "mix" if parts.ops is not None else "L0"
    return Schedule(plan.wants_step, taps, asked=dump, level=level, dumps=True, waits=plan.level == "off")


def there(*taps: Tap | None) -> tuple[Tap, ...]:
    """Return the taps that a framework has."""
    return tuple(tap for tap in taps if tap is not None)


def unless_dumped(wants: Wants, plan: Plan, same: Tap | None) -> Wants:
    """Return when a tap of the monitor runs, where a tap of the dump that looks at the same may replace it."""
    return wants if same is None else lambda n: wants(n) and not plan.wants_step(n)


def each(every: int) -> Callable[[int], bool]:
    """Return a function that wants every so-many-th step."""
    return lambda n: n % every == 0


def always(step: int) -> bool:
    """Want each step."""
    return True


def _never(step: int) -> bool:
    return False
