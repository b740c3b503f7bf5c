"""What a plan hands on: the names of the writers that exist, and the sections that programs check themselves.

No program is imported before a plan names it, so that a plan stays cheap and the import direction holds: a file above the
engine is found by its name.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from trainprobe.engine.plan.problems import model_at
from trainprobe.errors import PlanError, did_you_mean

Model = TypeVar("Model", bound=BaseModel)

PROGRAMS = "trainprobe.run.programs"  # a module for each section, of the section's name


@cache
def sections() -> Mapping[str, str]:
    """Return the sections of a plan that programs carry out, each with what it says. No program is imported for it."""
    files = sorted(pkgutil.iter_modules(importlib.import_module(PROGRAMS).__path__), key=lambda file: file.name)
    return {file.name: ast.get_docstring(ast.parse(_source(file.module_finder, file.name))) or "" for file in files}


def _source(finder: Any, name: str) -> str:
    """Return the source of a section's file. The finder's own loader has it: pytest's, which `find_spec` may give, has not."""
    module = f"{PROGRAMS}.{name}"
    return finder.find_spec(module).loader.get_source(module) or ""


def program_file(section: str) -> Any:
    """Return the module that says what a section of the plan is, and makes its program."""
    return importlib.import_module(f"{PROGRAMS}.{section}")


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
