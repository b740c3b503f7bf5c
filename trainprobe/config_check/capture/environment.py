"""The environment variables that can change a run's numbers or speed, by a maintained table (`environment.yaml`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from trainprobe.config_check.names import load_names, masked

OWN = "TRAINPROBE_"  # what the variables of this tool begin with; they change no number


@cache
def table() -> tuple[tuple[str, str, str], ...]:
    """Return (name or glob, effect, what it does) of each row of the table, in order."""
    rows = yaml.safe_load((Path(__file__).parent / "environment.yaml").read_text(encoding="utf-8"))
    return tuple((row["name"], row["effect"], row["what"]) for row in rows)


def effect_of(name: str) -> str | None:
    """Return numbers, rounding, speed or place for a variable of the table, None for any other."""
    return next((effect for pattern, effect, _ in table() if fnmatchcase(name, pattern)), None)


def what_it_does(name: str) -> str:
    """Return what a variable of the table does, or an empty text."""
    return next((what for pattern, _, what in table() if fnmatchcase(name, pattern)), "")


def capture_environment(variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return {"variables": name → value, "others": name → "", "withheld": names}.

    variables: the environment, that of this process by default. What is outside of the table, or looks like a secret, is only
    named: a hash of a short value can be guessed. Variables of trainprobe itself are left out: they tell of the capture.
    """
    variables = os.environ if variables is None else variables
    names = load_names()
    known: dict[str, str] = {}
    others: dict[str, str] = {}
    withheld: list[str] = []
    for name, value in sorted(variables.items()):
        if name.startswith(OWN):
            continue
        effect = effect_of(name)
        if masked(name, value, names) != value or (effect is None and names.is_secret_variable(name)):
            withheld.append(name)
        elif effect is not None:
            known[name] = value
        else:
            others[name] = ""
    return {"variables": known, "others": others, "withheld": withheld}
