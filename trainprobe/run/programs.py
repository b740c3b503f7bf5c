"""The programs of a probe, each made from its section of a plan: the one place that knows them by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainprobe.engine.core.records import StepData
from trainprobe.engine.program import Making, Program


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
    for section, make in _MAKERS.items():
        if getattr(making.plan, section):
            making.made[section] = make(making)
    return making.made


def _monitor(making: Making) -> Program:
    from trainprobe.monitor.plan import validate
    from trainprobe.monitor.program import MonitorProgram

    return MonitorProgram(validate(making.plan.monitor), making.schedules["monitor"], making.parts.forward_at)


def _audit(making: Making) -> Program:
    from trainprobe.monitor.audit.plan import validate
    from trainprobe.monitor.audit.program import AuditProgram

    gather = making.backend.gathering().gather
    return AuditProgram(validate(making.plan.audit), making.parts.audit, making.schedules["audit"], gather)


def _black_box(making: Making) -> Program:
    from trainprobe.monitor.black_box.plan import validate
    from trainprobe.monitor.black_box.program import BlackBoxProgram

    plan, backend, audit = making.plan, making.backend, making.made.get("audit")
    detail = plan.base_detail
    wanted = detail.statistics if detail.wants_statistics else ()

    def batches(step_data: StepData) -> Mapping[str, Any]:
        """Return what the record of a step lacks: its batches."""
        audited: Any = getattr(audit, "last", None)
        known = audited if audited is not None and audited.step == step_data.step else step_data
        return {"batches": list(known.batches)}

    about = {"framework": backend.name, "level": plan.level, "task": plan.task, "wanted": wanted}
    box = BlackBoxProgram(validate(plan.black_box or True), about, batches, lambda: backend.random_state())
    making.parts.follow(box.position)
    return box


def _config_check(making: Making) -> Program:
    if making.backend.name == "mindspore":
        from trainprobe.config_check.capture.mindspore_capture import CellCapture as ConfigCheckProgram
    else:
        from trainprobe.config_check.program import ConfigCheckProgram
    plan = making.plan
    return ConfigCheckProgram(plan.config_check or False, plan.output, plan.on_error)


def _op_check(making: Making) -> Program:
    from trainprobe.op_check.program import OpCheckProgram

    return OpCheckProgram(making)


_MAKERS: Mapping[str, Callable[[Making], Program]] = {  # by the section of the plan
    "monitor": _monitor,
    "audit": _audit,
    "black_box": _black_box,
    "config_check": _config_check,
    "op_check": _op_check,
}
