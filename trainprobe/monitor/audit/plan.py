"""The `audit` section of a plan: which relations are checked, how often, and what the user declares about the training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from trainprobe.engine.selection import parse_names
from trainprobe.engine.subplans import read_section
from trainprobe.monitor.audit.relations import load_relation, relation_names
from trainprobe.monitor.rules import Patterns

Whole: TypeAlias = Annotated[int, Field(strict=True, ge=1)]
Pairs: TypeAlias = Annotated[tuple[tuple[str, ...], ...], BeforeValidator(lambda v: tuple(map(tuple, v)) if v else ())]


class AuditPlan(BaseModel):
    """All settings of the audit."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, arbitrary_types_allowed=True)

    every: Whole | None = None
    """Check every relation at each so many steps; left out: each at its own interval (every 10, those that run something
    again every 50). What happens between audited steps (evaluations, steps of schedulers) is judged at the next."""
    relations: Mapping[str, int] = Field(default_factory=dict, validate_default=True)
    """Relation → at each so many steps; 0 or `false` leaves it out, `true` means its own interval."""
    ranks: bool = True
    """Compare the ranks with each other: one small collective at the end of each step at which something is compared."""
    ties: Pairs = ()
    """Parameters that must share storage, as lists of names; ties that exist at set-up are found by themselves."""
    trainable: Patterns | None = None
    """Patterns of the parameters that are to be trained; left out: those that were at set-up."""
    schedule: Callable[[int], float] | None = None
    """The learning rate that each step number is to have, for schedules that no torch scheduler declares."""
    severity: Literal["info", "warning", "error"] = "warning"
    """The lowest severity that is told."""

    @field_validator("relations", mode="before")
    @classmethod
    def _check_relations(cls, value: object) -> dict[str, int]:
        given = dict(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else {}
        return {name: _interval(name, setting) for name, setting in given.items()}

    @field_validator("trainable")
    @classmethod
    def _check_names(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if value is None else parse_names(value).patterns

    def interval(self, relation: str) -> int:
        """Return at each how many steps a relation is checked, 0 for never."""
        if relation in self.relations:
            return self.relations[relation]
        return self.every if self.every is not None else load_relation(relation).EVERY

    def due(self, step: int) -> tuple[str, ...]:
        """Return the relations that are checked at a step."""
        return tuple(name for name in relation_names() if (every := self.interval(name)) and step % every == 0)

    def wants_step(self, step: int) -> bool:
        """Tell whether anything is checked at a step."""
        return bool(self.due(step))

    def wants(self, step: int, cost: str) -> bool:
        """Tell whether a relation of a cost class ("host", "fingerprints", "ranks", "rerun") is checked at a step."""
        return any(cost in load_relation(name).COST for name in self.due(step))


def _interval(name: str, setting: Any) -> int:
    every = load_relation(name).EVERY
    if setting is True:
        return every
    if setting is False or setting is None:
        return 0
    if isinstance(setting, int) and setting >= 0:
        return setting
    raise ValueError(f"{name}: {setting!r} is no interval: write a number of steps, true or false")


def validate(settings: Mapping[str, Any] | bool | None = True) -> AuditPlan:
    """Return the audit's plan of a section. Raises PlanError, which names each key, its value and what was probably meant."""
    return read_section("audit", AuditPlan, settings)
