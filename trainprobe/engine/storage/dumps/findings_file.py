"""`rank{R}/findings.jsonl`: one line a finding, in the order in which they were made.

It is there whichever sinks a plan names, and by itself: where the run log cannot be written any more, that is a finding too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import orjson

from trainprobe.engine.core.records import Finding, Place
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.storage.dumps.append import AppendedFile, make_room
from trainprobe.engine.storage.dumps.layout import FINDINGS_FILE, log_folder

_OPTION = orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS


class FindingsFile:
    """A sink that appends findings to a file, which is there from the first one on.

    A line of the same finding with a new count takes the place of the earlier one for readers. What could not be written waits
    for the next time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: AppendedFile | None = None
        self._waiting: list[bytes] = []

    def findings(self, findings: Sequence[Finding]) -> None:
        """Append one line a finding."""
        self._waiting += [orjson.dumps(dataclasses.asdict(f), default=str, option=_OPTION) for f in findings]
        self.flush()

    counts = findings

    def flush(self) -> None:
        """Append the lines that wait."""
        if self._waiting:
            if self._file is None:
                self._file = AppendedFile(self._path)
            self._file.write(b"".join(self._waiting))
            self._waiting.clear()

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self.flush()
        if self._file is not None:
            self._file.close()


def open_findings(plan: Plan, place: Place) -> FindingsFile:
    """Open the file of one rank. Raises OutputError where the run log may not be written over and there are findings of one.

    A plan without a run log goes on behind what an earlier run in the folder found.
    """
    path = log_folder(plan.output, place.rank) / FINDINGS_FILE
    logs = {"parquet", "jsonl"} & {*plan.sinks}
    make_room([path], "continue" if plan.on_existing != "replace" and not logs else plan.on_existing)
    return FindingsFile(path)
