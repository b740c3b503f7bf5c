"""A kernel dump as a collected step: each kernel that ran is a call, its tensors are values with statistics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.arrays.numpy_rows import NumpyStatsRows
from trainprobe.engine.core.records import Call, Phase, Place, Value
from trainprobe.engine.core.step_data import StoredStepData
from trainprobe.engine.stats.partials import PARTIALS, STATS, finish
from trainprobe.engine.storage.kernel_dumps.file_names import STATISTICS_FILE
from trainprobe.engine.storage.kernel_dumps.graph_names import (
    GraphNames,
    flatten,
    frames_of,
    is_gradient,
    module_of,
    read_graph_names,
)
from trainprobe.engine.storage.kernel_dumps.layout import graphs_of, place_of, rank_folder
from trainprobe.engine.storage.kernel_dumps.overflow import Overflow, read_overflows
from trainprobe.engine.storage.kernel_dumps.statistics import StatisticRow, read_statistics
from trainprobe.engine.storage.kernel_dumps.store import KernelStore, StoredTensor
from trainprobe.errors import FormatError

KERNEL_LEVEL = "kernel"  # `StepData.level` of what is read here
WANTED = ("max", "min", "mean", "norm", "nan", "inf", "zero", "count")
PARAMETER = "Parameter"  # the op type that MindSpore gives to what the graph holds and is given
_MOST_NOTES = 20
_Key = tuple[str, str, int, int, Path]  # op type, op name, task, stream, folder of the graph


class _Rows:
    """Collects the values of the step, with one row of statistics each, reduced from a tensor or read from a file."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self._rows = NumpyStatsRows(STATS)
        self._from_files: dict[int, Mapping[str, float]] = {}
        self._reduced: dict[int, int] = {}  # row → row of its partials

    def reduced(self, array: npt.NDArray[Any], tensor: StoredTensor, extra: Mapping[str, Any]) -> Value:
        row = self._rows.add(array, tensor.dtype if array.dtype.kind in "uV" else array.dtype.name)
        note = None if row >= 0 else f"{tensor.dtype} has no statistics"
        if row >= 0:
            self._reduced[len(self._reduced) + len(self._from_files)] = row
        at = len(self._reduced) + len(self._from_files) - 1 if row >= 0 else -1
        return self._add(at, tensor.dtype, tuple(array.shape), note, tensor.key, extra)

    def from_file(self, row: StatisticRow, extra: Mapping[str, Any]) -> Value:
        at = len(self._reduced) + len(self._from_files)
        self._from_files[at] = row.numbers
        return self._add(at, row.dtype, row.shape, None, None, extra)

    def without(self, tensor: StoredTensor, why: str, extra: Mapping[str, Any]) -> Value:
        return self._add(-1, tensor.dtype, tensor.shape or (), why, None, extra)

    def _add(self, row: int, dtype: str, shape: tuple[int, ...], note: str | None, key: str | None, extra: Any) -> Value:
        value = Value(row, dtype, shape, type="kernel", device="npu", note=note, tensor=key, extra=extra)
        self.values.append(value)
        return value

    def columns(self) -> tuple[dict[str, npt.NDArray[np.float64]], dict[str, npt.NDArray[np.bool_]], npt.NDArray[np.float64]]:
        """Return statistic → [rows], where it is absent, and (unknown) partials of all rows."""
        partials, _, _ = self._rows.drain()
        numbers = finish(partials, WANTED)
        rows = len(self._reduced) + len(self._from_files)
        finished = {name: np.full(rows, np.nan) for name in WANTED}
        absent = {name: np.ones(rows, bool) for name in WANTED}
        for name in WANTED:
            for row, at in self._reduced.items():
                finished[name][row], absent[name][row] = numbers[name][at], False
            for row, numbers_of_row in self._from_files.items():
                if name in numbers_of_row:
                    finished[name][row], absent[name][row] = numbers_of_row[name], False
        return finished, absent, np.full((rows, len(PARTIALS)), np.nan)


def read_kernels(path: Path) -> StoredStepData:
    """Read the kernel dump of one step and rank. path: a folder of `find_kernels`, or one dump file.

    A call is one kernel that ran, of kind "op" with the name `Kernel.{op type}`, or `Kernel.Gradients.{op type}` where it
    belongs to the backward pass; its parent is the module that launched it, where the dump says so: a call without values, in
    front of its first kernel. Calls are in the order in which they ran. Raises MissingExtra where raw files need protobuf,
    FormatError where nothing can be read.
    """
    store = KernelStore(path)
    tensors = store.tensors()
    notes = list(store.unread)
    names = read_graph_names(rank_folder(path))
    rows, runs = _Rows(), _Runs()
    for tensor in tensors.values():
        extra = _extra(tensor)
        try:
            value = rows.reduced(store.stored(tensor), tensor, extra)
        except FormatError as error:
            value = rows.without(tensor, str(error), extra)
            notes.append(str(error))
        file = tensor.file
        runs.add((file.op_type, file.op_name, file.task, file.stream or 0, file.path.parent), file.time, tensor, value)
    for folder, row in _statistics(path, notes):
        key = row.op_type, row.op_name, row.task, row.stream, folder
        if not runs.has(key, row.io, row.slot):
            runs.add(key, row.time, row, rows.from_file(row, {"op_name": row.op_name, **({"md5": row.md5} if row.md5 else {})}))
    calls, stacks = runs.calls(names)
    if not calls and not store.files:
        raise FormatError(f"no kernel dump at {path}")
    if not calls and notes:
        raise FormatError(notes[0])
    step, rank = place_of(path.parent if path.is_file() else path)
    finished, absent, partials = rows.columns()
    more = [f"{len(notes) - _MOST_NOTES} more files or tensors could not be read"] if len(notes) > _MOST_NOTES else []
    return StoredStepData(
        step=step,
        place=Place(rank),
        framework="mindspore" if rank_folder(path) else "npu",
        level=KERNEL_LEVEL,
        task="tensor" if tensors else "statistics",
        calls=calls,
        values=rows.values,
        partials=partials,
        statistics=WANTED,
        stacks=stacks,
        notes=(*notes[:_MOST_NOTES], *more),
        finished=finished,
        absent=absent,
    )


def overflows_of(path: Path) -> list[tuple[Overflow, list[str]]]:
    """Return the overflows that the device reported for a step, each with the kernels of its task and stream in the dump."""
    store = KernelStore(path)
    ran: dict[tuple[int, int], dict[str, None]] = defaultdict(dict)
    for file in store.files.values():
        if file.kind != "overflow":
            ran[file.stream or 0, file.task][f"{file.op_type} {file.op_name}"] = None
    found: list[tuple[Overflow, list[str]]] = []
    for file in store.files.values():
        if file.kind == "overflow":
            found += [(overflow, [*ran[overflow.stream, overflow.task]]) for overflow in read_overflows(file)]
    return found


def _statistics(path: Path, notes: list[str]) -> Iterable[tuple[Path, StatisticRow]]:
    for folder in graphs_of(path) if path.is_dir() else ():
        if (folder / STATISTICS_FILE).is_file():
            try:
                yield from ((folder, row) for row in read_statistics(folder / STATISTICS_FILE))
            except FormatError as error:
                notes.append(str(error))


def _extra(tensor: StoredTensor) -> dict[str, Any]:
    described = {
        "op_name": tensor.op_name or tensor.file.op_name,
        "format": tensor.format,
        "original_shape": list(tensor.original_shape),
        "original_op": tensor.original_op,
    }
    return {name: about for name, about in described.items() if about}


class _Runs:
    """Sorts values into the runs of kernels: the n-th value of a slot belongs to the n-th run of its kernel."""

    def __init__(self) -> None:
        self._seen: dict[_Key, dict[tuple[str, int], list[tuple[int, Any, Value]]]] = defaultdict(lambda: defaultdict(list))

    def add(self, key: _Key, time: int, about: StoredTensor | StatisticRow, value: Value) -> None:
        self._seen[key][about.io, about.slot].append((time, about, value))

    def has(self, key: _Key, io: str, slot: int) -> bool:
        return key in self._seen and (io, slot) in self._seen[key]

    def calls(self, names: GraphNames) -> tuple[list[Call], list[list[str]]]:
        """Return the calls in the order in which they ran, and their stacks.

        That of the graph, where MindSpore wrote it and each kernel ran once: kernels that run at the same time have time stamps
        in any order. Else that of the time stamps.
        """
        runs: list[tuple[int, _Key, dict[tuple[str, int], Value]]] = []
        for key, values in self._seen.items():
            for each in values.values():
                each.sort(key=lambda entry: entry[0])
            for n in range(max(map(len, values.values()))):
                here = {slot: entries[n] for slot, entries in values.items() if n < len(entries)}
                time = min(time for time, _, _ in here.values())
                runs.append((time, key, {slot: value for slot, (_, _, value) in here.items()}))
        places = {key: names.order.get(names.whole.get(flatten(key[1]), ""), -1) for key in self._seen if key[0] != PARAMETER}
        in_graph_order = len(runs) == len(self._seen) and min(places.values(), default=-1) >= 0
        last = len(names.order)
        runs.sort(key=lambda run: (places.get(run[1], last) if in_graph_order else 0, run[0], run[1][:4]))
        modules: dict[tuple[Phase, str], Call] = {}
        stacks: dict[tuple[str, ...], int] = {}
        ran: dict[str, int] = defaultdict(int)
        calls: list[Call] = []
        for run in runs:
            before = len(modules)
            call = self._call(run, names, modules, stacks, ran)
            calls += [*[*modules.values()][before:], call]  # modules that launch their first kernel here
        return calls, [list(frames) for frames in stacks]

    @staticmethod
    def _call(
        run: tuple[int, _Key, dict[tuple[str, int], Value]],
        names: GraphNames,
        modules: dict[tuple[Phase, str], Call],
        stacks: dict[tuple[str, ...], int],
        ran: dict[str, int],
    ) -> Call:
        _, (op_type, op_name, *_), values = run
        if op_type == PARAMETER:  # what the graph holds and is given, written when the iteration has ended
            call = Call("state", names.parameters.get(op_name, op_name), 0, "optimizer")
            call.params = {"value_after": values["output", 0]} if ("output", 0) in values else None
            return call
        told = next(
            (str(value.extra["op_name"]) for value in values.values() if value.extra and value.extra.get("op_name")), op_name
        )
        whole = told if "/" in told else names.whole.get(flatten(told), told)
        name = f"Kernel.Gradients.{op_type}" if is_gradient(whole) else f"Kernel.{op_type}"
        parent = module_of(whole, modules)
        call = Call("op", name, ran[name], "optimizer" if parent == "optimizer" else "forward", parent=parent)
        ran[name] += 1
        frames = tuple(frames_of(names.lines.get(whole, [])))
        if frames:
            call.stack = stacks.setdefault(frames, len(stacks))
        for io in ("input", "output"):
            slots = sorted(slot for side, slot in values if side == io)
            tree = [values.get((io, slot)) for slot in range(slots[-1] + 1)] if slots else None
            if io == "input":
                call.args = tree
            else:
                call.out = tree
        return call
