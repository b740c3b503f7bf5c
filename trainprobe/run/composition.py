"""The sole composer: has each program of a plan ask for its taps, and makes the programs, for every framework.

The programs share one tape: the *dump* (a plan's level, task and step) and those of the sections of the plan. A step that
several want is collected once. What is of one framework is in its `Taps`.

A plan may change while the run goes on, by a call or by the file `control.yaml`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from trainprobe.engine.core.records import Finding
from trainprobe.engine.plan.loading import load_plan
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.program import Making, Program, Schedule
from trainprobe.engine.taps import Taps
from trainprobe.errors import PlanError
from trainprobe.run import dump
from trainprobe.run.told import ToldProgram

if TYPE_CHECKING:
    from trainprobe.engine.plan.control import ControlFile

CAN_CHANGE = ("step", "monitor", "audit")


def compose(plan: Plan, taps: Taps) -> dict[str, Schedule]:
    """Have the programs of a plan ask for their taps; return when these run, by the names of the programs."""
    files = plan.programs
    if taps.dumps_when_asked is None:
        may_dump = (file.may_dump(plan) for file in files.values() if hasattr(file, "may_dump"))
        taps.dumps_when_asked = plan.level == "off" and any(may_dump)
    taps.ask_anew()
    dumped = dump.taps_of_dump(plan, taps)
    said = {name: file.schedule(plan, taps) for name, file in files.items() if hasattr(file, "schedule")}
    schedules = {"dump": dump.schedule(plan, taps, dumped), **said}
    taps.follow(taps.position)
    return schedules


def programs_of(making: Making) -> dict[str, Program]:
    """Return the programs that a plan asks for, by name, in the order in which they are called."""
    making.made["dump"] = dump.DumpProgram(making)
    for section, file in making.plan.programs.items():
        making.made[section] = file.program(making)
    if making.plan.told and (making.plan.level != "off" or making.plan.programs):
        making.made["told"] = ToldProgram()
    return making.made


# ---- while a run goes on ----


def changed_plan(plan: Plan, fields: Mapping[str, Any], programs: Iterable[Program]) -> Plan:
    """Return a plan with these fields laid over it. Raises PlanError for one that cannot change while a run goes on."""
    changed = load_plan(plan, **{name: _merged(getattr(plan, name), value) for name, value in fields.items()})
    fixed = [name for name in fields if name not in CAN_CHANGE]
    if fixed:
        raise PlanError(f"{fixed[0]}: while a run goes on, only step, monitor and audit can change")
    if changed.programs.keys() != plan.programs.keys():
        raise PlanError(
            "while a run goes on, a monitor or an audit can be changed, but neither begin nor end: have it in the plan from "
            "the start, at few steps (`monitor: {step: [0]}`, `audit: {every: 1000000}`), and change those"
        )
    for program in programs:
        program.accepts(changed)
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
