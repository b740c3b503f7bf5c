"""How a plan changes while the run goes on: by a call, or by the file `control.yaml`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainprobe.engine.core.records import Finding
from trainprobe.engine.plan.control import ControlFile
from trainprobe.engine.plan.loading import load_plan
from trainprobe.engine.plan.model import Plan
from trainprobe.errors import PlanError

CAN_CHANGE = ("step", "monitor", "audit")


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
