"""What the dialects share: the plan and the notes that a translation has come to, and checks of its values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from trainprobe.errors import PlanError, did_you_mean


@dataclass
class Translation:
    """What has been carried over so far, and what there is to say about the rest."""

    origin: str
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    notes: list[str] = field(default_factory=list[str])

    def refuse(self, key: str, sentence: str) -> PlanError:
        """Return the error that names the file and the key."""
        return PlanError(f"{self.origin}: {key}: {sentence}")

    def note(self, key: str, sentence: str) -> None:
        """Keep a sentence about a key that means something else here."""
        self.notes.append(f"{self.origin}: {key}: {sentence}")

    def check_keys(self, given: Mapping[str, Any], known: set[str], prefix: str = "") -> None:
        """Note each key that neither tool uses: that tool ignores them."""
        for key in given:
            if key not in known:
                self.note(f"{prefix}{key}", f"unknown key, not used{did_you_mean(str(key), sorted(known))}")

    def texts(self, given: object, key: str) -> list[str]:
        """Return a text or a list of texts as a list. Raises PlanError for anything else."""
        several = cast("list[object]", list(given)) if isinstance(given, (list, tuple)) else [given]
        for name in several:
            if not isinstance(name, str):
                raise self.refuse(key, f"{name!r} cannot be used: expected a list of texts")
        return cast("list[str]", several)

    def section(self, given: object, key: str) -> Mapping[str, Any]:
        """Return a section, an empty one for nothing. Raises PlanError for anything else."""
        section = given or {}
        if not isinstance(section, Mapping):
            raise self.refuse(key, f"{given!r} cannot be used: expected a section of `key: value` lines")
        return cast("Mapping[str, Any]", section)

    def whole(self, config: Mapping[str, Any], key: str, default: int, least: int) -> int:
        """Return a whole number; where it is none, or too small, that tool takes its default, and so does this."""
        value = config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.note(key, f"{value!r} is not a whole number of at least {least}: {default} is used")
            return default
        return value


def literal(text: str) -> str:
    """Return the pattern that matches this text alone."""
    return re.sub(r"([*?\[])", r"[\1]", text)
