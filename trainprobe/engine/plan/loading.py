"""A plan from whatever a user has: a file, a mapping, the `config.json` of another tool, keyword arguments, the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainprobe.engine.plan.defaults import one_level
from trainprobe.engine.plan.file import read_plan_file
from trainprobe.engine.plan.legacy import is_legacy, translate
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.plan.problems import describe_problems, unknown_keys
from trainprobe.errors import PlanError


def load_plan(
    source: Plan | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    framework: str = "pytorch",
    under: Mapping[str, Any] | None = None,
    /,
    **overrides: Any,
) -> Plan:
    """Make a plan from a file, a mapping, another plan or nothing, with `overrides` (fields of `Plan`) on top.


    framework: "pytorch" or "mindspore", which the training runs under. under: fields that hold where the source and `overrides`
    leave them out; for the rest `engine.plan.defaults` says what is meant. A file or mapping in the `config.json` dialect of
    mindstudio-probe is recognised by its keys and translated; what has no equivalent is listed in `Plan.notes`.
    Raises PlanError, which names every problem, the value, the file and the key.
    """
    origin = "plan"
    notes: tuple[str, ...] = ()
    if isinstance(source, Plan):
        fields = {name: getattr(source, name) for name in source.model_fields_set}
        notes = source.notes
    elif isinstance(source, Mapping):
        fields = dict(source)
    elif source is None:
        fields: dict[str, Any] = {}
    else:
        origin = str(source)
        fields = read_plan_file(Path(source))
    if is_legacy(fields):
        fields, notes = translate(fields, origin, framework)
    origins = dict.fromkeys(overrides, "keyword argument")
    try:
        merged: dict[str, Any] = {**one_level(under or {}), **one_level(fields), **one_level(overrides)}
    except PlanError as error:
        raise PlanError(f"{origin}: {error}") from None
    if "on_error" not in merged and (wish := os.environ.get("TRAINPROBE_ON_ERROR")):
        merged["on_error"] = wish
        origins["on_error"] = "environment variable TRAINPROBE_ON_ERROR"
    if problems := unknown_keys(merged, Plan):
        raise PlanError("\n".join(f"{origins.get(key, origin)}: {text}" for key, text in problems))
    try:
        plan = Plan.model_validate(merged)
    except ValidationError as error:
        raise PlanError(describe_problems(error, Plan, lambda key: origins.get(key, origin))) from None
    plan._notes = notes
    return plan
