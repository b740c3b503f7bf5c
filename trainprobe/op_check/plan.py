"""The `op_check` section of a plan: operators are judged while the training runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from trainprobe.engine.plan.model import Numbers, Patterns, one_or_many, parse_bytes
from trainprobe.engine.plan.selection import parse_names, parse_steps
from trainprobe.engine.plan.subplans import read_section
from trainprobe.errors import PlanError

Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(one_or_many)]


class OpCheckPlan(BaseModel):
    """All settings of judging operators inside the training."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    step: Numbers = (0,)
    """Which steps are judged, written as the plan's own `step`; the others cost nothing."""
    rank: Numbers = ("all",)
    """Which global ranks judge; written as `step` is."""
    modules: Patterns = ("**",)
    """Patterns of the modules whose operators are judged; operators outside of modules belong to `**` alone."""
    ops: Texts = ()
    """Operators that are judged, such as `layer_norm`, `Functional.*` or `torch.ops.aten.addmm`; left out: all."""
    skip: Texts = ()
    """Operators that are not judged, written as `ops` is."""
    atol: Annotated[float, Field(ge=0)] | None = None
    """Absolute tolerance that replaces the calibrated bound, together with `rtol`."""
    rtol: Annotated[float, Field(ge=0)] | None = None
    """Relative tolerance that replaces the calibrated bound, together with `atol`."""
    stop: Annotated[bool, Field(strict=True)] = False
    """At a bug write the call as a script that replays it (folder `op_check` of the output) and stop the training."""
    max_bytes: Annotated[int, BeforeValidator(parse_bytes), Field(ge=1)] = 4 << 30
    """Most memory on the host that the values of a judged step may take, as a number or as "4 GiB"; calls whose values do not
    fit are counted as not checked."""

    @field_validator("step", "rank")
    @classmethod
    def _check_numbers(cls, value: tuple[int | str, ...]) -> tuple[int | str, ...]:
        parse_steps(value)
        return value

    @field_validator("modules")
    @classmethod
    def _check_patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return parse_names(value).patterns


def validate(settings: Mapping[str, Any] | bool | None = True) -> OpCheckPlan:
    """Return the settings of a section. Raises PlanError, which names each key, its value and what was probably meant."""
    plan = read_section("op_check", OpCheckPlan, settings)
    if (plan.atol is None) != (plan.rtol is None):
        raise PlanError("op_check: atol and rtol replace the bound together: give both, 0 for the one that allows nothing")
    return plan
