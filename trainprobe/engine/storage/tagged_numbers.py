"""The numbers of a step under the names that viewers show: `gradients/layers.0.mlp.weight/grad/norm`, `scalars/loss`.

A second call of a module in the same step carries its number, `layers.0.mlp[1]`, and a later micro-batch `:micro1`. Forward
passes that activation checkpointing runs again are left out, so that nothing counts twice.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainprobe.engine.core.records import Record, StepData
from trainprobe.engine.core.step_data import numbers_of_rows, slots
from trainprobe.engine.core.step_layout import layout_of

_GROUPS = {
    **{"op": "ops", "parameter": "gradients", "collective": "collectives", "saved": "saved", "scalar": "scalars"},
    "feature": "features",
}
_NO_SERIES = {"checksum", "crc32"}


def numbers_of(step_data: StepData) -> Iterator[tuple[str, float]]:
    """Yield (tag, number) of each value and statistic of a step. Tags are made once for the steps that share a layout."""
    tags, singles = layout_of(step_data).derived(numbers_of, lambda: _tags(step_data))
    columns = [(f"/{name}", column) for name, column in numbers_of_rows(step_data).items() if name not in _NO_SERIES]
    for start, row in tags:
        for statistic, column in columns:
            if (number := column[row]) is not None:
                yield start + statistic, float(number)
    of_features = (number for feature in step_data.features for _, number in feature.each())
    yield from zip(singles, (*of_features, *map(float, step_data.scalars.values())), strict=True)


def _tags(step_data: StepData) -> tuple[list[tuple[str, int]], list[str]]:
    """Return (tag, row) of the values, and the tags of features and scalars, in the order of the records."""
    rows = [value.row for call in step_data.calls for _, value in slots(call)]
    records = list(step_data.records())
    values = [
        (tag(record), row) for record, row in zip(records, rows, strict=False) if row >= 0 and record.step.phase != "recompute"
    ]
    return values, [tag(record) for record in records[len(rows) :] if "checksum" not in record.values]


def tag(record: Record) -> str:
    """Return the tag of a record, without the statistic."""
    site = record.site
    if site.kind == "scalar":
        return f"scalars/{site.name}"
    name = site.name + (f"[{site.call}]" if site.call else "") + (f":micro{record.step.micro}" if record.step.micro else "")
    return f"{_group(record)}/{name}/{site.slot}"


def _group(record: Record) -> str:
    if record.site.kind == "parameter" and not record.site.slot.startswith("grad"):
        return "parameters" if "value" in record.site.slot else "optimizer"
    if record.site.kind != "module":
        return _GROUPS[record.site.kind]
    if record.site.slot.startswith("parameters."):
        return "parameters"
    return "gradients" if record.step.phase == "backward" else "activations"
