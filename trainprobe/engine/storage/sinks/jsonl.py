"""Each step as a line of JSON: `rank{R}/records.jsonl`, append-only and self-contained, for programs that read that.

Each line goes to the operating system as a whole when it is written, so a killed run loses at most the line in flight.
`trainprobe.engine.storage.dumps.read_log` reads it and leaves out a torn last line.
"""

from __future__ import annotations

from pathlib import Path

from trainprobe.engine.core.records import Place, StepData
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.storage.dumps.append import AppendedFile, make_room
from trainprobe.engine.storage.dumps.layout import LOG_FILE, log_folder
from trainprobe.engine.storage.dumps.record_log import encode


class JsonlSink:
    """Appends to the lines of one rank."""

    def __init__(self, folder: Path) -> None:
        self._log = AppendedFile(folder / LOG_FILE)

    def write(self, step_data: StepData) -> None:
        """Append one line."""
        self._log.write(encode(step_data))

    def close(self) -> None:
        """Close the file."""
        self._log.close()


def open(folder: Path, plan: Plan, place: Place) -> JsonlSink:
    """Open the lines of one rank. Raises OutputError when there are some already and the plan refuses that."""
    path = log_folder(folder, place.rank)
    make_room([path / LOG_FILE], plan.on_existing)
    return JsonlSink(path)
