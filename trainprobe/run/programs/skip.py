"""An update that one bad batch would spoil is left out, by all ranks together (docs/again.md); true for the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from trainprobe.engine.plan.subplans import read_section
from trainprobe.engine.program import Making, Program
from trainprobe.monitor.feature_plan import Whole

ORDER = 7  # behind all that judges
WATCHES = "what an update would do"
NOT_UNDER = {"mindspore": "skip: updates of torch.optim alone can be left out: leave the section out"}


class SkipPlan(BaseModel):
    """All settings of `skip`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    in_a_row: Whole = 8
    """How many updates in a row may be left out. Behind them a spike is a new level, which is trained on; values that are still
    not finite raise StopTraining, and the weights stay as they are."""


def validate(settings: Mapping[str, Any] | bool | None = True) -> SkipPlan:
    """Return the plan of a section. Raises PlanError, which names each key, its value and what was meant."""
    return read_section("skip", SkipPlan, settings)


def program(making: Making) -> Program:
    """Return the program that judges each update before it is made."""
    from trainprobe.again.skipping import Skipping

    return Skipping(validate(making.plan.section("skip")).in_a_row, making)
