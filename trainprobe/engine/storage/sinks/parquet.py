"""The run log: `rank{R}/metrics-*.parquet`, one row a value, place and step, which any tool can query.

The steps since the last segment stand in `metrics.arrow`, Arrow's streaming format. A killed run leaves them there: they are
read all the same, and the next run in the folder makes a segment of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainprobe.engine.core.records import Finding, Place, StepData
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.storage.dumps.append import make_room
from trainprobe.engine.storage.dumps.layout import LIVE_FILE, find_segments, log_folder

if TYPE_CHECKING:  # the run log brings pyarrow, which a process that only dumps is not to load
    from trainprobe.engine.storage.run_log.live import LiveStream
    from trainprobe.engine.storage.run_log.rows import Rows

SEGMENT = 1 << 17  # rows of the live stream, which are kept and become a segment


class ParquetSink:
    """Appends to the run log of one rank.

    dumped: steps that only the dump asked for are in a dump, and are left out here.
    """

    def __init__(self, folder: Path, dumped: bool = False) -> None:
        self._folder = folder
        self._dumped = dumped
        self._rows: Rows | None = None
        self._live: LiveStream | None = None
        self._waiting: list[tuple[int, StepData]] = []  # with the microseconds at which each came
        if (folder / LIVE_FILE).exists():  # a killed run left it
            from trainprobe.engine.storage.run_log.segments import close_segment

            close_segment(folder)

    def write(self, step_data: StepData) -> None:
        """Take one step; it is in the file after the next `flush`."""
        if self._dumped and step_data.dumped and len(step_data.programs) == 1:
            return
        self._waiting.append((time.time_ns() // 1000, step_data))

    def flush(self) -> None:
        """Append the rows of the steps that wait as one batch."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        rows, live = self._open()
        live.write(rows.batch(waiting))
        if live.rows >= SEGMENT:
            self._close_segment()

    def _open(self) -> tuple[Rows, LiveStream]:
        """Return what makes rows and the stream that they go to."""
        from trainprobe.engine.storage.run_log.live import LiveStream
        from trainprobe.engine.storage.run_log.rows import Rows
        from trainprobe.engine.storage.run_log.segments import last_time

        if self._rows is None:
            self._rows = Rows(last_time(self._folder))
        if self._live is None:
            self._rows.forget_layouts()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._live = LiveStream(self._folder / LIVE_FILE)
        return self._rows, self._live

    def _close_segment(self) -> None:
        from trainprobe.engine.storage.run_log.segments import close_segment

        if self._live is not None:
            live, self._live = self._live, None
            close_segment(self._folder, live)

    def findings(self, findings: Sequence[Finding]) -> None:
        """Findings have a file of their own."""

    def close(self) -> None:
        """Make a segment of what is in the stream."""
        self.flush()
        if self._live is not None:
            self._close_segment()


def open(folder: Path, plan: Plan, place: Place) -> ParquetSink:
    """Open the run log of one rank. Raises OutputError when there is one already and the plan refuses that."""
    path = log_folder(folder, place.rank)
    make_room([path / LIVE_FILE, *find_segments(path)], plan.on_existing)
    return ParquetSink(path, dumped="dump" in plan.sinks)
