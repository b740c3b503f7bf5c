"""The CSV files that the second monitor of mindstudio-probe (release 26.2) writes, for scripts that read them.

`rank_{R}/{module, weight_grad, optimizer, param or cc}_step{a}-{b}.csv`: vpp_stage, step, module_name, scope, micro_step (of
gradients, from 1), the statistics. A name has its slot behind it, as `layers.0.fc.output.0`; a module has a row for each
micro-batch, in their order.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

from trainprobe.engine.core.records import Place, Record, StepData
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.storage.dumps.append import AppendedFile, make_room
from trainprobe.engine.storage.sheet_cells import defused
from trainprobe.engine.storage.sinks.csv import WideCsv, has_numbers
from trainprobe.engine.storage.sinks.msprobe_csv import COLUMNS

_OF_PARAMETERS = {
    "value": ("param", "param_origin"),
    "value_after": ("param", "param_updated"),
    "grad": ("weight_grad", "reduced"),
    "grad_unreduced": ("weight_grad", "unreduced"),
    "exp_avg_after": ("optimizer", "exp_avg"),
    "exp_avg_sq_after": ("optimizer", "exp_avg_sq"),
}
_PER_MICRO = {"unreduced", "forward", "backward", "comm"}
_OF_MODULES = {"input": "forward", "output": "forward", "grad_input": "backward", "grad_output": "backward"}


class MsprobeSecondCsv(WideCsv):
    """Writes these files."""

    unknown = "nan"

    def write(self, step_data: StepData) -> None:
        """Append the rows of one step to the files they belong to."""
        tables: dict[str, dict[tuple[str, str, int], Record]] = {}
        for record in step_data.records():
            place = _place(record) if record.step.phase != "recompute" and record.values else None
            if place is not None:
                sort, name, scope = place
                micro = (record.step.micro or 0) if scope in _PER_MICRO else 0
                tables.setdefault(sort, {}).setdefault((name, scope, micro), record)
        for sort, rows in tables.items():
            self._append_rows(self._file(sort, step_data.step), sort, step_data, rows)

    def _file_name(self, sort: str, first: int) -> str:
        return f"{sort}_step{first}-{first + self._steps - 1}.csv"

    def _append_rows(
        self, file: AppendedFile, sort: str, step_data: StepData, table: dict[tuple[str, str, int], Record]
    ) -> None:
        micro = sort == "weight_grad"
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        if file.size == 0:
            columns = [COLUMNS.get(statistic, statistic) for statistic in step_data.statistics]
            rows.writerow(["vpp_stage", "step", "module_name", "scope", *(["micro_step"] if micro else []), *columns])
        for (name, scope, index), record in table.items():
            if not has_numbers(record, step_data.statistics):
                continue
            stage = self._vpp if self._chunks > 1 else -1
            numbers = [self._number(record, statistic) for statistic in step_data.statistics]
            rows.writerow([stage, step_data.step, defused(name), scope, *([index + 1] if micro else []), *numbers])
        file.write(text.getvalue().encode())


def _place(record: Record) -> tuple[str, str, str] | None:
    """Return the file, the name and the scope of a record, or None for one that these files do not have."""
    site = record.site
    if site.kind == "parameter" and site.slot in _OF_PARAMETERS:
        sort, scope = _OF_PARAMETERS[site.slot]
        return sort, f"{site.name}.{scope}" if sort == "optimizer" else site.name, scope
    first, _, rest = site.slot.partition(".")
    if site.kind == "module" and first in _OF_MODULES:
        name = "" if site.name == "root" else site.name
        return "module", f"{name}.{first}.{rest or 0}", _OF_MODULES[first]
    return ("cc", f"{site.name}.{site.call}.{site.slot}", "comm") if site.kind == "collective" else None


def open(folder: Path, plan: Plan, place: Place) -> MsprobeSecondCsv:
    """Open the files of one rank. Raises OutputError when there are some already and the plan refuses that."""
    own = folder / f"rank_{place.rank}"
    make_room(sorted(own.glob("*_step*.csv")), plan.on_existing)
    return MsprobeSecondCsv(own, place, plan.csv_steps)
