"""References in settings files, as OmegaConf and Hydra have them: `${a.b}`, `${.b}`, `${oc.select:a.b,1}`, `${oc.env:LR,1e-6}`.

They are replaced by what they refer to, so that two files are compared by what their programs are given. What cannot be known
from the file (`${now:%Y}`, resolvers of the program) stays as it is written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import yaml

from trainprobe.config_check.names import masked

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_DEEPEST = 16  # references to references
_LONGEST = 10_000  # characters of a value that holds some
_MOST = 5_000  # settings that references to mappings add, lest they grow without end
_MAPPINGS = 200  # references to whole mappings that are followed at a time
_UNKNOWN = object()


def resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return flat settings with their references replaced; what refers to a mapping becomes its settings."""
    found = dict(values)
    for _ in range(_DEEPEST):
        settings = _Settings(found)
        changed = {key: now for key, value in found.items() if (now := _replaced(key, value, settings)) is not value}
        if not changed or len(found) - len(values) + sum(len(now) for now in changed.values() if isinstance(now, dict)) > _MOST:
            break
        for key, now in changed.items():
            if isinstance(now, dict):
                del found[key]
            found |= now if isinstance(now, dict) else {key: now}
    return {key: found[key] for key in sorted(found, key=_order(values))}


class _Settings:
    """Settings by name, and the names of the mappings that they are in."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)
        self._mappings = {key[:i] for key in values for i, letter in enumerate(key) if letter == "."}
        self._left = _MAPPINGS

    def below(self, name: str) -> dict[str, Any]:
        """Return the settings of a mapping by the rest of their names, none where there is no such mapping."""
        if name not in self._mappings or not self._left:
            return {}
        self._left -= 1
        return {key[len(name) :]: value for key, value in self.values.items() if key.startswith(f"{name}.")}


def _order(values: Mapping[str, Any]) -> Any:
    """Return what sorts settings as the file has them: those of a mapping that was referred to stand in its place."""
    place = {key: i for i, key in enumerate(values)}

    def order(key: str) -> int:
        while key not in place and "." in key:
            key = key.rpartition(".")[0]
        return place.get(key, len(place))

    return order


def _replaced(key: str, value: Any, values: _Settings) -> Any:
    """Return what stands in place of a value; itself where it holds no reference that can be told."""
    if isinstance(value, list):
        each: list[Any] = [_replaced(key, item, values) for item in value]  # pyright: ignore[reportUnknownVariableType]
        plain = not any(isinstance(item, dict) for item in each)
        return each if plain and any(a is not b for a, b in zip(each, value, strict=True)) else value  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if not isinstance(value, str) or "${" not in value or len(value) > _LONGEST:
        return value
    whole = _INNERMOST.fullmatch(value)
    if whole:
        target = _target(key, whole[1], values)
        return value if target is _UNKNOWN else target

    def text(match: re.Match[str]) -> str:
        target = _target(key, match[1], values)
        scalar = target is not _UNKNOWN and not isinstance(target, dict | list)
        return str(target) if scalar else match[0]

    now = _INNERMOST.sub(text, value)
    return value if now == value else now


def _target(key: str, reference: str, values: _Settings) -> Any:
    """Return what a reference of one setting means: a value, the settings of a mapping, or _UNKNOWN."""
    resolver, colon, rest = reference.partition(":")
    if not colon:
        return _looked_up(key, reference.strip(), values)
    name, comma, default = rest.partition(",")
    name, default = name.strip(), default.strip()
    if resolver.strip() == "oc.select":
        target = _looked_up(key, name, values)
        return target if target is not _UNKNOWN else _scalar(default) if comma else None
    if resolver.strip() in ("oc.env", "env"):
        given = os.environ.get(name)
        return masked(name, given) if given is not None else default.strip("'\"") if comma else _UNKNOWN
    return _scalar(rest) if resolver.strip() == "oc.decode" else _UNKNOWN


def _looked_up(key: str, name: str, values: _Settings) -> Any:
    dots = len(name) - len(name.lstrip("."))
    name = re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", name.lstrip("."))
    for parent in [".".join(key.split(".")[:-dots])] if dots else [""]:
        name = f"{parent}.{name}" if parent else name
    if name in values.values:
        return values.values[name]
    listed, _, index = name.rpartition(".")
    items = values.values.get(listed)
    if index.isdigit() and isinstance(items, list) and int(index) < len(items):  # pyright: ignore[reportUnknownArgumentType]
        return items[int(index)]  # pyright: ignore[reportUnknownVariableType]
    if not name or f"{key}.".startswith(f"{name}."):
        return _UNKNOWN
    return {f"{key}{rest}": value for rest, value in values.below(name).items()} or _UNKNOWN


def _scalar(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, str | int | float | bool | None) else text
