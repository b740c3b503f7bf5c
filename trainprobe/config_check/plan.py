"""The `config_check` section of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainprobe.config_check.settings import make_settings

PACK = "config_check_pack.zip"


def validate(settings: Mapping[str, Any]) -> None:
    """Raise PlanError on what cannot be used (see `settings.Settings` for the keys)."""
    make_settings(settings)
