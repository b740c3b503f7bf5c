"""The `black_box` section of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from trainprobe.engine.plan.field_types import parse_bytes
from trainprobe.engine.plan.subplans import read_section
from trainprobe.monitor.rules import Severity


class BlackBoxPlan(BaseModel):
    """All settings of the black box."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    steps: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 16
    """How many collected steps are kept."""
    max_bytes: Annotated[int, BeforeValidator(parse_bytes), Field(ge=1 << 16)] = 64 << 20
    """How large the file of a rank is, as a number or as "64 MiB", taken from the disk at the start; a step that does not fit
    its share is kept without its tensors' numbers."""
    severity: Severity = "error"
    """A finding at least as severe as this writes the box out."""
    dump_steps: Annotated[int, Field(strict=True, ge=0)] = 1
    """How many of the following steps are collected in full then."""


def validate(settings: Mapping[str, Any] | bool | None = True) -> BlackBoxPlan:
    """Return the black box's plan of a section. Raises PlanError, which names each key, its value and what was meant."""
    return read_section("black_box", BlackBoxPlan, settings)
