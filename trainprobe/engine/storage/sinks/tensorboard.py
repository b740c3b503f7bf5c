"""Statistics as TensorBoard event files: `tensorboard/rank{R}/events.out.tfevents.…`, one file a run, flushed each step.

Where the script's own trainer writes such files, they are in the folder `trainprobe/rank{R}` beside these.
Tags are those of `tagged_numbers`. Only tensorboard's record writer and messages are used, so that TensorFlow is not imported
where it happens to be installed.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from trainprobe.engine.core.records import Place, Record, Site, Step, StepData
from trainprobe.engine.core.step_data import slots
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.storage.safe_files import open_private
from trainprobe.engine.storage.script_logs import script_log
from trainprobe.engine.storage.tagged_numbers import numbers_of, tag
from trainprobe.errors import MissingExtra

_NUMBERS = count()  # of the files of this process: two may begin in one second


class TensorboardSink:
    """Writes one event a step, with one scalar a value and statistic and the histograms the collected step has."""

    def __init__(self, folder: Path) -> None:
        self._messages, self._event, record_writer = _load()
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        self._file = open_private(folder / name, "xb")
        self._records = record_writer.RecordWriter(self._file)
        self._write(self._event.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, step_data: StepData) -> None:
        """Append one event with all values of a step."""
        value = self._messages.Summary.Value
        values = [value(tag=name, simple_value=number) for name, number in numbers_of(step_data)]
        for name, histogram in _histograms(step_data):
            values.append(value(tag=name, histo=self._histogram(*histogram)))
        summary = self._messages.Summary(value=values)
        self._write(self._event.Event(wall_time=time.time(), step=step_data.step, summary=summary))

    def _histogram(self, edges: Sequence[float], counts: Sequence[float]) -> Any:
        middles = [(a + b) / 2 for a, b in pairwise(edges)]
        return self._messages.HistogramProto(
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=sum(m * n for m, n in zip(middles, counts, strict=True)),
            sum_squares=sum(m * m * n for m, n in zip(middles, counts, strict=True)),
            bucket_limit=list(edges[1:]),
            bucket=list(counts),
        )

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _histograms(step_data: StepData) -> Iterator[tuple[str, tuple[Sequence[float], Sequence[float]]]]:
    """Yield (tag, (edges, counts)) where the step has a histogram of the value, and of features that are counts per bin."""
    for feature in step_data.features:
        if feature.edges is not None:
            site = Site("feature", feature.name, feature.slot, feature.call)
            record = Record(Step(step_data.step, feature.micro), step_data.place, site, "float64", (), {})
            yield tag(record), (feature.edges.tolist(), feature.numbers.tolist())
    if not step_data.histograms:
        return
    rows = [value.row for call in step_data.calls for _, value in slots(call)]
    for row, record in zip(rows, step_data.records(), strict=False):
        if row in step_data.histograms and record.step.phase != "recompute":
            edges, counts = step_data.histograms[row]
            yield f"{tag(record)}/histogram", ([float(x) for x in edges], [float(n) for n in counts])


def _load() -> tuple[Any, Any, Any]:
    try:
        messages = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        event = importlib.import_module("tensorboard.compat.proto.event_pb2")
        return messages, event, importlib.import_module("tensorboard.summary.writer.record_writer")
    except ImportError:
        raise MissingExtra("tensorboard", "tensorboard", "the sink 'tensorboard'") from None


def open(folder: Path, plan: Plan, place: Place) -> TensorboardSink:
    """Open a new event file of one rank. Raises MissingExtra without tensorboard."""
    theirs = script_log("tensorboard", plan)  # a folder in it, as TensorBoard may read the newest file of a folder alone
    above = folder / "tensorboard" if theirs is None else Path(theirs) / "trainprobe"
    return TensorboardSink(above / f"rank{place.rank}")
