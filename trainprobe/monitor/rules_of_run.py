"""The settings of the rules that a run's plan gave, kept beside what the run wrote: whoever judges it later uses the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from trainprobe.engine.core.records import Finding
from trainprobe.engine.storage.dumps.layout import files_of_run
from trainprobe.engine.storage.safe_files import LARGEST_STATE, read_bounded, write_whole
from trainprobe.errors import PlanError
from trainprobe.monitor.plan import make_rules
from trainprobe.monitor.rules import RuleOptions

RULES_FILE = "rules.json"
_FORMAT = 1


def keep_rules(section: Any, folder: Path) -> Finding | None:
    """Write the rules that the `monitor` section of a plan names to the folder of a rank; return a warning where that fails.

    A plan that names none, or that lists the only ones it wants, leaves no file: all rules have their defaults then.
    """
    rules = section.get("rules") if isinstance(section, Mapping) else getattr(section, "rules", None)
    path = folder / RULES_FILE
    try:
        if not isinstance(rules, Mapping) or not rules:
            path.unlink(missing_ok=True)
            return None
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, orjson.dumps({"format": _FORMAT, "rules": dict(rules)}, default=_plain))
    except OSError as error:
        message = f"{path} could not be written ({error.strerror or error}): `judge` and `report` use the rules' defaults"
        return Finding("probe", "warning", message)
    return None


def rules_of_run(folder: Path) -> tuple[dict[str, RuleOptions], tuple[str, ...]]:
    """Return the rules that judge a recorded run, with the settings of its plan, and the names that its plan left out.

    All have their defaults where the run kept nothing that can be read.
    """
    files = sorted(files_of_run(folder, RULES_FILE)) if folder.is_dir() else [folder.parent / RULES_FILE]
    for path in files:
        try:
            kept = orjson.loads(read_bounded(path, LARGEST_STATE))
            rules = kept["rules"] if kept["format"] == _FORMAT else {}
            return make_rules(rules), tuple(name for name, settings in rules.items() if settings in (False, None))
        except (OSError, ValueError, KeyError, TypeError, PlanError):
            continue
    return make_rules(None), ()


def left_out(names: tuple[str, ...]) -> str:
    """Return the sentence on rules that a plan left out, empty for none."""
    return f"Left out, as in the plan of the run: {', '.join(names)}" if names else ""


def _plain(value: Any) -> Any:
    """Return settings that are already read, patterns and the like as JSON values."""
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else list(value)
