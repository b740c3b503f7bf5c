"""The row of a batch that carries a spike, where the feature `loss_rows` looked at the step."""

from __future__ import annotations

from dataclasses import replace

from trainprobe.engine.core.records import Finding, StepData

_FAR, _PART = 8.0, 0.2  # times the median of the rows, and what share of the loss above it: one row carries it


def with_row(finding: Finding, step_data: StepData) -> Finding:
    """Return a finding of the rule `spike` whose message ends with the row that has most of the loss; else as it is.

    No row is named where none stands out: then the batch as a whole, or something else, made the spike.
    """
    if finding.rule != "spike" or not (words := row_in_words(step_data)):
        return finding
    return replace(finding, message=f"{finding.message}; {words}")


def row_in_words(step_data: StepData) -> str:
    """Return "row 137 of 512 on rank 3 has 81 % of its loss …"; "" where no row stands out or the step has no such feature."""
    calls: dict[int, dict[str, float]] = {}
    for feature in step_data.features:
        if feature.slot.startswith("loss_row"):
            calls.setdefault(feature.call, {})[feature.slot] = float(feature.numbers[0])
    if not calls:
        return ""
    call, most = max(calls.items(), key=lambda pair: pair[1]["loss_row_loss"])
    loss, median, of = most["loss_row_loss"], most["loss_row_median"], most["loss_row_of"]
    above = loss / most["loss_row_share"] - of * median if most["loss_row_share"] else 0.0
    if of < 2 or not loss > _FAR * median or not loss - median > _PART * above:
        return ""
    part = f" in loss call {call}" if len(calls) > 1 else ""  # of the step, counted from 0
    return (
        f"row {most['loss_row']:.0f} of {of:.0f}{part} on rank {step_data.place.rank} has {most['loss_row_share']:.0%} of the "
        f"loss there and {most['loss_row_gradient']:.0%} of its gradient, {loss:.3g} where the median row has {median:.3g}"
    )
