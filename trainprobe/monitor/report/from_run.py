"""Turns a recorded run into what its page shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.core.addresses import Address
from trainprobe.monitor.frames import I64, SCALED, Frame, Series, as_slice
from trainprobe.monitor.history import History
from trainprobe.monitor.report.largest_jump import largest_jump
from trainprobe.monitor.report.run_view import Curve, MadeWhenAsked, Metric, RunView, Table
from trainprobe.monitor.scalar_names import role_of

COLUMNS = 10_240  # so many collected steps are shown one by one; of more, neighbours are joined
STATISTICS = ("norm", "absmax", "max", "min", "mean", "std", "zero_share", "value")
_SHOWN = {"zero_share": "share of zeros", "absmax": "largest magnitude"}

# (kind, first part of the slot) → what the values are called on the page, in the order of the selector
_NAMES = {
    ("parameter", "grad"): "gradients",
    ("parameter", "grad_unclipped"): "gradients before clipping",
    ("parameter", "grad_unreduced"): "gradients before reduction",
    ("parameter", SCALED): "gradients times the loss scale",
    ("module", "output"): "activations out",
    ("module", "input"): "activations in",
    ("parameter", "value"): "parameters",
    ("parameter", "value_after"): "parameters after the step",
    ("parameter", "updated"): "parameters after the step",
    ("parameter", "main_value"): "master weights",
    ("parameter", "main_value_after"): "master weights after the step",
    ("parameter", "update"): "updates",
    ("module", "grad_output"): "gradients of outputs",
    ("module", "grad_input"): "gradients of inputs",
    ("parameter", "exp_avg"): "first moments",
    ("parameter", "exp_avg_sq"): "second moments",
    ("parameter", "exp_avg_after"): "first moments after the step",
    ("parameter", "exp_avg_sq_after"): "second moments after the step",
    ("collective", "input"): "collectives in",
    ("collective", "output"): "collectives out",
    ("feature", "attention_entropy"): "attention entropy",
    ("feature", "attention_logit"): "attention, largest logit",
    ("feature", "attention_peak"): "attention, peak",
    ("feature", "spectral_norm"): "spectral norm",
    ("feature", "stable_rank"): "stable rank",
    ("feature", "router_load"): "router load",
    ("feature", "router_entropy"): "router entropy",
    ("feature", "router_similarity"): "router similarity",
    ("feature", "dead_units"): "dead units",
    ("feature", "loss_row_share"): "share of the largest row in the loss",
}
_TAKEN_OF = {"output": "outputs", "grad_output": "gradients of outputs", "value": "parameters", "grad": "gradients"}
_PARTS = {"attention": "head", "router": "expert"}  # what the numbers of a feature are numbered by
_FIRST = ("loss", "gradient norm", "learning rate", "loss scale")


def collect_histories(frames: Iterable[Frame], histories: dict[int, History]) -> Iterator[Frame]:
    """Add each frame to the series of its rank, keeping what a page can show, and pass it on."""
    for frame in frames:
        histories.setdefault(frame.place.rank, History(COLUMNS, _selected)).add(frame)
        yield frame


def _selected(series: Series) -> bool:
    address = series.address
    return address.kind == "scalar" or (series.statistic in STATISTICS and address.phase != "recompute")


def view_of(title: str, histories: dict[int, History], meta: dict[str, str]) -> RunView:
    """Return the page's content for the series of a run, without its findings."""
    metrics = _metrics(histories)
    tables = [_worst_table(histories)]
    steps = [s.steps for s in histories.values() if s.steps.size]
    facts = dict(meta)
    if steps:
        facts |= {"steps": f"{min(int(s.min()) for s in steps)} to {max(s.highest_step or 0 for s in histories.values())}"}
    facts |= {"ranks": str(len(histories)), "series": str(sum(len(s.series) for s in histories.values()))}
    notes = [
        f"rank {rank}: each column of the map joins {s.every} collected steps and shows the worst of them"
        for rank, s in histories.items()
        if s.every > 1
    ]
    scalars = _scalars(histories)
    loss = next((name for name in scalars if role_of(name) == "loss"), None)
    jump = largest_jump(loss, scalars[loss]) if loss is not None else ""
    return RunView(title, facts, scalars, metrics, tables=[t for t in tables if t.rows], notes=notes[:1], jump=jump)


def _scalars(histories: dict[int, History]) -> dict[str, Curve]:
    """Return the scalars of the first rank that has each; the well-known ones come first."""
    found: dict[str, Curve] = {}
    for _, one in sorted(histories.items()):
        for series in one.series:
            if series.address.kind == "scalar" and series.address.name not in found:
                found[series.address.name] = one.by_step(series)
    order = {role: i for i, role in enumerate(_FIRST)}
    return dict(sorted(found.items(), key=lambda pair: order.get(role_of(pair[0]) or "", len(order))))


def _label(address: Address) -> str:
    first, _, rest = address.slot.partition(".")
    known = _NAMES.get((address.kind, first))
    if address.kind == "feature" and (of := _TAKEN_OF.get(rest.split(".")[0])) is not None:
        return f"{known or first.replace('_', ' ', 1)}, {of}"
    return known or (f"{address.kind} {first.replace('_', ' ')}" if address.kind != "op" else f"ops {first}")


def _row_name(address: Address) -> str:
    rest = address.slot.partition(".")[2]
    name = address.name or "(model)"
    call = f"[{address.call}]" if address.call else ""
    if address.kind == "feature" and rest.split(".")[0] in _TAKEN_OF:
        rest = rest.partition(".")[2]
    elif address.kind == "feature" and rest.isdigit():
        return f"{name}{call} {_PARTS.get(address.slot.partition('_')[0], 'part')} {rest}"
    return name + call + (f" {rest}" if rest not in ("", "0") else "")


def _metrics(histories: dict[int, History]) -> Sequence[Metric]:
    groups: dict[tuple[str, str], dict[str, dict[int, int]]] = {}  # (label, statistic) → row → rank → place in its series
    for rank, one in sorted(histories.items()):
        for i, series in enumerate(one.series):
            if series.address.kind != "scalar":
                rows = groups.setdefault((_label(series.address), series.statistic), {})
                rows.setdefault(_row_name(series.address), {}).setdefault(rank, i)
    labels = list(_NAMES.values())
    model_order = {row: i for i, row in enumerate(groups.get(("parameters", "norm"), {}))}
    for (label, _), rows in groups.items():
        if "gradients" in label:  # they arrive last layer first; the map shows the order of the model
            backwards = list(rows.items())[::-1]
            turned = sorted(backwards, key=lambda pair: model_order.get(pair[0], len(model_order)))
            rows.clear()
            rows.update(turned)
    order = {label: i for i, label in enumerate(labels)}
    shown = sorted(groups, key=lambda key: (order.get(key[0], len(labels)), key[0], STATISTICS.index(key[1])))
    return MadeWhenAsked([partial(_metric, *key, groups[key], histories) for key in shown])


def _metric(label: str, statistic: str, rows: dict[str, dict[int, int]], histories: dict[int, History]) -> Metric:
    ranks = sorted({rank for places in rows.values() for rank in places})
    steps = np.unique(np.concatenate([histories[rank].steps for rank in ranks]))
    values = np.zeros((len(ranks), len(rows), steps.size), dtype=np.float32)
    missing = np.ones(values.shape, dtype=bool)
    for i, rank in enumerate(ranks):
        here = np.array([(r, places[rank]) for r, places in enumerate(rows.values()) if rank in places])
        columns = np.searchsorted(steps, histories[rank].steps)
        for part, got, present in histories[rank].parts(here[:, 1]):
            cells = _cells(here[:, 0], columns[part])
            values[i][cells], missing[i][cells] = got, ~present
    keep = ~missing.all(axis=(0, 1))
    if not keep.all():
        steps, values, missing = steps[keep], values[:, :, keep], missing[:, :, keep]
    return Metric(label, list(rows), steps, values, _SHOWN.get(statistic, statistic), missing, ranks)


def _cells(rows: I64, columns: I64) -> Any:
    """Return what picks the cells of these rows and columns."""
    both = as_slice(rows), as_slice(columns)
    return both if all(isinstance(one, slice) for one in both) else np.ix_(rows, columns)


def worst_offenders(histories: dict[int, History], limit: int = 10) -> list[tuple[str, int, float, float]]:
    """Return (series, rank, last value, ratio to its own median) of the norms that stand out most at the last step.

    A value that is not finite comes first, with an infinite ratio; what a module is given and is infinite at every step is a
    mask, and stands out in nothing.
    """
    found: list[tuple[str, int, float, float]] = []
    for rank, one in histories.items():
        chosen = [i for i, t in enumerate(one.series) if t.statistic == "norm" and t.address.kind in ("module", "parameter")]
        if not chosen or not one.steps.size:
            continue
        values, present = one.matrix(chosen)
        found += [_offence(one.series[i], rank, v, p) for i, v, p in zip(chosen, values, present, strict=True) if p[-1]]
    return sorted(found, key=lambda item: -item[3])[:limit]


def _offence(series: Series, rank: int, values: npt.NDArray[np.float32], present: Any) -> tuple[str, int, float, float]:
    last, past = float(values[-1]), values[present]
    past = past[np.isfinite(past) & (past > 0)]
    if math.isinf(last) and not past.size and series.address.slot.split(".")[0] in ("input", "kwargs"):
        return str(series), rank, last, 1.0
    if not math.isfinite(last):
        return str(series), rank, last, math.inf
    usual = float(np.median(past)) if past.size else 0.0
    ratio = max(last / usual, usual / last) if usual > 0 and last > 0 else 1.0
    return str(series), rank, last, ratio


def _worst_table(histories: dict[int, History]) -> Table:
    rows = [
        [name, str(rank), f"{value:.4g}", "not finite" if math.isinf(ratio) else f"{ratio:.3g}"]
        for name, rank, value, ratio in worst_offenders(histories)
    ]
    return Table("Farthest from their own median at the last step", ["series", "rank", "value", "factor"], rows)
