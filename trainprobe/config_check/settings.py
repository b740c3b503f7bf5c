"""What a capture is asked for: the settings of a ConfigChecker, of a plan's `config_check` section and of `collect`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from trainprobe.config_check.pack import CAPTURES
from trainprobe.errors import PlanError, did_you_mean

FRAMEWORKS = ("pytorch", "mindspore")


@dataclass(frozen=True, slots=True)
class CapturedSettings:
    """Settings of a capture.

    output: the pack. micro_steps: how many micro-steps are captured. captures: which of the six. scripts: files whose settings
    are read as well. tokens: first elements of each integer input that are stored. framework: pytorch or mindspore. wait:
    seconds that rank 0 waits for the packs of the others. on_error: continue or raise, as everywhere.
    """

    output: Path = Path("config_check_pack.zip")
    micro_steps: int = 4
    captures: tuple[str, ...] = CAPTURES
    scripts: tuple[str, ...] = ()
    tokens: int = 0
    framework: str = "pytorch"
    wait: float = 60.0
    on_error: str = "continue"
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


def make_settings(given: Mapping[str, Any]) -> CapturedSettings:
    """Return Settings of a mapping; PlanError names the key, the value and what was probably meant."""
    known = [f.name for f in fields(CapturedSettings)]
    for key in given:
        if key not in known:
            raise PlanError(
                f"config_check: unknown key {key!r}{did_you_mean(str(key), known) or ' (there are: ' + ', '.join(known) + ')'}"
            )
    made = dict(given)
    for key in ("captures", "scripts"):
        if key in made:
            value = made[key]
            made[key] = (str(value),) if isinstance(value, str | Path) else tuple(str(v) for v in value or ())
    if "output" in made:
        made["output"] = Path(made["output"])
    for capture in made.get("captures", ()):
        if capture not in CAPTURES:
            raise PlanError(
                f"config_check: captures: {capture!r} is not one{did_you_mean(capture, list(CAPTURES))}"
                f" (there are: {', '.join(CAPTURES)})"
            )
    _check_numbers(made)
    if made.get("framework", "pytorch") not in FRAMEWORKS:
        raise PlanError(f"config_check: framework: {made['framework']!r} is neither of {' and '.join(FRAMEWORKS)}")
    if made.get("on_error", "continue") not in ("continue", "raise"):
        raise PlanError(f"config_check: on_error: {made['on_error']!r} is neither continue nor raise")
    return CapturedSettings(**made)


def _check_numbers(made: Mapping[str, Any]) -> None:
    for key, least in (("micro_steps", 1), ("tokens", 0)):
        value = made.get(key, least)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise PlanError(f"config_check: {key}: {value!r} cannot be used: expected a whole number of at least {least}")
    wait = made.get("wait", 0)
    if not isinstance(wait, int | float) or isinstance(wait, bool) or wait < 0:
        raise PlanError(f"config_check: wait: {wait!r} cannot be used: expected seconds, at least 0")
