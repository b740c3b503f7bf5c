"""`rank{R}/findings.jsonl`: one line a finding, in the order in which they were made."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import orjson

from trainprobe.engine.core.records import Finding
from trainprobe.engine.storage.dumps.append import AppendedFile

_OPTION = orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS


class FindingsFile:
    """Appends findings to a file that is there from the first one on.

    A line of the same finding with a new count takes the place of the earlier one for readers.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: AppendedFile | None = None

    def append(self, findings: Sequence[Finding]) -> None:
        """Append one line a finding."""
        if self._file is None:
            self._file = AppendedFile(self._path)
        self._file.write(b"".join(orjson.dumps(dataclasses.asdict(f), default=str, option=_OPTION) for f in findings))

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._file is not None:
            self._file.close()
