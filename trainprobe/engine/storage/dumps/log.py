"""Reads a record log back, also one whose writer was killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainprobe.engine.core.records import StepData
from trainprobe.engine.storage.dumps.layout import LOG_FILE, find_ranks, has_run_log
from trainprobe.engine.storage.dumps.record_log import decode
from trainprobe.errors import FormatError


def read_log(path: Path | str) -> Iterator[StepData]:
    """Yield the collected steps of a record log in the order they were written, one in memory at a time.

    path: a `records.jsonl`, a rank's folder with one or with a run log in columns, or a run's folder with one rank. Steps read
    from columns have finished numbers and no partials. A last line without its newline is what a killed run was writing, and
    is left out. Raises FormatError, with the number of the line, for any other line that is not a collected step.
    """
    file = _find(Path(path))
    if file.is_dir():
        from trainprobe.engine.storage.run_log.read import read_steps

        yield from read_steps(file)
        return
    with file.open("rb", buffering=1 << 20) as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield decode(line)
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                raise FormatError(f"{file}, line {number}: not a line of a record log: {error!r}") from None


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
