"""The sole composer: reads a plan and says which taps a probe has and on which steps they run, for every framework.

The programs share one tape: the *dump* (a plan's level, task and step), the *monitor* and the *audit* (its sections of these
names). A step that several want is collected once. What is of one framework stands in its `TapMaker`.

A plan may change while the run goes on, by a call or by the file `control.yaml`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainprobe.engine.capture.requests import (
    ModuleRequest,
    OpRequest,
    StatesRequest,
    flags_of,
    modules_of_plan,
    ops_of_plan,
)
from trainprobe.engine.core.flat_parameters import FLAT
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.records import Finding, StepData
from trainprobe.engine.core.unmatched import Unmatched
from trainprobe.engine.plan.detail import Detail
from trainprobe.engine.plan.loading import load_plan
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.plan.selection import Names
from trainprobe.engine.program import Making, Program, Schedule
from trainprobe.errors import PlanError
from trainprobe.monitor.audit.plan import validate as audit_plan
from trainprobe.monitor.plan import MonitorPlan
from trainprobe.monitor.plan import validate as monitor_plan
from trainprobe.monitor.requests import flags_where, intervals_of, looks_when_asked, modules_of_monitor, no_flags
from trainprobe.run.schedules import Parts, dumps_when_asked, guard_of, schedules
from trainprobe.run.told import ToldProgram

if TYPE_CHECKING:
    from trainprobe.engine.plan.control import ControlFile

CAN_CHANGE = ("step", "monitor", "audit")
MONITORED = ("activations", "activation_gradients", "parameters", "gradients", "optimizer_state", "update")  # by name


class TapMaker(ABC):
    """Makes the taps of one framework.

    fullest: the level that records the most. needed: classes of taps, each with the part of the tool that would say what is not
    true without it.
    """

    fullest = "mix"
    needed: Sequence[tuple[type, str]] = ()

    def __init__(self, guard: Guard) -> None:
        self.guard = guard

    @abstractmethod
    def saved(self, flags: int) -> Any:
        """Return the tap of values that the program hands over."""

    @abstractmethod
    def modules(self, request: ModuleRequest, dumped: bool) -> Any:
        """Return a tap of modules. dumped: it keeps call stacks."""

    @abstractmethod
    def ops(self, request: OpRequest, parts: Parts, plan: Plan) -> Any:
        """Return the tap of ops."""

    @abstractmethod
    def states(self, request: StatesRequest, parts: Parts) -> Any:
        """Return the tap of parameters, gradients and optimizer state."""

    @abstractmethod
    def audit(self, parts: Parts) -> Any:
        """Return the tap of the audit."""

    @abstractmethod
    def stepping(self, parts: Parts, plan: Plan) -> Any:
        """Return the tap that tells when the optimizer runs."""

    @abstractmethod
    def collect(self, parts: Parts, plan: Plan, before: MonitorPlan | None = None) -> None:
        """Add the taps of what a plan collects beside these. before: the monitor's plan whose taps are there already."""


def compose(plan: Plan, make: TapMaker) -> tuple[Parts, dict[str, Schedule]]:
    """Build the taps that a plan asks for, and say by the name of each program when they run."""
    cuts: list[Detail] = []
    saved = make.saved(flags_of(plan.base_detail, cuts))
    monitor = monitor_plan(asked) if (asked := plan.section("monitor")) else None
    when_asked = dumps_when_asked(plan, monitor)
    level = make.fullest if when_asked else plan.level
    modules = make.modules(modules_of_plan(plan, cuts), dumped=True) if level in ("L0", "mix") else None
    watched = make.modules(modules_of_monitor(monitor), dumped=looks_when_asked(monitor)) if monitor is not None else None
    naming = modules or watched or make.modules(modules_of_monitor(None), dumped=False)
    parts = Parts(guard=make.guard, naming=naming, saved=saved)
    parts.modules, parts.watched, parts.monitor = modules, watched, monitor
    parts.cuts, parts.dumps_when_asked = cuts, when_asked
    parts.records_update = "optimizer" in plan.phases
    if level in ("L1", "mix"):
        parts.ops = make.ops(ops_of_plan(plan, cuts), parts, plan)
    parts.audit_plan = audit_plan(asked) if (asked := plan.section("audit")) else None
    if monitor is not None or parts.audit_plan is not None:
        parts.states = make.states(states_of_monitor(monitor), parts)
    if parts.audit_plan is not None:
        parts.audit = make.audit(parts)
    make.collect(parts, plan)
    parts.stepping = make.stepping(parts, plan)
    for tap, needed_by in make.needed:
        guard_of(make.guard, tap).is_needed_by(needed_by)
    return parts, schedules(plan, parts)


class DumpProgram(Program):
    """Records what the plan's level, task and step ask for; its taps' values are written by the writer's sinks."""

    def __init__(self, making: Making) -> None:
        super().__init__("dump", making.schedules["dump"])
        self._parts = making.parts

    def collected(self) -> Callable[[StepData], object] | None:
        """Return what divides scaled gradients by the loss scale, before anything is judged or written."""
        unscale = getattr(self._parts.states, "unscaling", None)
        return unscale() if unscale is not None else None


def programs_of(making: Making) -> dict[str, Program]:
    """Return the programs that a plan asks for, by name, in the order in which they are called."""
    making.made["dump"] = DumpProgram(making)
    for section, file in making.plan.programs.items():
        making.made[section] = file.program(making)
    if making.plan.told and (making.plan.level != "off" or making.plan.programs):
        making.made["told"] = ToldProgram()
    return making.made


def unmatched_names(plan: Plan, parts: Parts) -> Iterator[Unmatched]:
    """Yield the selections of a plan, each with its patterns that match nothing in the model that the taps know."""
    modules = [info.name for info in parts.naming.known.values()]
    parameters = list(parts.naming.parameter_names.values())
    if plan.level in ("L0", "mix"):
        for field, names in (("modules", modules), ("parameters", parameters)):
            yield Unmatched(field, plan.unmatched(names, field), must=True)
    flat = any(name.endswith(FLAT) for name in parameters)  # the monitor names what they are made of
    for kind in MONITORED if parts.monitor is not None else ():
        collect = getattr(parts.monitor, kind)
        of_modules = kind.startswith("activation")
        if collect.on and (of_modules or not flat):
            names = modules if of_modules else parameters
            yield Unmatched(f"monitor.{kind}.names", Names(collect.names).unmatched(names), must=False)


# ---- while a run goes on ----


def changed_plan(plan: Plan, fields: Mapping[str, Any]) -> Plan:
    """Return a plan with these fields laid over it. Raises PlanError for one that cannot change while a run goes on."""
    changed = load_plan(plan, **{name: _merged(getattr(plan, name), value) for name, value in fields.items()})
    fixed = [name for name in fields if name not in CAN_CHANGE]
    if fixed:
        raise PlanError(f"{fixed[0]}: while a run goes on, only step, monitor and audit can change")
    return changed


def follow_control_file(
    control: ControlFile, step: int, change: Callable[..., None], report: Callable[[Finding], None], stopped: bool
) -> None:
    """Change the plan where `control.yaml` is new. stopped: this rank's tool has stopped and only looks with the others."""
    try:
        changes = control.look(step)
        if changes is not None and not stopped:
            change(**changes)
            report(Finding("plan", "info", f"control.yaml changed the plan from step {step} on", step=step))
    except PlanError as error:
        report(Finding("plan", "warning", f"control.yaml cannot be used, the plan stays: {error}", step=step))


def _merged(was: Any, value: Any) -> Any:
    """Lay the keys of a section over those that it has; a section that was `true` had none."""
    if not isinstance(value, Mapping):
        return value
    under = was if isinstance(was, Mapping) else {}
    return {**under, **{key: _merged(under.get(key), inner) for key, inner in value.items()}}


def changed_schedules(parts: Parts, plan: Plan, make: TapMaker) -> dict[str, Schedule]:
    """Return the schedules of a plan that differs from the one that was composed in what can change while a run goes on.

    That are `step`, of the monitor all but `actions`, and of the audit `every` and `relations`; their taps may be new. Raises
    PlanError for the rest.
    """
    monitor = monitor_plan(asked) if (asked := plan.section("monitor")) else None
    audit = audit_plan(asked) if (asked := plan.section("audit")) else None
    if (monitor is None) != (parts.monitor is None) or (audit is None) != (parts.audit_plan is None):
        raise PlanError(
            "while a run goes on, a monitor or an audit can be changed, but neither begin nor end: have it in the plan from "
            "the start, at few steps (`monitor: {step: [0]}`, `audit: {every: 1000000}`), and change those"
        )
    before = parts.monitor
    if monitor is not None and before is not None:
        if monitor.actions != before.actions:
            raise PlanError(
                "while a run goes on, monitor.actions stays what it is, as alerts are set up at the start: leave it out here"
            )
        parts.monitor = monitor
        parts.states.change(states_of_monitor(monitor))
        kinds = (monitor.activations, monitor.activation_gradients)
        if kinds != (before.activations, before.activation_gradients):
            parts.watched = make.modules(modules_of_monitor(monitor), dumped=looks_when_asked(monitor))
        make.collect(parts, plan, before)
        if parts.position is not None:
            parts.follow(parts.position)
    parts.audit_plan = audit
    return schedules(plan, parts)


def states_of_monitor(monitor: MonitorPlan | None) -> StatesRequest:
    """Return what the monitor wants of parameters, gradients and optimizer state; without one, nothing."""
    if monitor is None:
        return StatesRequest(no_flags, no_flags, no_flags)
    gradients = monitor.gradients
    return StatesRequest(
        value=flags_where(monitor.parameters),
        gradient=flags_where(gradients),
        state=flags_where(monitor.optimizer_state),
        update=flags_where(monitor.update),
        every=intervals_of(monitor),
        without=frozenset(([] if gradients.reduced else ["grad"]) + ([] if gradients.unreduced else ["grad_unreduced"])),
    )
