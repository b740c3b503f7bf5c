"""Keeps the findings of a run whose plan names no sink that does: `sinks: [dump]` or `[csv]` alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainprobe.engine.core.records import Finding, Place, StepData
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.storage.dumps.append import make_room
from trainprobe.engine.storage.dumps.findings_file import FindingsFile
from trainprobe.engine.storage.dumps.layout import FINDINGS_FILE, log_folder

_KEEP_FINDINGS = frozenset({"parquet", "jsonl"})


class FindingsSink:
    """Appends to `rank{R}/findings.jsonl`, which is there from the first finding on."""

    def __init__(self, path: Path) -> None:
        self._file = FindingsFile(path)

    def write(self, step_data: StepData) -> None:
        """Steps go to the sinks of the plan."""

    def findings(self, findings: Sequence[Finding]) -> None:
        """Append one line a finding."""
        self._file.append(findings)

    counts = findings

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def findings_sinks(plan: Plan, place: Place) -> dict[str, FindingsSink]:
    """Return what keeps the findings of a rank, nothing where a sink of the plan does, or where it writes nothing at all.

    What an earlier run in the folder found stays, unless the plan replaces it.
    """
    if not plan.sinks or _KEEP_FINDINGS & {*plan.sinks}:
        return {}
    path = log_folder(plan.output, place.rank) / FINDINGS_FILE
    make_room([path], "replace" if plan.on_existing == "replace" else "continue")
    return {"findings": FindingsSink(path)}
