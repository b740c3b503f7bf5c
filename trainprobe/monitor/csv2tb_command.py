"""`trainprobe csv2tb RUN`: metric CSV files, tidy or wide, become TensorBoard event files."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trainprobe.engine.core.records import Record
from trainprobe.engine.core.words import counted
from trainprobe.engine.storage.sinks.tensorboard import TensorboardSink
from trainprobe.engine.storage.step_counts import shortfall
from trainprobe.engine.storage.tagged_numbers import tag
from trainprobe.engine.storage.writer import flush_all
from trainprobe.errors import FormatError, UsageError
from trainprobe.monitor.metric_files import read_metrics

_LEFT_OUT = {"checksum", "crc32", "shape", "dtype"}


def csv2tb(
    folder: Annotated[Path, typer.Argument(help="folder with metric CSV files, or one file", metavar="RUN")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="by default RUN/tensorboard")] = None,
) -> int:
    """Write the metrics in RUN as event files, one folder per rank.

    Exit code: 0, or 3 there are no metrics, or the files lack steps of their run; those that are there are written.
    """
    if not folder.exists():
        raise FormatError(f"{folder} does not exist: name the folder with the metric CSV files, or one file")
    target = output or (folder if folder.is_dir() else folder.parent) / "tensorboard"
    written = _write([folder], target)
    steps, ranks = written.total(), len(written)
    console = Console(highlight=False, soft_wrap=True)
    short = shortfall(folder, written, sink="csv")
    if short:
        console.print(f"{short}: the event files have no others", markup=False)
    console.print(
        f"{counted(steps, 'step')} of {counted(ranks, 'rank')} → {target}; see them with: tensorboard --logdir {target}",
        markup=False,
    )
    return 3 if short else 0


def csv2tensorboard_by_step(
    monitor_path: str,
    time_start: str,
    time_end: str,
    process_num: int = 1,
    data_type_list: Sequence[str] | None = None,
    output_dirpath: str | None = None,
) -> None:
    """Write the CSV files of the runs that began between two times as event files (the call of mindstudio-probe).

    monitor_path: the folder that holds folders such as `Dec03_21-34-40-rank0-1a2b3c4d`. time_start, time_end: as
    "Dec03_21-34-40"; both belong to the range. process_num: not used. data_type_list: the beginnings of the names of the
    files, such as "param_origin"; by default all. output_dirpath: by default `tensorboard` in `monitor_path`.
    Raises UsageError for a time that is none, and FormatError where nothing was found.
    """
    first, last = (_moment(text) for text in (time_start, time_end))
    flush_all()  # the monitor of this process may be at work on its files
    root = Path(monitor_path).expanduser()
    folders = [path for path in sorted(root.glob("*-rank*")) if first <= _moment(path.name.partition("-rank")[0]) <= last]
    files = [file for folder in folders for file in sorted(folder.glob("*.csv"))]
    types = None if data_type_list is None else set(data_type_list)
    files = [file for file in files if types is None or file.name.rpartition("_")[0] in types]
    if not files:
        raise FormatError(f"{root}: no CSV file of a monitor that began between {time_start} and {time_end}")
    _write(files, Path(output_dirpath) if output_dirpath is not None else root / "tensorboard")


def _moment(text: str) -> time.struct_time:
    """Read a time as the monitor writes it; the year is not in it."""
    try:
        return time.strptime(f"2000 {text}", "%Y %b%d_%H-%M-%S")
    except ValueError:
        raise UsageError(f"{text!r} is not a time: write it as Dec03_21-34-40") from None


def _write(sources: Sequence[Path], target: Path) -> Counter[int]:
    """Write the metrics of files and folders; return the number of steps of each rank."""
    sinks: dict[int, TensorboardSink] = {}
    steps: set[tuple[int, int]] = set()
    for source in sources:
        for step in read_metrics(source):
            rank = step.place.rank
            sink = sinks.get(rank) or sinks.setdefault(rank, TensorboardSink(target / f"rank{rank}"))
            write_step(sink, step.step, step.records)
            steps.add((rank, step.step))
    for sink in sinks.values():
        sink.close()
    return Counter(rank for rank, _ in steps)


def write_step(sink: TensorboardSink, step: int, records: Sequence[Record]) -> None:
    """Write all numbers of one step as one event."""
    make = sink._messages.Summary.Value
    values = [
        make(tag=tag(record) + ("" if statistic == "value" else f"/{statistic}"), simple_value=float(number))
        for record in records
        for statistic, number in record.values.items()
        if statistic not in _LEFT_OUT
    ]
    sink._write(sink._event.Event(wall_time=time.time(), step=step, summary=sink._messages.Summary(value=values)))
