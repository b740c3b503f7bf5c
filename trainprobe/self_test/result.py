"""What a check of the self-test says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["pass", "FAIL", "not run"]
SHOWN = {"pass": "pass   ", "FAIL": "FAIL   ", "not run": "not run"}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check. sentence: what was found, with the figures. details: more lines. numbers: what was measured, by name."""

    check: str
    outcome: Outcome
    sentence: str
    details: Sequence[str] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict[str, Any])
    seconds: float = 0.0

    def lines(self) -> list[str]:
        """Return the lines of the report."""
        return [f"{SHOWN[self.outcome]} {self.check}: {self.sentence}", *(f"          {line}" for line in self.details)]
