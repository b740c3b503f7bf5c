"""TensorBoard event files, through TensorBoard's own reader: the scalars of each folder that holds some.

A run that was resumed with `purge_step` replaces what was written behind that step. Folders under a run's folder, as
`SummaryWriter.add_scalars` makes them, belong to the run: the name of the folder stands before the name of the scalar.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from trainprobe.engine.storage.left_out import DAMAGED, leave_out, tell
from trainprobe.engine.storage.safe_files import regular
from trainprobe.errors import MissingExtra

WHAT = "TensorBoard event files"
_PATTERN = "*tfevents*"
_AROUND = 16  # bytes of a record's length and checksums


def find(path: Path) -> list[list[Path]]:
    """Return the event files of each run under a folder, or the one that is named."""
    if path.is_file():
        return [[path]] if path.match(_PATTERN) else []
    files = sorted(file for file in path.rglob(_PATTERN) if file.is_file())
    folders = {file.parent for file in files}
    runs = sorted(folder for folder in folders if folders.isdisjoint(folder.parents))
    return [[file for file in files if run in file.parents] for run in runs]


def read(files: list[Path]) -> Iterator[tuple[int, str, float]]:
    """Yield (step, name, number) of the files of one run. Raises MissingExtra without TensorBoard."""
    home = min((file.parent for file in files), key=lambda folder: len(folder.parts))
    for folder in sorted({file.parent for file in files}):
        above = "" if folder == home else f"{folder.relative_to(home).as_posix()}/"
        kept: list[tuple[int, str, float]] = []
        for file in files:
            if file.parent == folder:
                _read_file(file, kept)
        for step, name, number in kept:
            yield step, above + name, number


def _read_file(file: Path, kept: list[tuple[int, str, float]]) -> None:
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

        proto: Any = import_module("tensorboard.compat.proto.event_pb2")
    except ImportError as error:
        raise MissingExtra("tensorboard", "tensorboard", f"reading {file}") from error
    whole = 0  # bytes of the records that were read
    try:
        for text in RawEventFileLoader(str(regular(file))).Load():
            whole += _AROUND + len(text)
            event = proto.Event.FromString(text)
            if event.HasField("session_log") and event.session_log.status == proto.SessionLog.START:
                kept[:] = [told for told in kept if told[0] < event.step]
            numbers = ((value.tag, _number(value)) for value in event.summary.value)
            kept += ((event.step, tag, number) for tag, number in numbers if number is not None)
    except (*DAMAGED, DecodeError) as error:
        leave_out(f"{file} is damaged, and what is behind its damage is left out ({type(error).__name__}: {error!s:.200})")
    else:
        if (size := file.stat().st_size) > whole:  # the reader ends at what it cannot read, as if the file did
            tell(f"{file}: its last {size - whole} bytes are left out: they are damaged, or the run was killed or goes on")


def _number(value: Any) -> float | None:
    """Return the number of a scalar, as `tf.summary.scalar` and as PyTorch write it; None for anything else."""
    if value.WhichOneof("value") == "simple_value":
        return value.simple_value
    if value.WhichOneof("value") != "tensor" or value.tensor.tensor_shape.dim:
        return None
    from tensorboard.util.tensor_util import make_ndarray

    array = make_ndarray(value.tensor)
    return float(array) if array.dtype.kind in "fiu" else None
