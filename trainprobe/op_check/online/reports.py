"""What the server writes of each rank of a run: a line a call, a CSV, a summary, and the first bugs with their scripts."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from typing import Any

import orjson

from trainprobe.engine.storage.safe_files import open_private, private_folder, write_whole
from trainprobe.engine.storage.sheet_cells import write_rows
from trainprobe.errors import OutputError, UsageError
from trainprobe.op_check.conclusion import said
from trainprobe.op_check.dump import Row
from trainprobe.op_check.judge import OUTCOMES
from trainprobe.op_check.recorded import RecordedRank
from trainprobe.op_check.replay import write_replay
from trainprobe.op_check.report import COLUMNS, lines
from trainprobe.op_check.training import line

_REPLAYS = 10
LOG, TABLE, SUMMARY, REPLAY = "op_check.txt", "op_check.csv", "op_check.json", "replay"


class Report:
    """The files of one rank: `FOLDER/RUN/rankN/`. A run that connects again is continued. Raises OutputError."""

    def __init__(self, folder: Path, run: str, rank: int) -> None:
        self.folder = folder / run / f"rank{rank}"
        self.counts: Counter[str] = Counter()
        self.judged = 0
        self.lost = 0  # arrived, and not judged because the link had broken
        self._told: dict[str, Any] = {}
        self._worst = ""
        self._gravest = (-1, 0.0)
        self._replays = 0
        try:
            private_folder(self.folder)
        except OSError as error:
            raise OutputError(f"cannot write {self.folder}: {error}") from error
        if not (self.folder / TABLE).exists():
            self._write(TABLE, ",".join((*COLUMNS, "own_device", "nearer")) + "\n")

    def add(self, row: Row, recorded: RecordedRank, here: Row | None, nearer: str) -> None:
        """Write one judged call. here: what the server's own device gave. Raises OutputError."""
        self.judged += 1
        outcome = row.worst.outcome
        self.counts[outcome] += 1
        gravity = (OUTCOMES.index(outcome), row.worst.worst)
        if outcome in ("bug", "suspicious", "mode") and gravity > self._gravest:
            self._gravest, self._worst = gravity, said(row)
        table = io.StringIO()
        own = lines([here]) if here is not None else []
        for i, record in enumerate(lines([row])):
            write_rows(table, [[*record.values(), own[i]["verdict"] if i < len(own) else "", nearer]])
        self._write(LOG, f"{line(row)}{f'; {nearer}' if nearer else ''}\n")
        self._write(TABLE, table.getvalue())
        if outcome == "bug" and self._replays < _REPLAYS:
            self._replays += 1
            self._replay(row, recorded)

    def add_unread(self, why: str) -> None:
        """Count a call that could not be read, and write why. Raises OutputError."""
        self.judged += 1
        self.counts["not checked"] += 1
        self._write(LOG, f"[WARNING] a call has not been tested: {why}\n")

    def _replay(self, row: Row, recorded: RecordedRank) -> None:
        try:
            write_replay(row, self.folder / REPLAY, recorded)
        except UsageError:  # it has no script; the log has its line
            pass

    def end(self, told: dict[str, Any]) -> None:
        """Write the summary. told: what the training said of itself at its end, empty where it did not end in order."""
        self._told = told
        document = {
            **{"verdict": self.sentence(), "worst": self._worst, "code": self.code()},
            **{"judged": self.judged, "lost": self.lost, "verdicts": dict(self.counts), "training": told},
        }
        try:
            write_whole(self.folder / SUMMARY, orjson.dumps(document, option=orjson.OPT_INDENT_2))
        except OSError as error:
            raise OutputError(f"cannot write {self.folder}: {error}") from error

    def sentence(self) -> str:
        """Return what was judged, the worst of it first."""
        counts = ", ".join(f"{self.counts[outcome]} {outcome}" for outcome in OUTCOMES if self.counts[outcome])
        parts = [f", {self.lost} more arrived and were not judged, because the link broke"] if self.lost else []
        parts += [f", {self._unseen()} more were made and did not arrive"] if self._unseen() else []
        parts += [] if self._told else [", and the link ended before the training said that these were all"]
        worst = f"{self._worst}; " if self._worst else ""
        return f"{worst}{self.judged} calls judged{f' ({counts})' if counts else ''}{''.join(parts)}"

    def _unseen(self) -> int:
        return int(self._told.get("left_out", 0)) + int(self._told.get("unanswered", 0))

    def code(self) -> int:
        """Return the exit code: 2 a bug, 3 something was not checked or is not here, 1 suspicious or a mode, 0 neither."""
        if self.counts["bug"]:
            return 2
        if self.counts["not checked"] or self.lost or not self.judged or not self._told or self._unseen():
            return 3
        return 1 if self.counts["suspicious"] or self.counts["mode"] else 0

    def _write(self, name: str, text: str) -> None:
        try:
            with open_private(self.folder / name, "a", encoding="utf-8", newline="") as file:
                file.write(text)
        except OSError as error:
            raise OutputError(f"cannot write {self.folder / name}: {error}") from error
