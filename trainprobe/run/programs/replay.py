"""Replay packs: with the first error, or at chosen steps, what a module was given and made is written (docs/again.md)."""

from __future__ import annotations

from trainprobe.again.replay_plan import validate as validate
from trainprobe.engine.program import Making, Program
from trainprobe.errors import PlanError

ORDER = 8  # behind all that finds something
WATCHES = "what a replay needs"
NOT_UNDER = {"mindspore": "replay: modules of PyTorch alone can be packed: leave the section out"}


def program(making: Making) -> Program:
    """Return the program that writes packs. Raises PlanError where nothing would find an error."""
    from trainprobe.again.pack import Packing

    plan = validate(making.plan.section("replay"))
    if plan.on == "error" and not making.plan.judges:
        raise PlanError("replay: on: 'error' waits for a finding, and nothing judges: add `monitor` or `audit`, or on: step")
    return Packing(plan)
