"""Settings of the monitor; true for its defaults."""

from __future__ import annotations

from trainprobe.engine.program import Making, Program
from trainprobe.monitor.plan import validate as validate

ORDER = 1


def program(making: Making) -> Program:
    """Return the program that judges each step by rules."""
    from trainprobe.monitor.program import MonitorProgram

    return MonitorProgram(validate(making.plan.section("monitor")), making.schedules["monitor"], making.parts.forward_at)
