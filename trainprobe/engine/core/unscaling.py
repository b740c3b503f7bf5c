"""Takes a loss scale out of the numbers of a step: what was seen multiplied is told divided, and the scale beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainprobe.engine.core.records import Call, Reel, Value
from trainprobe.engine.stats import finish
from trainprobe.engine.stats.partials import F64, PARTIALS

Scaled = tuple[Call, str, float | Value]  # a call of kind "state", one of its slots, and what its numbers were multiplied by
_ONCE, _TWICE = ("min", "max", "sum"), ("sumsq", "m2")


def divided(partials: F64, scale: F64) -> F64:
    """Return the partials, [rows, len(PARTIALS)], of the same tensors divided by scale, [rows]; counts stay what they are.

    Exact for powers of two, which loss scales are, as long as no float64 leaves its range.
    """
    out = partials.copy()
    for names, factor in ((_ONCE, scale), (_TWICE, scale * scale)):
        for name in names:
            at = PARTIALS.index(name)
            out[:, at] = partials[:, at] / factor
    return out


def unscale(reel: Reel, scaled: Sequence[Scaled]) -> None:
    """Divide the numbers of these places of a reel; `extra` of their values then holds "scale".

    Each gets a row of its own, because others may have seen the same tensor as it is. The fingerprint stays that of the bits.
    """
    kept: list[tuple[Any, float]] = []
    for call, slot, told in scaled:
        value = (call.params or {}).get(slot)
        scale = _number(reel, told) if isinstance(told, Value) else float(told)
        if value is None or getattr(value, "row", -1) < 0 or scale == 1.0 or not 0 < scale < np.inf:
            continue
        own = value.with_note(value.note)
        own.extra = {**(value.extra or {}), "scale": scale}
        call.params[slot] = own
        kept.append((own, scale))
    if not kept:
        return
    rows = np.array([value.row for value, _ in kept])
    first = len(reel.partials)
    reel.partials = np.concatenate([reel.partials, divided(reel.partials[rows], np.array([scale for _, scale in kept]))])
    if reel.checksums is not None:
        reel.checksums = np.concatenate([reel.checksums, reel.checksums[rows]])
    for name in ("crc32", "histograms"):  # of the bits as they were
        table = getattr(reel, name)
        if table is not None:
            setattr(reel, name, {**table, **{first + i: table[r] for i, r in enumerate(rows.tolist()) if r in table}})
    if reel.quantiles is not None:
        told = {first + i: reel.quantiles[v.row] / s for i, (v, s) in enumerate(kept) if v.row in reel.quantiles}
        reel.quantiles = {**reel.quantiles, **told}
    for i, (value, _) in enumerate(kept):
        value.row = first + i
        reel.values.append(value)


def _number(reel: Reel, value: Value) -> float:
    return float(finish(reel.partials[value.row : value.row + 1], ("mean",))["mean"][0]) if value.row >= 0 else 1.0
