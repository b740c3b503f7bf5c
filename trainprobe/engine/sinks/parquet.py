"""The run log: `rank{R}/metrics-*.parquet`, one row a value, place and step, which any tool can query.

The steps since the last segment stand in `metrics.arrow`, Arrow's streaming format. A killed run leaves them there: they are
read all the same, and the next run in the folder makes a segment of them. `findings.jsonl` lies beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainprobe.engine.dumps.append import make_room
from trainprobe.engine.dumps.findings_file import FindingsFile
from trainprobe.engine.dumps.layout import FINDINGS_FILE, LIVE_FILE, find_segments, log_folder
from trainprobe.engine.plan import Plan
from trainprobe.engine.records import Finding, Place, Reel

if TYPE_CHECKING:  # the run log brings pyarrow, which a process that only dumps is not to load
    from trainprobe.engine.run_log.live import LiveStream
    from trainprobe.engine.run_log.rows import Rows

SEGMENT = 1 << 17  # rows of the live stream that become a segment: some 35 MB of memory while it is made


class ParquetSink:
    """Appends to the run log of one rank.

    findings: the file of findings, None where another sink writes it. dumped: steps that only the dump wanted are in a dump, and
    are left out here.
    """

    def __init__(self, folder: Path, findings: FindingsFile | None = None, dumped: bool = False) -> None:
        self.findings_file = findings
        self.at = -1  # the step that is being written
        self._folder = folder
        self._dumped = dumped
        self._rows: Rows | None = None
        self._live: LiveStream | None = None
        if (folder / LIVE_FILE).exists():  # a killed run left it
            from trainprobe.engine.run_log.segments import close_segment

            close_segment(folder)

    def write(self, reel: Reel) -> None:
        """Append the rows of one step."""
        self.write_many((reel,))

    def write_many(self, reels: Sequence[Reel]) -> None:
        """Append the rows of some steps as one batch. Where it raises, `at` is the first step that is lost."""
        logged = [reel for reel in reels if not self._dumped or tuple(reel.programs) != ("dump",)]
        if not logged:
            return
        self.at = logged[0].step
        rows, live = self._open()
        live.write(rows.batch(logged))
        if live.rows >= SEGMENT:
            self._close_segment()

    def _open(self) -> tuple[Rows, LiveStream]:
        """Return what makes rows and the stream that they go to."""
        from trainprobe.engine.run_log.live import LiveStream
        from trainprobe.engine.run_log.rows import Rows

        if self._rows is None:
            self._rows = Rows()
        if self._live is None:
            self._rows.forget_layouts()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._live = LiveStream(self._folder / LIVE_FILE)
        return self._rows, self._live

    def _close_segment(self) -> None:
        from trainprobe.engine.run_log.segments import close_segment

        if self._live is not None:
            live, self._live = self._live, None
            live.close()
            close_segment(self._folder)

    def findings(self, findings: Sequence[Finding]) -> None:
        """Append one line a finding, unless another sink does."""
        if self.findings_file is not None:
            self.findings_file.append(findings)

    counts = findings

    def close(self) -> None:
        """Make a segment of what is in the stream."""
        if self._live is not None:
            self._close_segment()
        if self.findings_file is not None:
            self.findings_file.close()


def open(folder: Path, plan: Plan, place: Place) -> ParquetSink:
    """Open the run log of one rank. Raises OutputError when there is one already and the plan refuses that."""
    path = log_folder(folder, place.rank)
    own = [] if "jsonl" in plan.sinks else [path / FINDINGS_FILE]
    make_room([path / LIVE_FILE, *find_segments(path), *own], plan.on_existing)
    return ParquetSink(path, FindingsFile(own[0]) if own else None, dumped="dump" in plan.sinks)
