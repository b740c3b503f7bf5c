"""What is known of how a value lies over ranks, from a table in YAML: the built-in one, and a user's, which is asked first.

Of most values the sizes say it (see splits). A rule says it where they do not, or where they would be read wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from trainprobe.engine.storage.safe_files import load_yaml, parse_yaml
from trainprobe.errors import FormatError, did_you_mean

WAYS = ("copy", "sum", "split")
Way = str | int | None  # one of WAYS, the number of a dimension, or not known
_PATTERNS, _AXES = ("module", "class", "slot"), ("tp", "samples")


@dataclass(frozen=True, slots=True)
class SplitRule:
    """One line of a table. where: the table and the rule's number, for messages. own: whether a user wrote it."""

    where: str
    module: str = "*"
    cls: str = "*"
    slot: str = "*"
    tp: Way = None
    samples: Way = None
    own: bool = False

    def matches(self, module: str, cls: str, slot: str) -> bool:
        """Return whether the rule speaks of a value."""
        return fnmatchcase(slot, self.slot) and fnmatchcase(cls, self.cls) and fnmatchcase(module, self.module)


@dataclass(slots=True)
class Splits:
    """Rules in the order in which they are asked."""

    rules: Sequence[SplitRule]
    _found: dict[tuple[str, str, str], SplitRule | None] = field(default_factory=dict[tuple[str, str, str], SplitRule | None])

    def find(self, module: str, cls: str, slot: str) -> SplitRule | None:
        """Return the rule that speaks of a value, None where nothing but its sizes is known."""
        key = module, cls, slot
        if key not in self._found:
            self._found[key] = next((rule for rule in self.rules if rule.matches(*key)), None)
        return self._found[key]


def splits(path: Path | None = None) -> Splits:
    """Return the built-in rules behind those of a user's file. Raises FormatError that names the faulty rule."""
    return Splits([*(() if path is None else _rules(load_yaml(path, "--layout "), str(path), own=True)), *_built_in()])


@lru_cache(maxsize=1)
def _built_in() -> tuple[SplitRule, ...]:
    text = resources.files("trainprobe.dump_compare.layouts").joinpath("split_table.yaml").read_text(encoding="utf-8")
    return tuple(_rules(parse_yaml(text, "split_table.yaml"), "split_table.yaml", own=False))


def _rules(data: Any, where: str, *, own: bool) -> list[SplitRule]:
    rules = data.get("rules") if isinstance(data, dict) else None
    if not isinstance(rules, list):
        raise FormatError(f"{where} says nothing of splits: it needs a list of `rules`")
    return [_rule(entry, f"{where}, rule {number}", own) for number, entry in enumerate(rules, 1)]


def _rule(entry: Any, where: str, own: bool) -> SplitRule:
    if not isinstance(entry, Mapping):
        raise FormatError(f"{where} is {entry!r}: it needs `module` or `class`, and `tp` or `samples`")
    known = [*_PATTERNS, *_AXES]
    unknown = next((str(key) for key in entry if key not in known), None)
    if unknown is not None:
        raise FormatError(f"{where} has {unknown!r}{did_you_mean(unknown, known)}; it may have {', '.join(known)}")
    if not ("module" in entry or "class" in entry) or not any(axis in entry for axis in _AXES):
        raise FormatError(f"{where} ({dict(entry)}) needs `module` or `class`, and `tp` or `samples`")
    for axis in _AXES:
        way = entry.get(axis)
        if way is not None and (isinstance(way, bool) or not isinstance(way, int)) and way not in WAYS:
            raise FormatError(
                f"{where}: {axis} is {way!r}; write {', '.join(WAYS)} or the number of the dimension that is split"
            )
    module, cls, slot = (str(entry.get(key, "*")) for key in _PATTERNS)
    return SplitRule(where, module, cls, slot, entry.get("tp"), entry.get("samples"), own)
