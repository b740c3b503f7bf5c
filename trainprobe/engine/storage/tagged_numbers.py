"""The numbers of a step under the names that viewers show: `gradients/layers.0.mlp.weight/grad/norm`, `scalars/loss`.

A second call of a module in the same step carries its number, `layers.0.mlp[1]`, and a later micro-batch `:micro1`. Forward
passes that activation checkpointing runs again are left out, so that nothing counts twice.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainprobe.engine.core.records import Record, StepData

_GROUPS = {
    **{"op": "ops", "parameter": "gradients", "collective": "collectives", "saved": "saved", "scalar": "scalars"},
    "feature": "features",
}


def numbers_of(step_data: StepData) -> Iterator[tuple[str, float]]:
    """Yield (tag, number) of each value and statistic of a step."""
    for record in step_data.records():
        if record.step.phase == "recompute":
            continue
        start = tag(record)
        for statistic, number in record.values.items():
            if statistic not in {"checksum", "crc32"}:
                yield start + ("" if statistic == "value" else f"/{statistic}"), float(number)


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
