"""The `config_check` section of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainprobe.config_check.settings import make_settings

PACK = "config_check_pack.zip"


def settings_and_pack(
    section: Mapping[str, Any] | bool, folder: Path, on_error: str = "continue"
) -> tuple[dict[str, Any], Path]:
    """Return the settings of a section, true for its defaults, and where the pack is written.

    folder: the plan's `output`; the pack lies there unless the section names another `output`.
    """
    given = {} if isinstance(section, bool) else dict(section)
    pack = Path(given.pop("output", folder / PACK))
    return {"on_error": on_error, **given}, pack


def validate(settings: Mapping[str, Any]) -> None:
    """Raise PlanError on what cannot be used (see `settings.Settings` for the keys)."""
    make_settings(settings)
