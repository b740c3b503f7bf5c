"""What a run has found: each finding is kept, handed to the writer and printed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainprobe.engine.core.console import Console
from trainprobe.engine.core.findings import in_folder, recount
from trainprobe.engine.core.records import Finding

if TYPE_CHECKING:
    from trainprobe.engine.storage.writer import Writer


class Reporter:
    """Reports findings. output: the plan's folder, which sentences name.

    writer: gets findings while there is one. listeners: called with each finding, before it is printed.
    """

    def __init__(self, console: Console, output: Path) -> None:
        self.console = console
        self.findings: list[Finding] = []
        self.writer: Writer | None = None
        self.listeners: list[Callable[[Finding], None]] = []
        self._output = output
        self._reported: set[str] = set()
        self._counts: dict[int, Finding] = {}  # place in `findings` → one that was counted and is not written yet

    def report(self, finding: Finding) -> None:
        """Keep, write and print a finding."""
        finding = in_folder(finding, self._output)
        self.findings.append(finding)
        if self.writer is not None:
            self.writer.submit_findings([finding])
        for listener in self.listeners:
            listener(finding)
        self.console.report(finding)

    def report_once(self, finding: Finding, key: str = "") -> None:
        """Report a finding, unless one with this key was reported before. key: by default its message."""
        if self.is_new(key or finding.message):
            self.report(finding)

    def is_new(self, key: str) -> bool:
        """Tell whether this is the first time that somebody asks for this key."""
        new = key not in self._reported
        self._reported.add(key)
        return new

    def count(self, seen: Sequence[Finding], step: int) -> list[Finding]:
        """Count findings that were made before and hold at this step too; return them as they are now."""
        now = recount(self.findings, seen, step)
        self._counts |= now
        if any(finding.count & (finding.count - 1) == 0 for finding in now.values()):  # the powers of two, and at the end
            self.write_counts()
        return list(now.values())

    def write_counts(self) -> None:
        """Hand the findings that were counted since the last time to the writer."""
        if self.writer is not None and self._counts:
            self.writer.submit_counts(list(self._counts.values()))
        self._counts.clear()
