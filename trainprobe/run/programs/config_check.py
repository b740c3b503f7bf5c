"""Settings of the capture of what decides a run's numbers; true for its defaults."""

from __future__ import annotations

from trainprobe.config_check.plan import validate as validate
from trainprobe.engine.program import Making, Program

ORDER = 4
WATCHES = "the settings of the run"


def program(making: Making) -> Program:
    """Return the program that captures the settings of the run."""
    if making.backend.name == "mindspore":
        from trainprobe.config_check.capture.mindspore_capture import CellCapture as ConfigCheckProgram
    else:
        from trainprobe.config_check.program import ConfigCheckProgram
    plan = making.plan
    return ConfigCheckProgram(plan.section("config_check") or False, plan.output, plan.on_error)
