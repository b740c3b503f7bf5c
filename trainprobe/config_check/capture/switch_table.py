"""The switches of torch that are captured, by a maintained table (`switches.yaml`); read without torch by the comparison."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import yaml


@cache
def switches() -> Mapping[str, Mapping[str, str]]:
    """Return name → {"effect", "what", and "read" where torch is asked for it by its path}, in the order of the table."""
    rows = yaml.safe_load((Path(__file__).parent / "switches.yaml").read_text(encoding="utf-8"))
    return {row["name"]: {k: v for k, v in row.items() if k != "name"} for row in rows}
