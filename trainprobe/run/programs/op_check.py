"""Settings of judging operators while the training runs (docs/op_check.md); true for its defaults, which judge step 0."""

from __future__ import annotations

from trainprobe.engine.program import Making, Program
from trainprobe.op_check.plan import validate as validate

ORDER = 5
WATCHES = "operators"
NOT_UNDER = {"mindspore": "op_check: operators of PyTorch alone are judged: leave the section out"}


def program(making: Making) -> Program:
    """Return the program that judges operators."""
    from trainprobe.op_check.program import OpCheckProgram

    return OpCheckProgram(making)
