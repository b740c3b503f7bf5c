"""Statistics as CSV: `rank{R}/metrics.csv` with one row a value and statistic, or `metrics-rank{R}-wide/` with one row a value.

The wide files have the names and columns that the metric files of the existing monitor have, one file a sort of value and
thousand steps; features have one of their own, and those of the existing monitor (`attention_hook`, `linear_hook` …) besides. A
step is appended as a whole. A recomputed forward is left out, so that nothing counts twice. `msprobe_csv.py` writes them as
scripts for that monitor expect them.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.core.records import Feature, Phase, Place, Record, Site, StepData
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.storage.dumps.append import AppendedFile, make_room
from trainprobe.engine.storage.dumps.layout import METRICS_FILE, log_folder
from trainprobe.engine.storage.safe_files import LARGEST_TEXT, open_to_read
from trainprobe.engine.storage.sheet_cells import defused

TIDY = ("step", "micro", "rank", "kind", "name", "call", "slot", "statistic", "value", "dtype", "shape", "phase")


class TidyCsv:
    """One row a value and statistic, columns `TIDY`. A file that an older version began goes on with the columns it has."""

    def __init__(self, path: Path) -> None:
        self._file = AppendedFile(path)
        self._width = len(_header_of(path)) or len(TIDY)

    def write(self, step_data: StepData) -> None:
        """Append the rows of one step."""
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        if self._file.size == 0:
            rows.writerow(TIDY)
        for record in step_data.records():
            if record.step.phase == "recompute":
                continue
            step, site = record.step, record.site
            head = (
                step.number,
                "" if step.micro is None else step.micro,
                record.place.rank,
                site.kind,
                defused(site.name),
                site.call,
                site.slot,
            )
            tail = (record.dtype, list(record.shape), step.phase)
            rows.writerows((*head, name, value, *tail)[: self._width] for name, value in record.values.items())
        self._file.write(text.getvalue().encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _header_of(path: Path) -> list[str]:
    with open_to_read(path) as lines:
        return next(csv.reader([lines.readline(LARGEST_TEXT).decode("utf-8", "replace")]), [])


class WideCsv:
    """One row a value; a file for each sort of value (`actv`, `actv_grad`, `grad_unreduced`, `param_origin`, `other` …).

    steps: how many a file holds.
    """

    per_micro = frozenset({"actv", "actv_grad", "feature", "other"})  # sorts with a column for the micro-batch
    left_out = frozenset[str]()
    unknown = ""  # stands where a statistic is not known

    def __init__(self, folder: Path, place: Place, steps: int) -> None:
        self._folder = folder
        self._steps = steps
        self._vpp, self._chunks = place.axes.get("vpp", (0, 1))
        self._files: dict[str, AppendedFile] = {}

    def write(self, step_data: StepData) -> None:
        """Append the rows of one step to the files they belong to. Rows of one name keep their first value in a micro-batch."""
        tables: dict[str, dict[tuple[str, int | None], Record]] = {}
        single = _single_slots(step_data)
        for record in step_data.records():
            if record.step.phase != "recompute" and record.values and record.site.slot != "fingerprint":
                sort, name = _sort_and_name(record.site, record.step.phase, single)
                tables.setdefault(sort, {}).setdefault((name, record.step.micro), record)
        for sort, rows in tables.items():
            if sort not in self.left_out:
                self._append(sort, step_data, rows)
        for sort, (columns, rows) in hook_tables(step_data.features).items():
            self._append_hooks(sort, step_data.step, columns, rows)

    def _file(self, sort: str, step: int) -> AppendedFile:
        first = step // self._steps * self._steps
        key = self._file_name(sort, first)
        file = self._files.get(key)
        if file is None:
            for old in [name for name in self._files if name.rpartition("_")[0] == sort]:
                self._files.pop(old).close()
            file = self._files[key] = AppendedFile(self._folder / key)
        return file

    def _file_name(self, sort: str, first: int) -> str:
        return f"{sort}_{first}-{first + self._steps - 1}.csv"

    def _append_hooks(self, sort: str, step: int, columns: Sequence[str], table: dict[tuple[str, int], list[float]]) -> None:
        file = self._file(sort, step)
        micro = "micro_step" in columns
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        if file.size == 0:
            rows.writerow(columns)
        for (name, index), numbers in table.items():
            rows.writerow([self._vpp, defused(name), step, *([index] if micro else []), *numbers])
        file.write(text.getvalue().encode())

    def _append(self, sort: str, step_data: StepData, table: dict[tuple[str, int | None], Record]) -> None:
        file = self._file(sort, step_data.step)
        micro = sort in self.per_micro
        statistics = ("value",) if sort in ("scalar", "feature") else step_data.statistics
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        if file.size == 0:
            columns = map(self._column, statistics)
            rows.writerow(["vpp_stage", "name", "step", *(["micro_step"] if micro else []), *columns, "shape", "dtype"])
        for (name, index), record in table.items():
            if not has_numbers(record, statistics):
                continue
            numbers = [self._number(record, statistic) for statistic in statistics]
            place = [self._vpp, defused(self._name(name)), step_data.step, *([index or 0] if micro else [])]
            rows.writerow([*place, *numbers, str(list(record.shape)), record.dtype])
        file.write(text.getvalue().encode())

    def _name(self, name: str) -> str:
        """Return what stands in the column of names."""
        return name

    def _column(self, statistic: str) -> str:
        """Return the name of the column of a statistic."""
        return statistic

    def _number(self, record: Record, statistic: str) -> Any:
        """Return what stands in that column."""
        return record.values.get(statistic, self.unknown)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def has_numbers(record: Record, statistics: Sequence[str]) -> bool:
    """Tell whether any of these statistics of a value is known, beside how many elements it has."""
    return any(name in record.values for name in statistics if name != "count" or len(statistics) == 1)


def _single_slots(step_data: StepData) -> set[tuple[str, str]]:
    """Return (module, "input" or "output") where a call has exactly one of them, which then has no number."""
    return {
        (call.name, side)
        for call in step_data.calls
        if call.kind == "module"
        for side, tree in (("input", call.args), ("output", call.out))
        if not isinstance(tree, list) or len(tree) == 1  # pyright: ignore[reportUnknownArgumentType]
    }


_STATES = {"value": "param_origin", "value_after": "param_updated"}
_SIDES = {"input": "input", "output": "output", "grad_output": "output", "grad_input": "input"}


def _sort_and_name(site: Site, phase: Phase, single: set[tuple[str, str]]) -> tuple[str, str]:
    first, _, rest = site.slot.partition(".")
    if site.kind == "parameter":
        if first == "grad":
            return ("grad_reduced" if phase == "optimizer" else "grad_unreduced"), site.name
        return _STATES.get(first, first), site.name
    if site.kind == "scalar":
        return "scalar", site.name
    if site.kind == "feature":
        return "feature", f"{site.name}.{site.slot}"
    if site.kind != "module":
        return "other", f"{site.name}.{site.call}.{site.slot}"
    if first == "parameters":
        return "param_origin", f"{site.name}.{rest}" if site.name else rest
    side = _SIDES.get(first)
    if side is None:
        return "other", f"{site.name}.{site.slot}"
    number = "" if not rest or (site.name, side) in single else f"_{rest}"
    return ("actv_grad" if first.startswith("grad") else "actv"), f"{site.name}.{side}{number}"


# feature → (file of the existing monitor, its column, last part of its row names, how its number comes from ours)
_HOOKS: dict[str, tuple[str, str, str, Callable[[npt.NDArray[np.float64]], float]]] = {
    "attention_entropy": ("attention_hook", "entropy", "attention", lambda x: float(x.mean())),
    "attention_peak": ("attention_hook", "softmax_max", "attention", lambda x: float(x.mean())),
    "stable_rank": ("linear_hook", "sr", "linear", lambda x: float(np.sqrt(x[0]))),
    "spectral_norm": ("linear_hook", "kernel_norm", "linear", lambda x: float(x[0])),
    "router_similarity": ("moe_router_weight_hook", "router_weight_similarity", "moe_router", lambda x: float(x[0])),
    "router_entropy": ("moe_router_logit_hook", "per_token_expert_entropy", "moe_router", lambda x: float(x[0])),
}
_PER_CALL = {"attention_hook", "moe_router_logit_hook"}
_Hooks = dict[str, tuple[list[str], dict[tuple[str, int], list[float]]]]


def hook_tables(features: Sequence[Feature]) -> _Hooks:
    """Return file → (columns, {(row name, micro-batch): numbers}) of the features that the existing monitor's files have too.

    Of attention these are means over the heads (its own monitor looks at one); sr is ‖W‖_F/σ, the root of the stable rank.
    """
    tables: _Hooks = {}
    for feature in features:
        if feature.slot not in _HOOKS:
            continue
        sort, _, last, number = _HOOKS[feature.slot]
        names = [hook[1] for hook in _HOOKS.values() if hook[0] == sort]
        head = ["vpp_stage", "name", "step", *(["micro_step"] if sort in _PER_CALL else [])]
        rows = tables.setdefault(sort, ([*head, *names], {}))[1]
        name = feature.name.removesuffix(".weight") if last == "linear" else feature.name
        row = rows.setdefault((f"{name}.{last}", feature.call), [float("nan")] * len(names))
        row[names.index(_HOOKS[feature.slot][1])] = number(feature.numbers)
    return tables


def open(folder: Path, plan: Plan, place: Place) -> TidyCsv | WideCsv:
    """Open the metric files of one rank. Raises OutputError when there are some already and the plan refuses that."""
    if plan.csv_layout == "wide":
        wide = folder / f"metrics-rank{place.rank}-wide"
        make_room(sorted(wide.glob("*.csv")), plan.on_existing)
        return WideCsv(wide, place, plan.csv_steps)
    path = log_folder(folder, place.rank) / METRICS_FILE
    make_room([path], plan.on_existing)
    return TidyCsv(path)
