"""The `replay` section of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trainprobe.engine.plan.field_types import NamePatterns, Numbers
from trainprobe.engine.plan.subplans import read_section


class ReplayPlan(BaseModel):
    """All settings of replay packs."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    on: Literal["error", "step"] = "error"
    """error: the first error finding writes a pack of the call that it is about; step: each step of `step` writes one of all
    innermost calls."""
    step: Numbers = ("all",)
    """Which steps are held until they are judged, or packed; written as a plan's `step` is."""
    modules: NamePatterns = ("**",)
    """Patterns of the modules that are held."""
    megabytes: Annotated[int, Field(strict=True, ge=1)] = 64
    """How many MB a step may hold in memory, and a pack has at most; what comes later in the step is left out."""


def validate(settings: Mapping[str, Any] | bool | None = True) -> ReplayPlan:
    """Return the plan of a section. Raises PlanError, which names each key, its value and what was meant."""
    return read_section("replay", ReplayPlan, settings)
