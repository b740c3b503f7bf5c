"""Divides the scaled gradients of a step by the loss scale, and records the scale with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainprobe.engine.core.records import Call, StepData, Value
from trainprobe.engine.stats import finish
from trainprobe.engine.stats.partials import F64, PARTIALS, POWERS

Scaled = tuple[Call, str, float | Value]  # a call of kind "state", one of its slots, and what its numbers were multiplied by


def divided(partials: F64, scale: F64) -> F64:
    """Return the partials, [rows, len(PARTIALS)], of the same tensors divided by scale, [rows]; counts stay what they are.

    Exact for powers of two, which loss scales are, as long as no float64 leaves its range.
    """
    out = partials.copy()
    for name, power in POWERS.items():
        at = PARTIALS.index(name)
        out[:, at] = partials[:, at] / scale**power
    return out


def unscale(step_data: StepData, scaled: Sequence[Scaled]) -> None:
    """Divide the numbers of these places of a collected step; `extra` of their values then holds "scale".

    Each gets a row of its own, because others may have seen the same tensor as it is. The fingerprint stays that of the bits.
    """
    kept: list[tuple[Any, float]] = []
    for call, slot, by in scaled:
        value = (call.params or {}).get(slot)
        scale = _number(step_data, by) if isinstance(by, Value) else float(by)
        if value is None or getattr(value, "row", -1) < 0 or scale == 1.0 or not 0 < scale < np.inf:
            continue
        own = value.with_note(value.note)
        own.extra = {**(value.extra or {}), "scale": scale}
        call.params[slot] = own
        kept.append((own, scale))
    if not kept:
        return
    rows = np.array([value.row for value, _ in kept])
    first = len(step_data.partials)
    step_data.partials = np.concatenate(
        [step_data.partials, divided(step_data.partials[rows], np.array([scale for _, scale in kept]))]
    )
    if step_data.checksums is not None:
        step_data.checksums = np.concatenate([step_data.checksums, step_data.checksums[rows]])
    for name in ("crc32", "histograms", "shares"):  # of the bits as they were
        table = getattr(step_data, name)
        if table is not None:
            setattr(step_data, name, {**table, **{first + i: table[r] for i, r in enumerate(rows.tolist()) if r in table}})
    if step_data.quantiles is not None:
        quantiles = {first + i: step_data.quantiles[v.row] / s for i, (v, s) in enumerate(kept) if v.row in step_data.quantiles}
        step_data.quantiles = {**step_data.quantiles, **quantiles}
    for i, (value, _) in enumerate(kept):
        value.row = first + i
    step_data.values = [*step_data.values, *(value for value, _ in kept)]


def _number(step_data: StepData, value: Value) -> float:
    return float(finish(step_data.partials[value.row : value.row + 1], ("mean",))["mean"][0]) if value.row >= 0 else 1.0
