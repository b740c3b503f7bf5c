"""Rules: each file here is one, named for its file, and found by that name in a plan or after `trainprobe judge --rules`.

A rule is a class `Options` (its settings, with a docstring below every one) and a function

    check(frame: Frame, memory: Memory, options: Options) -> list[Finding]

that is called once for each collected step of one rank, in order. All it knows of the past is `memory`, which it changes
and which is written as JSON; so the same rule gives the same findings live, after a restart, and offline on a recorded
run. A rule that reports something once while it lasts may have `lasts(memory: Memory) -> bool`: whether what it reported last
holds at this step too, which is then counted. Other packages bring rules through the entry point group `trainprobe.rules`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, BeforeValidator, ConfigDict

from trainprobe.engine.core.records import Finding, Site
from trainprobe.engine.plan.field_types import NamePatterns, Patterns
from trainprobe.errors import PlanError, did_you_mean
from trainprobe.monitor.frames import Frame, Selection
from trainprobe.monitor.memory import Memory

Severity: TypeAlias = Literal["info", "warning", "error"]
GRAVITY: Mapping[Severity, int] = {"info": 0, "warning": 1, "error": 2}
Action: TypeAlias = Literal["log", "alert", "dump", "stop"]
Actions: TypeAlias = Annotated[tuple[Action, ...], BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)]

OPTIONAL = ("mean_deviation", "threshold")  # rules that judge only where a plan names them


class RuleOptions(BaseModel):
    """The settings that every rule has."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    names: NamePatterns = ("**",)
    """Patterns of the modules, parameters and scalars that are judged; a leading `!` excludes."""
    severity: Severity = "warning"
    """The severity of findings of this rule."""
    actions: Actions = ("log",)
    """What a finding does: log, alert (console, webhook, callback), dump (the next steps in full), stop (end the run)."""

    def needs(self) -> int:
        """Return how many steps must be collected until the rule can find something."""
        return 1

    def found(
        self,
        frame: Frame,
        message: str,
        site: Site | None,
        *,
        measured: float | str,
        expected: float | str,
        next: str | None,
        names: tuple[str, ...] = (),
        floor: float | None = None,
    ) -> Finding:
        """Make a finding of this rule at the step and rank of a frame; see `Finding` for the rest."""
        rule = type(self).__module__.rpartition(".")[2]
        about = (rule, self.severity, message, frame.step, frame.place, site, measured, expected, floor, next)
        return Finding(*about, names=names)


class Rule(Protocol):
    """What the module of a rule holds."""

    __name__: str
    Options: type[RuleOptions]

    def check(self, frame: Frame, memory: Memory, options: Any) -> list[Finding]:
        """Judge one step."""
        ...


@cache
def norms_of_gradients(names: Patterns) -> tuple[Selection, ...]:
    """Return what selects the norm of each parameter's gradient."""
    return (Selection(("parameter",), ("grad",), ("norm",), names),)


def names_at(frame: Frame, places: npt.NDArray[np.int64]) -> tuple[str, ...]:
    """Return the names of the modules, parameters and scalars whose values stand at these places of a frame, each once."""
    return tuple(dict.fromkeys(frame.table.series[number].address.name for number in frame.at[places].tolist()))


def rule_names() -> list[str]:
    """Return the names of all rules: the files of this folder and what other packages bring."""
    here = {path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_")}
    return sorted(here | {point.name for point in importlib.metadata.entry_points(group="trainprobe.rules")})


@cache
def load_rule(name: str) -> Rule:
    """Return the module of a rule. Raises PlanError for a name that is none."""
    if (Path(__file__).parent / f"{name}.py").exists() and not name.startswith("_"):
        return importlib.import_module(f"{__name__}.{name}")  # pyright: ignore[reportReturnType]
    for point in importlib.metadata.entry_points(group="trainprobe.rules", name=name):
        return point.load()
    known = rule_names()
    raise PlanError(f"{name!r} is not a rule{did_you_mean(name, known)} (there are: {', '.join(known)})")
