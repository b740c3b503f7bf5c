"""The run log: `rank{R}/metrics-*.parquet`, one row a value, place and step, which any tool can query.

The steps since the last segment stand in `metrics.arrow`, Arrow's streaming format. A killed run leaves them there: they are
read all the same, and the next run in the folder makes a segment of them. While a segment is made of a full stream, that has
the name `metrics-full.arrow`.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trainprobe.engine.core.guard import attempt
from trainprobe.engine.core.records import Place, StepData
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.storage.dumps.append import make_room
from trainprobe.engine.storage.dumps.layout import FULL_FILE, LIVE_FILE, find_segments, find_streams, log_folder
from trainprobe.errors import OutputError

if TYPE_CHECKING:  # the run log brings pyarrow, which a process that only dumps is not to load
    from trainprobe.engine.storage.run_log.live import LiveStream
    from trainprobe.engine.storage.run_log.rows import Rows

SEGMENT = 1 << 17  # rows of the live stream, which are kept and become a segment
KEPT = 1 << 17  # rows that are kept for a disk that refuses them


class ParquetSink:
    """Appends to the run log of one rank.

    dumped: steps that only the dump asked for are in a dump, and are left out here. at_once: what takes long to load is loaded
    before the first step, so that a kill soon after it costs no more than a later one.
    """

    def __init__(self, folder: Path, dumped: bool = False, at_once: bool = False) -> None:
        self._folder = folder
        self._dumped = dumped
        self._rows: Rows | None = None
        self._live: LiveStream | None = None
        self._full: LiveStream | None = None  # becomes a segment
        self._making: threading.Thread | None = None  # it
        self._fault: Exception | None = None  # of that
        self._enough = SEGMENT
        self._waiting: list[tuple[int, StepData]] = []  # with the microseconds at which each came
        self._kept = 0  # rows that are not on the disk
        if find_streams(folder):  # a killed run left them
            from trainprobe.engine.storage.run_log.segments import close_segment

            close_segment(folder)
        if at_once:
            self._load()

    def takes(self, step_data: StepData) -> bool:
        """Tell whether a step is for the run log."""
        return not (self._dumped and step_data.dumped and len(step_data.programs) == 1)

    def write(self, step_data: StepData) -> None:
        """Take one step; it is in the file after the next `flush`. Raises OutputError where too many wait for the disk."""
        if self._kept >= KEPT:
            raise OutputError(f"{self._kept} rows of earlier steps wait for the disk, and no more are kept")
        self._waiting.append((time.time_ns() // 1000, step_data))
        self._kept += len(step_data.partials)

    def flush(self) -> None:
        """Append the rows of the steps that wait as one batch. Raises OSError where the disk refuses: they wait then."""
        if not self._kept and not self._waiting:
            return
        rows, live = self._open()
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            live.write(rows.batch(waiting))
        else:
            live.append()
        self._kept = 0
        if live.rows >= self._enough:
            self._make_segment(live)

    def _load(self) -> Rows:
        """Return what makes rows."""
        from trainprobe.engine.storage.run_log.rows import Rows
        from trainprobe.engine.storage.run_log.segments import last_time

        if self._rows is None:
            self._rows = Rows(last_time(self._folder))
        return self._rows

    def _open(self) -> tuple[Rows, LiveStream]:
        """Return what makes rows and the stream that they go to. One that somebody has removed is written again."""
        from trainprobe.engine.storage.run_log.live import LiveStream

        rows, old = self._load(), self._live
        if old is None or old.removed:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._live = LiveStream(self._folder / LIVE_FILE)
            rows.forget_layouts()
            for batch in old.batches if old is not None else ():
                self._live.write(batch)
            if old is not None:
                old.close()
        assert self._live is not None
        return rows, self._live

    def _make_segment(self, live: LiveStream) -> None:
        """Have a segment made on a thread of its own: the steps that follow do not wait for it."""
        if self._making is not None and self._making.is_alive():
            return
        fault, self._fault = self._fault, None
        if fault is not None:
            self._enough += SEGMENT  # more is kept before it is tried again
            raise fault
        if self._full is None:
            live.move(self._folder / FULL_FILE)
            self._full, self._live, self._enough = live, None, SEGMENT
        self._making = threading.Thread(
            target=attempt, args=(self._close_full,), kwargs={"otherwise": self._failed}, daemon=True
        )
        self._making.start()

    def _close_full(self) -> None:
        from trainprobe.engine.storage.run_log.segments import close_segment

        close_segment(self._folder, self._full)
        self._full = None

    def _failed(self, fault: Exception) -> None:
        self._fault = fault

    def close(self) -> None:
        """Make a segment of what is in the stream."""
        self.flush()
        if self._making is not None:
            self._making.join()
        if self._full is not None:
            self._close_full()
        if self._live is not None:
            self._full, self._live = self._live, None
            self._close_full()


def open(folder: Path, plan: Plan, place: Place) -> ParquetSink:
    """Open the run log of one rank. Raises OutputError when there is one already and the plan refuses that."""
    path = log_folder(folder, place.rank)
    make_room([*find_streams(path), *find_segments(path)], plan.on_existing)
    dumped = "dump" in plan.sinks
    return ParquetSink(path, dumped, at_once=not dumped or plan.judges)
