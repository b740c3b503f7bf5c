"""Reads the configuration files of mindstudio-probe as plans: the `config.json` of its dumps and those of its two monitors.

Whatever that tool accepts is carried over, or reported in a sentence: a PlanError where the run would not be what was asked
for, a note where it differs in a detail.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainprobe.engine.plan.legacy import dump, monitor, second_monitor

_DIALECTS = (second_monitor, monitor, dump)


def is_legacy(fields: Mapping[str, Any]) -> bool:
    """Tell whether these keys are that tool's and none of them a plan's alone."""
    return any(dialect.is_dialect(fields) for dialect in _DIALECTS)


def is_of_monitor(fields: Mapping[str, Any]) -> bool:
    """Tell whether these keys are those of one of that tool's monitors."""
    return any(dialect.is_dialect(fields) for dialect in (second_monitor, monitor))


def translate(config: Mapping[str, Any], origin: str, framework: str = "pytorch") -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the fields of a plan and the notes; PlanError names what cannot be carried over.

    framework: "pytorch" or "mindspore", under which some keys mean something else.
    """
    dialect = next((d for d in _DIALECTS if d.is_dialect(config)), dump)
    if dialect is dump:
        return dump.translate(config, origin, framework)
    return dialect.translate(config, origin)
