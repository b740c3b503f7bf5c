"""Reads a run's folder back for the monitor: frames of every rank.

Looks for logs first (`rank{R}/metrics-*.parquet` or `rank{R}/records.jsonl`), because they hold everything, then for a dump
(`step{N}/rank{R}/`), and then for metric CSV files.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NoReturn

import orjson

from trainprobe.engine.core.records import Place
from trainprobe.engine.storage.dumps.header import read_place
from trainprobe.engine.storage.dumps.layout import (
    FINDINGS_FILE,
    FULL_FILE,
    LIVE_FILE,
    LOG_FILE,
    files_of_run,
    find_ranks,
    find_segments,
    find_steps,
    has_run_log,
    trainings_in,
)
from trainprobe.engine.storage.dumps.log import read_lines
from trainprobe.engine.storage.dumps.read import read_step
from trainprobe.engine.storage.dumps.record_log import decode
from trainprobe.engine.storage.left_out import damaged_as, tell
from trainprobe.errors import FormatError
from trainprobe.monitor.frames import Frame, SeriesTable, frame_of_records, frame_of_step
from trainprobe.monitor.metric_files import is_metric_file, read_metrics
from trainprobe.monitor.scalar_logs import KNOWN, read_scalar_log
from trainprobe.monitor.scalar_logs.json_lines import counts_steps

LACKS = (
    f"no metrics-*.parquet, no {LOG_FILE}, no dump (step{{N}}/rank{{R}}/), no CSV file of metrics and no log of another tool "
    f"({KNOWN})"
)
SHOWN = 4  # runs that are named where a folder holds none
MOST_ENTRIES = 1000  # of a folder that are looked at for runs
_OF_RUNS = (f"rank*/{FINDINGS_FILE}", "rank*/metrics*", f"rank*/{LOG_FILE}", "step*/rank*")


def read_frames(folder: Path, *, alone: bool = False) -> Iterator[Frame]:
    """Yield the frames of a run, those of each rank in the order of its steps.

    folder: a run's folder, a rank's folder, or one `records.jsonl` or metric CSV file. alone: whether further trainings in the
    folder are left out without a word. Raises FormatError when there is nothing to read.
    """
    if not folder.exists():
        raise FormatError(f"{folder} does not exist. {_where_runs_are(folder)}")
    for training in () if alone else trainings_in(folder):
        tell(f"{training} holds another training of this script, which is not looked at here: name that folder")
    logs = find_logs(folder)
    check_one_run(folder, logs)
    for log in logs:
        yield from frames_of_log(log)
    if logs:
        return
    steps = [step for step in find_steps(folder).values() if find_ranks(step)] if folder.is_dir() else []
    if steps:  # one without a rank was cut off before anything of it was whole
        yield from _frames_of_dumps(steps)
        return
    if not _holds_metrics(folder):
        other = read_scalar_log(folder)
        if other is not None:
            yield from other
            return
    if folder.is_dir() and next(files_of_run(folder, "*.csv"), None) is None:
        _refuse(folder)
    tables: dict[int, SeriesTable] = {}
    for step in read_metrics(folder):
        table = tables.setdefault(step.place.rank, SeriesTable())
        yield frame_of_records(step.step, step.place, step.records, table, parted=step.place.world_size > 1)


def _frames_of_dumps(steps: Iterable[Path]) -> Iterator[Frame]:
    tables: dict[int, SeriesTable] = {}
    for step_folder in steps:
        for rank, step_data in sorted(read_step(step_folder).items()):
            with damaged_as(f"the dump in {step_folder}"):
                table = tables.setdefault(rank, SeriesTable())
                yield frame_of_records(step_data.step, step_data.place, step_data.records(), table, step_data.complete)


def _refuse(folder: Path) -> NoReturn:
    """Say that a folder holds no run. Raises FormatError."""
    if _holds_black_box(folder):
        raise FormatError(
            f"{folder} holds no step that was written out, but what a process left that was ended: `trainprobe black-box "
            f"{folder}` reads it"
        )
    here = folder if folder != Path() else folder.absolute()
    raise FormatError(f"{here} holds no run: {LACKS}. {_where_runs_are(folder)}")


def _holds_metrics(folder: Path) -> bool:
    files = files_of_run(folder, "*.csv") if folder.is_dir() else [folder]
    return any(file.suffix == ".csv" and is_metric_file(file) for file in files)


def check_one_run(folder: Path, logs: Sequence[Path]) -> None:
    """Raise FormatError where a folder holds several runs, whose ranks would be taken for one."""
    ranks = [log if log.is_dir() else log.parent for log in logs]
    runs = sorted({rank.parent for rank in ranks})
    if len({rank.name for rank in ranks}) < len(ranks):
        names, listed = _named(runs, folder)
        raise FormatError(f"{folder} holds {len(runs)} runs: {names}. Name one of them ({listed})")


def _where_runs_are(folder: Path) -> str:
    """Name runs in a folder and beside it, and the command that lists them."""
    looked = next(above for above in (folder.absolute(), *folder.absolute().parents) if above.is_dir())
    for place in (looked, looked.parent):
        near = sorted({run for entry in islice(place.glob("*"), MOST_ENTRIES) for run in _runs_at(entry)})
        if near:
            names, listed = _named(near, place)
            return f"Runs in {place}: {names} ({listed})"
    return "Name the folder that a run wrote to (`output` of its plan); `trainprobe runs DIR` lists the runs under DIR"


def _named(runs: Sequence[Path], place: Path) -> tuple[str, str]:
    """Name the first runs in a folder, and the command that lists all."""
    names = ", ".join(str(run.relative_to(place)) for run in runs[:SHOWN]) + ", …" * (len(runs) > SHOWN)
    return names, f"`trainprobe runs {shlex.quote(str(place))}` lists them"


def _runs_at(folder: Path) -> Iterator[Path]:
    """Yield a folder, or those in it, that hold folders of ranks or steps."""
    if folder.is_dir() and not folder.name.startswith("."):
        own = any(True for pattern in _OF_RUNS for _ in folder.glob(pattern))
        inside = (path.relative_to(folder).parts[0] for pattern in _OF_RUNS for path in folder.glob(f"*/{pattern}"))
        yield from [folder] if own else {folder / name for name in inside}


def _holds_black_box(folder: Path) -> bool:
    from trainprobe.monitor.black_box.box import BOX_FILE, RING_FILE

    return any(next(folder.rglob(name), None) is not None for name in (BOX_FILE, RING_FILE))


def frames_of_log(log: Path) -> Iterator[Frame]:
    """Yield the frames of a log that `find_logs` returned."""
    if log.is_dir():
        from trainprobe.monitor.frames_of_run_log import RunLog

        with damaged_as(f"the run log in {log}"):
            yield from RunLog(log).frames()
        return
    table = SeriesTable()
    yield from read_lines(log, lambda line: frame_of_step(decode(line), table))


def steps_of_log(log: Path) -> list[tuple[int, Place]]:
    """Return the step and the place of each frame of a log that `find_logs` returned, in their order."""
    if log.is_dir():
        with damaged_as(f"the run log in {log}"):
            return _steps_of_columns(log)
    return [*read_lines(log, lambda line: (int((told := orjson.loads(line))["step"]), read_place(told["place"])))]


def _steps_of_columns(log: Path) -> list[tuple[int, Place]]:
    """Read the rows of kind `step` alone, which a compacted segment holds itself: no replica is read."""
    import pyarrow.parquet as pq

    from trainprobe.engine.storage.run_log.replicas import read_segment
    from trainprobe.engine.storage.run_log.segments import live_table

    chosen = pq.filters_to_expression([("kind", "==", "step")])
    tables = [read_segment(path, ["time", "step", "detail"], filters=chosen) for path in find_segments(log)]
    live = live_table(log)
    tables += [live.filter(chosen).select(["time", "step", "detail"])] if live is not None else []
    rows = [row for table in tables for row in table.sort_by("time").to_pylist()]
    return [(row["step"], read_place(orjson.loads(row["detail"])["place"])) for row in rows]


def find_logs(folder: Path) -> list[Path]:
    """Return the logs under a folder, by rank: a record log is a file, a run log in columns the folder that holds it.

    Where a rank has both, they hold the same, and the columns are read.
    """
    if folder.is_file():
        return [folder] if folder.suffix == ".jsonl" and not counts_steps(folder) else []
    names = (LOG_FILE, FULL_FILE, LIVE_FILE, "metrics-*.parquet")
    paths = [path for name in names for path in files_of_run(folder, name)]
    shown = [path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    ranks = sorted({path.parent for path in shown}, key=lambda rank: (len(rank.name), rank.name, str(rank)))
    logs = (rank if has_run_log(rank) else rank / LOG_FILE for rank in ranks)
    return [log for log in logs if log.exists()]
