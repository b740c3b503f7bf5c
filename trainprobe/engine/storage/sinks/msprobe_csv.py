"""The CSV files that the monitor of mindstudio-probe writes, for scripts that read them.

`{time}-rank{R}-{8 hex digits}/{sort}_{a}-{b}.csv`, new folders for each run: vpp_stage, name, step, micro_step (of
activations, and of gradients before their reduction where each micro-batch has its own), the statistics, shape, dtype. `nans`
is a count and `zeros` the share of elements that are zero. Numbers are written in full. As there, exp_avg and exp_avg_sq are
those before the step, and the model itself has an empty name.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from trainprobe.engine.core.records import Place, Record
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.storage.sinks.csv import WideCsv

COLUMNS = {"nan": "nans", "zero": "zeros"}


class MsprobeCsv(WideCsv):
    """Writes these files."""

    left_out = frozenset({"scalar", "feature"})  # that monitor has none, and files of its own for some features
    unknown = "nan"

    def __init__(self, folder: Path, place: Place, steps: int, per_micro: bool) -> None:
        super().__init__(folder, place, steps)
        self.per_micro = frozenset({"actv", "actv_grad", *(["grad_unreduced"] if per_micro else [])})

    def _name(self, name: str) -> str:
        return name.removeprefix("root") if name.startswith("root.") else name

    def _column(self, statistic: str) -> str:
        return COLUMNS.get(statistic, statistic)

    def _number(self, record: Record, statistic: str) -> Any:
        if statistic == "zero":
            return zero_share(record)
        return super()._number(record, statistic)


def zero_share(record: Record) -> float:
    """Return the share of the elements of a value that are zero; NaN where it has none or they were not counted."""
    count = math.prod(record.shape)
    return record.values.get("zero", math.nan) / count if count else math.nan


def per_micro(plan: Plan) -> bool:
    """Tell whether gradients before their reduction are recorded for each micro-batch."""
    monitor = plan.monitor_settings
    gradients = monitor.get("gradients")
    return isinstance(gradients, Mapping) and bool(cast("Mapping[str, Any]", gradients).get("per_micro"))


def open(folder: Path, plan: Plan, place: Place) -> MsprobeCsv:
    """Open the files of one rank, in a folder that did not exist."""
    own = folder / f"{time.strftime('%b%d_%H-%M-%S')}-rank{place.rank}-{secrets.token_hex(4)}"
    return MsprobeCsv(own, place, plan.csv_steps, per_micro(plan))
