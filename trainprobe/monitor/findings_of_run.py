"""All findings about a recorded run: what it found itself, and what the rules find in its record now."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from trainprobe.engine.core.findings import Cause, cause_of, ranks_of
from trainprobe.engine.core.records import Finding
from trainprobe.monitor.watcher import causes

Origin = Literal["recorded", "judged", "both"]
OWN = frozenset({"plan", "probe", "guard", "writer", "kernels", "alerts"})  # rules about the tool, not about the training


@dataclasses.dataclass(frozen=True, slots=True)
class JudgedFinding:
    """A finding of a run, one per cause. origin: whether the run recorded it, the rules find it in the record now, or both."""

    finding: Finding
    origin: Origin

    def to_json(self) -> dict[str, Any]:
        """Return the finding as in `findings.jsonl`, with its origin."""
        return {**dataclasses.asdict(self.finding), "origin": self.origin}


def exit_code(findings: Iterable[Finding], incomplete: bool) -> int:
    """Return what a reader of a run exits with: 1 for a warning or an error, 0 for none.

    3 where the record is incomplete and nothing is known to be wrong with the training itself.
    """
    rules = {finding.rule for finding in findings if finding.severity != "info"}
    return 3 if incomplete and rules <= OWN else int(bool(rules))


def all_findings(recorded: Sequence[Finding], judged: Sequence[Finding]) -> list[JudgedFinding]:
    """Return one entry a cause, causes before consequences; a finding that is in both is one entry."""
    known = {_key(finding) for finding in recorded}
    new = [finding for finding in judged if _key(finding) not in known]
    by_run, now = _causes(recorded), _causes(judged)
    return [JudgedFinding(finding, _origin(cause_of(finding), by_run, now)) for finding in causes([*recorded, *new])]


def _key(finding: Finding) -> tuple[Cause, int | None, tuple[int, ...]]:
    return cause_of(finding), finding.step, ranks_of(finding)


def _causes(findings: Iterable[Finding]) -> set[Cause]:
    return {cause_of(finding) for finding in findings}


def _origin(cause: Cause, recorded: set[Cause], judged: set[Cause]) -> Origin:
    if cause in recorded and cause in judged:
        return "both"
    return "recorded" if cause in recorded else "judged"
