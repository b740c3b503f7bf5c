"""The record log: `rank{R}/records.jsonl`, append-only, one self-contained line a reel, and `findings.jsonl` beside it.

Each line goes to the operating system as a whole when it is written, so a killed run loses at most the line in flight.
`trainprobe.engine.dumps.read_log` reads it and leaves out a torn last line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainprobe.engine.dumps.append import AppendedFile, make_room
from trainprobe.engine.dumps.findings_file import FindingsFile
from trainprobe.engine.dumps.layout import FINDINGS_FILE, LOG_FILE, log_folder
from trainprobe.engine.dumps.record_log import Lines
from trainprobe.engine.plan import Plan
from trainprobe.engine.records import Finding, Place, Reel
from trainprobe.engine.sinks import write_together


class JsonlSink:
    """Appends to the record log of one rank."""

    def __init__(self, folder: Path) -> None:
        self.at = -1  # the step that is being written
        self._log = AppendedFile(folder / LOG_FILE)
        self._lines = Lines()
        self._findings = FindingsFile(folder / FINDINGS_FILE)

    def write(self, reel: Reel) -> None:
        """Append one line."""
        self.write_many((reel,))

    def write_many(self, reels: Sequence[Reel]) -> None:
        """Append a line a reel, many of them at once. Where it raises, `at` is the step that is lost."""
        write_together(self, reels, self._line, self._append)

    def _line(self, reel: Reel) -> tuple[tuple[int, Sequence[bytes]], int]:
        line = self._lines.line(reel)
        return (reel.step, line), sum(map(len, line))

    def _append(self, lines: Sequence[tuple[int, Sequence[bytes]]]) -> None:
        """Append these lines; where not all fit on the disk, those that do."""
        try:
            self._log.write(*(piece for _, line in lines for piece in line))
        except OSError:
            for self.at, line in lines:
                self._log.write(*line)

    def findings(self, findings: Sequence[Finding]) -> None:
        """Append one line a finding."""
        self._findings.append(findings)

    counts = findings

    def close(self) -> None:
        """Close the files."""
        self._log.close()
        self._findings.close()


def open(folder: Path, plan: Plan, place: Place) -> JsonlSink:
    """Open the record log of one rank. Raises OutputError when there is one already and the plan refuses that."""
    path = log_folder(folder, place.rank)
    make_room([path / LOG_FILE, path / FINDINGS_FILE], plan.on_existing)
    return JsonlSink(path)
