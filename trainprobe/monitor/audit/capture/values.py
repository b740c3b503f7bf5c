"""Numbers of a value of a collected step, once the step has crossed to the host."""

from __future__ import annotations

from collections.abc import Sequence

from trainprobe.engine.core.records import StepData, Value
from trainprobe.engine.stats import finish
from trainprobe.engine.stats.checksum import joined


def checksum_of(step_data: StepData, value: Value) -> int:
    """Return the fingerprint of a value; 0 where none was taken."""
    return int(step_data.checksums[value.row]) if step_data.checksums is not None and value.row >= 0 else 0


def norm_of(step_data: StepData, value: Value) -> float:
    """Return the norm of a value; NaN where it was not looked at."""
    return _statistic(step_data, value, "norm") if value.row >= 0 else float("nan")


def mean_of(step_data: StepData, value: Value) -> float:
    """Return the mean of a value; NaN where it was not looked at."""
    return _statistic(step_data, value, "mean") if value.row >= 0 else float("nan")


def joined_of(step_data: StepData, values: Sequence[Value]) -> int:
    """Return one fingerprint of several values."""
    return joined([checksum_of(step_data, value) for value in values])


def _statistic(step_data: StepData, value: Value, name: str) -> float:
    return float(finish(step_data.partials[value.row : value.row + 1], (name,))[name][0])
