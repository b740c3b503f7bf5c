"""The `audit` section of a plan: which relations are checked, how often, and what the user declares about the training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from trainprobe.engine.plan.field_types import NamePatterns
from trainprobe.engine.plan.subplans import read_section
from trainprobe.monitor.audit.relations import load_relation, relation_names, usual_interval
from trainprobe.monitor.feature_plan import Whole
from trainprobe.monitor.rules import Severity

_PACE = 10  # of so many steps the audit looks at one, on average, where the plan gives no interval
_BLOCK = 2 * _PACE  # each so many steps hold one pair of consecutive steps
_STRIDE, _PLACES = 3, 19  # the pair moves on by so much within its block; a pair has so many places in a block

Pairs: TypeAlias = Annotated[tuple[tuple[str, ...], ...], BeforeValidator(lambda v: tuple(map(tuple, v)) if v else ())]


def _steps_of(setting: object) -> object:
    """Return the number of "every 500"."""
    words = setting.split() if isinstance(setting, str) else []
    return int(words[1]) if len(words) == 2 and words[0] == "every" and words[1].isdigit() else setting


class AuditPlan(BaseModel):
    """All settings of the audit."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, arbitrary_types_allowed=True)

    every: Whole | None = None
    """Check every relation at each so many steps. Left out: at pairs of consecutive steps, one pair in each 20 steps (0 and 1,
    23 and 24, 46 and 47 …), so that no bug of a fixed period hides; relations that run something again are checked at every
    fifth of these steps. What happens between audited steps (evaluations, scheduler steps) is judged at the next."""
    relations: Mapping[str, int | bool] = Field(default_factory=dict, validate_default=True)
    """Relation → at each so many steps; 0 or `false` leaves it out, `true` checks it as if `every` were left out."""
    ranks: bool = True
    """Compare the ranks with each other: one small collective at the end of each step at which something is compared."""
    ties: Pairs = ()
    """Parameters that must share storage, as lists of names; ties that exist at set-up are found by themselves."""
    trainable: NamePatterns | None = None
    """Patterns of the parameters that are to be trained; left out: those that were at set-up."""
    schedule: Callable[[int], float] | None = None
    """The learning rate that each step number is to have, for schedules that no torch scheduler declares."""
    repeat: Annotated[Whole, BeforeValidator(_steps_of)] | None = None
    """Run each so many steps ("every 500", or the number) twice before the optimizer moves, and name the op, or the bit of the
    hardware, that differs (docs/again.md). PyTorch alone. Left out: no step."""
    stop: bool = False
    """Where `repeat` finds a fault of the hardware, raise StopTraining before the optimizer moves: the update is not made."""
    severity: Severity = "warning"
    """The lowest severity that is told."""

    @model_validator(mode="after")
    def _check_stop(self) -> AuditPlan:
        if self.stop and self.repeat is None:
            raise ValueError("stop: true refuses updates that a repeat finds wrong: give `repeat` too, such as every 500")
        return self

    @field_validator("relations", mode="before")
    @classmethod
    def _check_relations(cls, value: object) -> dict[str, int | bool]:
        given = dict(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else {}
        return {name: _interval(name, setting) for name, setting in given.items()}

    def interval(self, relation: str) -> int:
        """Return the number of steps in which a relation is checked once, on average; 0 for never."""
        setting = self._setting(relation)
        return usual_interval(relation) if setting is True else setting

    def checked(self) -> tuple[str, ...]:
        """Return the relations that are checked at any step."""
        return tuple(name for name in relation_names() if self.interval(name))

    def due(self, step: int) -> tuple[str, ...]:
        """Return the relations that are checked at a step."""
        return tuple(name for name in relation_names() if self._is_due(name, step))

    def _setting(self, relation: str) -> int:
        return self.relations.get(relation, True if self.every is None else self.every)

    def _is_due(self, relation: str, step: int) -> bool:
        setting = self._setting(relation)
        if setting is True:
            return _is_due_by_itself(usual_interval(relation), step)
        return setting > 0 and step % setting == 0

    def wants_step(self, step: int) -> bool:
        """Tell whether anything is checked at a step."""
        return bool(self.due(step))

    def wants(self, step: int, cost: str) -> bool:
        """Tell whether a relation of a cost class ("host", "fingerprints", "ranks", "rerun") is checked at a step."""
        return any(cost in load_relation(name).COST for name in self.due(step))


def _interval(name: str, setting: Any) -> int | bool:
    load_relation(name)
    if setting is None or isinstance(setting, bool):
        return setting or 0
    if isinstance(setting, int) and setting >= 0:
        return setting
    raise ValueError(f"{name}: {setting!r} is no interval: write a number of steps, true or false")


def _is_due_by_itself(every: int, step: int) -> bool:
    """Tell whether a relation that is to be checked at one of `every` steps is checked at a step, where the plan is silent."""
    if every < _PACE:
        return step % every == 0
    look = _look(step)
    return look is not None and look % round(every / _PACE) == 0


def _look(step: int) -> int | None:
    """Return which of the audited steps a step is, counted from 0, or None where it is none.

    Two of each 20 steps are, side by side. The gaps between pairs are 23 or 4 steps long, neither of which shares a factor with
    a short period: all residues modulo 2, 3, 4, 5 and 7 are seen within 70 steps.
    """
    block, within = divmod(step, _BLOCK)
    after = within - _STRIDE * block % _PLACES
    return 2 * block + after if after in (0, 1) else None


def validate(settings: Mapping[str, Any] | bool | None = True) -> AuditPlan:
    """Return the audit's plan of a section. Raises PlanError, which names each key, its value and what was probably meant."""
    return read_section("audit", AuditPlan, settings)
