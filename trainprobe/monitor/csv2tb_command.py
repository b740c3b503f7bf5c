"""`trainprobe csv2tb DIR`: metric CSV files, tidy or wide, become TensorBoard event files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trainprobe.engine.core.records import Record
from trainprobe.engine.storage.sinks.tensorboard import TensorboardSink, tag
from trainprobe.errors import FormatError
from trainprobe.monitor.metric_files import read_metrics

_LEFT_OUT = {"checksum", "crc32", "shape", "dtype"}


def csv2tb(
    folder: Annotated[Path, typer.Argument(help="folder with metric CSV files, or one file", metavar="DIR")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="by default DIR/tensorboard")] = None,
) -> int:
    """Write the metrics in DIR as event files, one folder a rank."""
    if not folder.exists():
        raise FormatError(f"{folder} does not exist: name the folder with the metric CSV files, or one file")
    target = output or (folder if folder.is_dir() else folder.parent) / "tensorboard"
    sinks: dict[int, TensorboardSink] = {}
    steps = 0
    for step in read_metrics(folder):
        rank = step.place.rank
        sink = sinks.get(rank) or sinks.setdefault(rank, TensorboardSink(target / f"rank{rank}"))
        write_step(sink, step.step, step.records)
        steps += 1
    for sink in sinks.values():
        sink.close()
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{steps} steps of {len(sinks)} ranks → {target}; see them with: tensorboard --logdir {target}", markup=False)
    return 0


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
