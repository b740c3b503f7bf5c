"""The tensors of dump files by the words of a user: a folder and a pattern, or `FILE[:input.0]`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy.typing as npt

from trainprobe.engine.arrays.numpy_rows import NumpyStatsRows
from trainprobe.engine.core.records import Value
from trainprobe.engine.core.step_data import StoredStepData, numbers_of_rows, slots
from trainprobe.engine.stats import finish
from trainprobe.engine.stats.partials import STATS
from trainprobe.engine.storage.dumps.layout import find_dumps
from trainprobe.engine.storage.kernel_dumps.file_names import parse_name
from trainprobe.engine.storage.kernel_dumps.read import WANTED, read_kernels
from trainprobe.engine.storage.kernel_dumps.store import KernelStore
from trainprobe.engine.storage.npy_files import map_npy
from trainprobe.errors import FormatError, UsageError

_PART = re.compile(r"(.+):(input|output)\.(\d{1,4})")


def dump_steps(path: Path) -> Iterator[tuple[Path, StoredStepData]]:
    """Yield each step and rank of the kernel dumps at a path. Raises FormatError where there is none."""
    if path.is_file():
        yield path, read_kernels(path)
        return
    folders = [folder for ranks in find_dumps(path).values() for folder in ranks.values()]
    if not folders:
        raise FormatError(
            f"no kernel dump at {path}: expected files such as MatMul.name.task.stream.timestamp or statistic.csv"
        )
    for folder in folders:
        yield folder, read_kernels(folder)


def rows_of(step_data: StoredStepData, pattern: str) -> Iterator[tuple[str, str, Value, Mapping[str, float]]]:
    """Yield (call, slot, value, statistics) of the calls whose name, module or operator name a pattern fits."""
    columns = numbers_of_rows(step_data)
    for call in step_data.calls:
        module = call.parent if isinstance(call.parent, str) else call.parent.name if call.parent is not None else ""
        for slot, value in slots(call):
            names = f"{call.name}.{call.call}", module, str((value.extra or {}).get("op_name", ""))
            if any(fnmatchcase(name.lower(), pattern.lower()) for name in names):
                told = {name: column[value.row] for name, column in columns.items() if value.row >= 0}
                where = f"{names[0]}{f' in {module}' if module else ''}"
                yield where, slot, value, {name: number for name, number in told.items() if number is not None}


def named_tensor(words: str) -> tuple[npt.NDArray[Any], str, str]:
    """Return (elements, dtype, name) of `FILE` or `FILE:input.0`, where FILE is a dump file, an .npy or a .bin.

    Raises FormatError for a file that cannot be read, UsageError where it holds several tensors and none is named.
    """
    m = _PART.fullmatch(words)
    path, part = (Path(m[1]), f"{m[2]}.{m[3]}") if m and not Path(words).exists() else (Path(words), "")
    if not path.is_file():
        raise FormatError(f"there is no file {path}")
    if parse_name(path) is None:
        return _plain_file(path)
    store = KernelStore(path)
    tensors = store.tensors()
    if store.unread:
        raise FormatError(store.unread[0])
    if len(tensors) > 1 and not part:
        raise UsageError(
            f"{path} holds {', '.join(key.rpartition('#')[2] for key in tensors)}: name one, as in {path}:output.0"
        )
    key = next((key for key, told in tensors.items() if not part or f"{told.io}.{told.slot}" == part), None)
    if key is None:
        raise UsageError(f"{path} has no {part}")
    return store.array(key), tensors[key].dtype, key


def _plain_file(path: Path) -> tuple[npt.NDArray[Any], str, str]:
    if path.suffix != ".npy":
        raise FormatError(f"{path} is neither a dump file of a kernel (op_type.op_name.task.stream.timestamp) nor an .npy file")
    array = map_npy(path)
    if array.dtype.kind not in "biufc":
        raise FormatError(f"{path} holds elements of {array.dtype}, which are no numbers")
    return array, array.dtype.name, path.name


def statistics_of(array: npt.NDArray[Any]) -> Mapping[str, float]:
    """Return the statistics of an array by name."""
    rows = NumpyStatsRows(STATS)
    if rows.add(array, array.dtype.name) < 0:
        return {}
    return {name: float(column[0]) for name, column in finish(rows.drain()[0], WANTED).items()}


def undone_format(array: npt.NDArray[Any], form: str, original: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return a tensor that lies as the device's cube unit wants it, `FRACTAL_NZ` or `NC1HWC0`, in the shape of the program.

    Raises FormatError for another format, or where the shapes do not fit.
    """
    if form == "FRACTAL_NZ" and array.ndim >= 4 and len(original) == array.ndim - 2:
        *batch, n1, m1, m0, n0 = array.shape
        axes = [*range(len(batch)), *(len(batch) + i for i in (1, 2, 0, 3))]
        whole = array.transpose(axes).reshape(*batch, m1 * m0, n1 * n0)
    elif form == "NC1HWC0" and array.ndim == 5 and len(original) == 4:
        n, c1, h, w, c0 = array.shape
        whole = array.transpose(0, 1, 4, 2, 3).reshape(n, c1 * c0, h, w)
    else:
        raise FormatError(f"a tensor {list(array.shape)} in format {form or 'unknown'} is not turned into {list(original)}")
    if any(small > large for small, large in zip(original, whole.shape, strict=True)):
        raise FormatError(f"a tensor {list(array.shape)} in format {form} has no room for {list(original)}")
    return whole[tuple(slice(0, n) for n in original)]


def shown(numbers: Mapping[str, float]) -> str:
    """Return statistics as one line."""
    counts = [
        f"{name} {int(numbers[name])}" for name in ("nan", "inf") if numbers.get(name, 0) and math.isfinite(numbers[name])
    ]
    extremes = [f"{name} {numbers[name]:.6g}" for name in ("max", "min", "mean", "norm") if name in numbers]
    return ", ".join([*extremes, *counts]) or "no statistics"
