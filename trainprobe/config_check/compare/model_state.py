"""Compares what models carry beside classes and weights: evaluation mode, hooks, replaced methods, compilation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainprobe.config_check.compare.pair import BENCH, CMP
from trainprobe.config_check.compare.verdicts import PackFinding, shown

_MOST_REPORTED = 3
_WHOLE = "the model"
_AUTOCAST_FORWARD = "convert_outputs_to_fp32."  # what accelerate puts in place of a forward that it runs under autocast


def state_findings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[PackFinding]:
    """Return what differs between the states of two models; [] where a side does not have it."""
    left, right = a.get("model_state") or {}, b.get("model_state") or {}
    if not left or not right:
        return []
    found: list[PackFinding] = []
    for key, (topic, describe) in _KINDS.items():
        mine, theirs = dict(left.get(key, {})), dict(right.get(key, {}))
        for side, one, other in ((BENCH, mine, theirs), (CMP, theirs, mine)):
            if one_sided := [name for name in one if name not in other]:
                by_autocast = all(one[name].startswith(_AUTOCAST_FORWARD) for name in one_sided)
                causes = ("flag autocast",) if key == "methods" and by_autocast else ()
                found.append(PackFinding("error", f"{describe(one_sided, one[one_sided[0]])} only in {side}", topic, causes))
        found += [
            PackFinding("error", f"{_NAMES[key]} of {name} differs: {shown(mine[name])} and {shown(theirs[name])}", topic)
            for name in [n for n in mine if n in theirs and mine[n] != theirs[n]][:_MOST_REPORTED]
        ]
    return found


def _some(names: list[str]) -> str:
    """Return `the model`, `module a`, or `module a and 3 more`."""
    if names[0] == _WHOLE:
        return _WHOLE
    return f"module {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _evaluation(names: list[str], value: str) -> str:
    return f"{_some(names)} {'is' if len(names) == 1 or names[0] == _WHOLE else 'are'} in evaluation mode"


def _hooks(names: list[str], value: str) -> str:
    more = f" and {len(names) - 1} more have hooks" if len(names) > 1 else ""
    return f"{names[0]} has a {shown(value)}{more}"


def _methods(names: list[str], value: str) -> str:
    return f"forward of {_some(names)} is replaced by {shown(value)}"


def _compiled(names: list[str], value: str) -> str:
    return f"torch.compile is applied to {_some(names)}{f' ({value})' if value else ''}"


_KINDS: dict[str, tuple[str, Callable[[list[str], str], str]]] = {
    "evaluation": ("mode", _evaluation),
    "hooks": ("hooks", _hooks),
    "methods": ("methods", _methods),
    "compiled": ("compile", _compiled),
}
_NAMES = {"evaluation": "class", "hooks": "hooks", "methods": "forward", "compiled": "torch.compile"}
