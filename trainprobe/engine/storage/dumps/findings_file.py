"""Writes and reads `rank{R}/findings.jsonl`: one line a finding, in the order in which they were made.

It is there whichever sinks a plan names, and by itself: where the run log cannot be written any more, that is a finding too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from trainprobe.engine.core.findings import with_last_counts
from trainprobe.engine.core.records import Finding, Place, Site
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.storage.dumps.append import AppendedFile, make_room
from trainprobe.engine.storage.dumps.header import read_place
from trainprobe.engine.storage.dumps.layout import FINDINGS_FILE, files_of_run, log_folder
from trainprobe.engine.storage.left_out import DAMAGED, leave_out
from trainprobe.engine.storage.safe_files import LARGEST_STATE, read_bounded

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


def read_findings(folder: Path) -> list[Finding]:
    """Return the findings that a run wrote, in the order of ranks and lines, each with the last count that was written.

    folder: a run's or a rank's, or a file in a rank's. A torn last line is left out. Another that is no finding is left out
    too, and told (`left_out`).
    """
    where = folder if folder.is_dir() else folder.parent
    files = sorted(files_of_run(where, FINDINGS_FILE)) if folder.is_dir() else [*where.glob(FINDINGS_FILE)]
    return [finding for file in files for finding in with_last_counts(_read_lines(file))]


def _read_lines(file: Path) -> Iterator[Finding]:
    for number, line in enumerate(read_bounded(file, LARGEST_STATE, follow=True).split(b"\n")[:-1], 1):
        try:
            finding = finding_of(orjson.loads(line))
            if (
                type(finding.count) is not int
                or type(finding.step) not in (int, type(None))
                or finding.severity not in ("error", "warning", "info")
            ):
                raise ValueError("its step, count or severity is none")
        except DAMAGED as error:
            leave_out(f"{file}, line {number}, is left out: it is not a finding ({error!r:.200})")
        else:
            yield finding


def finding_of(text: Mapping[str, Any]) -> Finding:
    """Return the finding that a JSON object describes."""
    place, site = text.get("place"), text.get("site")
    return Finding(
        rule=str(text["rule"]),
        severity=text["severity"],
        message=str(text["message"]),
        step=text.get("step"),
        place=read_place(place) if place else None,
        site=Site(site["kind"], site["name"], site["slot"], site.get("call", 0), site.get("cls", "")) if site else None,
        measured=text.get("measured"),
        expected=text.get("expected"),
        floor=text.get("floor"),
        next=text.get("next"),
        names=tuple(text.get("names") or ()),
        count=text.get("count", 1),
        last_step=text.get("last_step"),
        ranks=tuple(text.get("ranks") or ()),
    )
