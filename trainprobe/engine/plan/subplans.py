"""What a plan hands on: the names of the writers that exist, and the sections that other packages check themselves.

Nothing here is imported before a plan names it, so that a plan stays cheap and the import direction holds: a package
above the engine offers a function, found by its name.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from trainprobe.engine.plan.problems import model_at
from trainprobe.errors import PlanError, did_you_mean

Model = TypeVar("Model", bound=BaseModel)

# section of the plan → module whose function `validate(settings)` raises ValueError or PlanError on what it cannot use
CHECKERS = {
    "monitor": "trainprobe.monitor.plan",
    "audit": "trainprobe.monitor.audit.plan",
    "black_box": "trainprobe.monitor.black_box.plan",
    "config_check": "trainprobe.config_check.plan",
    "op_check": "trainprobe.op_check.plan",
}


def check_subplan(section: str, settings: Mapping[str, Any]) -> None:
    """Let the package that a section belongs to check it, if it offers a check."""
    try:
        found = importlib.util.find_spec(CHECKERS[section])
    except ModuleNotFoundError:
        return
    if found is not None:
        importlib.import_module(CHECKERS[section]).validate(settings)


def read_section(section: str, model: type[Model], settings: Mapping[str, Any] | bool | None, at: str = "") -> Model:
    """Return the settings of a section as `model`; true and None give its defaults. at: where in the section they stand.

    Raises PlanError, which names the section, each key, its value and what was probably meant.
    """
    try:
        return model.model_validate(dict(settings) if isinstance(settings, Mapping) else {})
    except ValidationError as error:
        problems = error.errors(include_url=False)
        raise PlanError("\n".join(f"{section}: {_problem(model, problem, at)}" for problem in problems)) from None


def _problem(model: type[BaseModel], problem: Any, at: str) -> str:
    where = ".".join(piece for piece in (at, *map(str, problem["loc"])) if piece)
    if problem["type"] == "extra_forbidden":
        known, name = list(model_at(model, problem["loc"][:-1]).model_fields), str(problem["loc"][-1])
        hint = did_you_mean(name, known) or f" (there are: {', '.join(known)})"
        return f"{where}: unknown key {name!r}{hint}"
    return f"{where}: {problem['input']!r} cannot be used: {problem['msg'].removeprefix('Value error, ')}"


def sink_names() -> list[str]:
    """Return the writers that exist: the files of `trainprobe.engine.storage.sinks` and the entry points of other packages."""
    folder = Path(__file__).parents[1] / "storage/sinks"
    here = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    brought = {point.name for point in importlib.metadata.entry_points(group="trainprobe.sinks")}
    return sorted(name for name in here | brought if not name.startswith("_"))
