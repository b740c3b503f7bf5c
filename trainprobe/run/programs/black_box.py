"""Settings of the black box; true for its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainprobe.engine.core.records import StepData
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.program import Making, Program
from trainprobe.monitor.black_box.plan import validate as validate

ORDER = 3
WATCHES = "the black box"


def may_dump(plan: Plan) -> bool:
    """Tell that the steps after a severe finding are dumped."""
    return True


def program(making: Making) -> Program:
    """Return the program that keeps the last steps."""
    from trainprobe.monitor.black_box.program import BlackBoxProgram

    plan, backend = making.plan, making.backend
    detail = plan.base_detail
    wanted = detail.statistics if detail.wants_statistics else ()

    def batches(step_data: StepData) -> Mapping[str, Any]:
        """Return what the record of a step lacks: its batches."""
        audited: Any = getattr(making.made.get("audit"), "last", None)
        known = audited if audited is not None and audited.step == step_data.step else step_data
        return {"batches": list(known.batches)}

    about = {"framework": backend.name, "level": plan.level, "task": plan.task, "wanted": wanted}
    box = BlackBoxProgram(validate(plan.section("black_box")), about, batches, lambda: backend.random_state())
    making.taps.follow(box.position)
    return box
