"""Two recorded runs side by side: the first step, and the series, where they are further apart than rounding takes them.

The distance of two numbers is |a − b| / max(|a|, |b|). A series leaves the floor where that is more than ten times what
rounding does to it: as a third run measured it (one of the two again, on other threads say), the largest distance up to that
step; or, as a model, float32's gap in as many sums as there were steps, since errors of the steps add up like a random walk.
A training is chaotic: without a third run, two healthy runs leave the model's floor at some step too, all series at about the
same time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from operator import getitem

import numpy as np
import numpy.typing as npt

from trainprobe.engine.core.records import Finding, Place
from trainprobe.engine.core.words import numbered
from trainprobe.monitor.findings import in_order
from trainprobe.monitor.frames import Series
from trainprobe.monitor.history import History
from trainprobe.monitor.report.run_view import Curve, MadeWhenAsked, Metric, RunView, Table

Histories = Mapping[int, History]
F64 = npt.NDArray[np.float64]
STATISTICS = ("norm", "value")
SLACK = 10.0  # times the floor
_MODEL = 2.0**-23
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Departure:
    """The first step at which a series is further apart than `floor`, ten times what rounding does to it."""

    series: Series
    rank: int
    step: int
    a: float
    b: float
    floor: float

    @property
    def far(self) -> float:
        """Return how far both numbers are apart."""
        return float(distance(np.array([self.a]), np.array([self.b]))[0])


def distance(a: F64, b: F64) -> F64:
    """Return how far numbers are apart, relative to the larger one; infinitely where one alone is not finite."""
    with np.errstate(all="ignore"):
        far = np.abs(a - b) / np.maximum(np.abs(a), np.abs(b))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0.0, np.where(np.isfinite(a) & np.isfinite(b), far, math.inf))


def departures(a: Histories, b: Histories, floor: Histories | None = None) -> list[Departure]:
    """Return where each series of both runs leaves the floor, those that do first. floor: of a run that measures it."""
    found: list[Departure] = []
    for rank in sorted(a.keys() & b.keys()):
        mine, theirs, third = (_by_series(side.get(rank)) for side in (a, b, floor or {}))
        for series in (series for series in mine if series in theirs):
            steps, x, y = _together(mine[series], theirs[series])
            limit = SLACK * _floor(steps, mine[series], third.get(series))
            beyond = np.flatnonzero(distance(x, y) > limit)
            if beyond.size:
                i = int(beyond[0])
                found.append(Departure(series, rank, int(steps[i]), float(x[i]), float(y[i]), float(limit[i])))
    return sorted(found, key=lambda one: (one.step, -one.far))


def _by_series(history: History | None) -> dict[Series, Curve]:
    return {} if history is None else {series: history.by_step(series) for series in _compared(history)}


def _compared(history: History) -> list[Series]:
    return [series for series in history.series if series.statistic in STATISTICS]


def _together(a: Curve, b: Curve) -> tuple[npt.NDArray[np.int64], F64, F64]:
    """Return the steps that both curves have, and their numbers there."""
    steps, mine, theirs = np.intersect1d(np.asarray(a[0]), np.asarray(b[0]), return_indices=True)
    return steps, np.asarray(a[1], np.float64)[mine], np.asarray(b[1], np.float64)[theirs]


def _floor(steps: npt.NDArray[np.int64], curve: Curve, third: Curve | None) -> F64:
    """Return what rounding does to a series up to each step."""
    model = _MODEL * np.sqrt(1.0 + steps - (steps[0] if steps.size else 0))
    if third is None:
        return model
    known, x, y = _together(curve, third)
    if not known.size:
        return model
    largest = np.maximum.accumulate(distance(x, y))
    at = np.clip(np.searchsorted(known, steps, side="right") - 1, 0, None)
    return np.maximum(_MODEL, largest[at])


def notes_on(a: Histories, b: Histories, name: str, found: Sequence[Departure]) -> list[str]:
    """Return sentences beside the first departure: that there is none, and what one run alone holds. name: of b."""
    ranks = sorted(a.keys() & b.keys())
    series = [{(rank, one) for rank in ranks for one in _compared(side[rank])} for side in (a, b)]
    steps = [{int(step) for rank in ranks for step in side[rank].steps} for side in (a, b)]
    for what, mine, theirs in (("rank", a.keys(), b.keys()), ("series", *series), ("step", *steps)):
        if not mine & theirs:
            return [f"nothing was compared: no {what} of this run is in {name}"]
    notes = [] if found else [f"no series differs from {name} by more than rounding explains"]
    for side, (mine, theirs) in (("this run", (0, 1)), (name, (1, 0))):
        lone = _told((a, b)[mine].keys() - (a, b)[theirs].keys(), series[mine] - series[theirs], steps[mine] - steps[theirs])
        notes += [f"not compared, as {side} alone has them: {lone}"] if lone else []
    return notes


def _told(ranks: Set[int], series: Set[tuple[int, Series]], steps: Set[int]) -> str:
    names = sorted({str(one) for _, one in series})
    found = [
        numbered("rank", ranks) if ranks else "",
        f"{len(names)} series (such as {names[0]})" if names else "",
        numbered("step", steps) if steps else "",
    ]
    return ", ".join(part for part in found if part)


def first_departure(found: Sequence[Departure], other: str, measured: bool) -> Finding | None:
    """Return the first place where two runs part, of one step the earliest in the step."""
    if not found:
        return None
    first = [one for one in found if one.step == found[0].step]
    return in_order([_finding(one, other, measured) for one in first])[0]


def _finding(one: Departure, other: str, measured: bool) -> Finding:
    by = "measured by a third run" if measured else "by a model; --floor measures it"
    message = (
        f"from step {one.step} on, {one.series} is another than in {other}: {one.a:.6g} here and {one.b:.6g} there, "
        f"{one.far:.1e} apart; rounding explains {one.floor:.1e} ({by})"
    )
    address = one.series.address
    return Finding("two_runs", "warning", message, one.step, Place(one.rank), address.site(), one.a, one.b, one.floor)


def add_run(
    view: RunView, other: RunView, name: str, found: Sequence[Departure], finding: Finding | None, notes: Sequence[str]
) -> RunView:
    """Return the page of a run with another run on it: its curves, maps of the distances, and what leaves the floor."""
    scalars: dict[str, Curve] = {}
    for label, curve in view.scalars.items():
        scalars[label] = curve
        if label in other.scalars:
            scalars[f"{label}, {name}"] = other.scalars[label]
    theirs = {metric.name: metric for metric in other.metrics if metric.statistic == "norm"}
    pairs = ((metric, theirs.get(metric.name)) for metric in view.metrics if metric.statistic == "norm")
    maps = [made for mine, match in pairs if match is not None and (made := _map(mine, match, name)) is not None]
    metrics = MadeWhenAsked([partial(getitem, known, i) for known in (view.metrics, maps) for i in range(len(known))])
    rows = [
        [str(one.series), str(one.rank), str(one.step), f"{one.a:.6g}", f"{one.b:.6g}", f"{one.far:.1e}", f"{one.floor:.1e}"]
        for one in found[:_SHOWN]
    ]
    heads = ["series", "rank", "from step", "here", name, "apart", "rounding explains"]
    table = [Table(f"What leaves the floor first: {len(found)} series differ from {name}", heads, rows)] if rows else []
    findings = [*view.findings, finding] if finding is not None else view.findings
    tables = [*table, *view.tables]
    return replace(view, scalars=scalars, metrics=metrics, findings=findings, tables=tables, notes=[*view.notes, *notes])


def _map(a: Metric, b: Metric, name: str) -> Metric | None:
    """Return the distances of two maps where both have the same ranks and rows."""
    if list(a.rows) != list(b.rows) or list(a.ranks) != list(b.ranks):
        return None
    steps, mine, theirs = np.intersect1d(a.steps, b.steps, return_indices=True)
    if not steps.size:
        return None
    far = distance(np.asarray(a.values[:, :, mine], np.float64), np.asarray(b.values[:, :, theirs], np.float64))
    missing = np.zeros(far.shape, bool)
    for metric, columns in ((a, mine), (b, theirs)):
        missing |= metric.missing[:, :, columns] if metric.missing is not None else False
    return Metric(f"{a.name}, apart from {name}", a.rows, steps, far.astype(np.float32), "distance", missing, a.ranks)
