"""Reads a record log back, also one whose writer was killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from trainprobe.engine.core.records import StepData
from trainprobe.engine.storage.dumps.layout import LOG_FILE, find_ranks, has_run_log
from trainprobe.engine.storage.dumps.record_log import decode
from trainprobe.engine.storage.left_out import DAMAGED, leave_out, tell
from trainprobe.engine.storage.safe_files import lines_of, open_to_read
from trainprobe.errors import FormatError

T = TypeVar("T")


def read_log(path: Path | str) -> Iterator[StepData]:
    """Yield the collected steps of a record log in the order they were written, one in memory at a time.

    path: a `records.jsonl`, a rank's folder with one or with a run log in columns, or a run's folder with one rank. Steps read
    from columns have finished numbers and no partials. A last line without its newline is what a killed run was writing, and
    is left out. Any other line that is no collected step is left out and told (`left_out`), or FormatError names it.
    """
    file = _find(Path(path))
    if file.is_dir():
        from trainprobe.engine.storage.run_log.read import read_steps

        yield from read_steps(file)
        return
    yield from read_lines(file, decode)


def read_lines(file: Path, read: Callable[[bytes], T], start: int | None = None) -> Iterator[T]:
    """Yield what `read` makes of each whole line; a line that it cannot read, and a torn end, are left out and told.

    start: the first byte, of a file that is followed while it grows.
    """
    with open_to_read(file) as lines:
        lines.seek(start or 0)
        for number, line in enumerate(lines_of(lines, file), 1):
            if not line.endswith(b"\n"):
                if start is None:
                    tell(f"{file} ends within line {number}: the run was killed or goes on, or the file was cut")
                return
            try:
                found = read(line)
            except DAMAGED as error:
                behind = f" behind byte {start}" if start else ""
                leave_out(f"{file}, line {number}{behind}, is left out: it is not a line of a record log ({error!r:.200})")
            else:
                yield found


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    found = [log for folder in (path, *find_ranks(path).values()) if (log := _log_in(folder)) is not None]
    if len(found) == 1:
        return found[0]
    if found:
        raise FormatError(f"{path} holds logs of {len(found)} ranks: name one of them, such as {found[0]}")
    raise FormatError(f"no run log at {path}: expected metrics-*.parquet, {LOG_FILE} or rank folders with one of them")


def _log_in(folder: Path) -> Path | None:
    if has_run_log(folder):
        return folder
    return folder / LOG_FILE if (folder / LOG_FILE).is_file() else None
