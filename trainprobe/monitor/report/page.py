"""Writes the page of a run: a RunView in, one HTML file out that needs no network and no other file.

The findings are HTML that needs no script: causes first, notes last, the less important ones folded.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.core.findings import finding_item
from trainprobe.engine.core.records import Finding
from trainprobe.engine.storage.html_page import make_page, packed, shared, write_text
from trainprobe.engine.storage.html_page.markup import Markup, element, listed, run_head
from trainprobe.monitor.findings import causes
from trainprobe.monitor.report.planes import Codes, Packed, bucket, pack, smallest
from trainprobe.monitor.report.run_view import Curve, Metric, RunView

CELL_BUDGET = 20_000_000  # bytes of heatmap before compression; a larger run joins neighbouring steps, single ranks first
CURVE_POINTS = 8_192  # a longer curve keeps the smallest and largest value of each stretch
MOST = 8  # findings that are not folded
_FOLLOW = {"ownership": ("movement", "frozen"), "trainable_set": ("movement", "frozen"), "movement": ("frozen",)}
PARTS = (
    *("body.html", "style.css"),
    *("store.js", "axes.js", "colour.js", "heatmap.js", "brush.js", "curves.js", "findings.js", "main.js"),
)


def write_page(run: RunView, path: str | Path) -> Path:
    """Write the page to `path` (its folder must exist) and return it; the file appears whole or not at all.

    Raises OutputError when the file cannot be written.
    """
    return write_text(Path(path), render_page(run))


def render_page(run: RunView) -> str:
    """Return the page as HTML text."""
    blobs = _Blobs()
    found = in_order_shown(causes(run.findings))
    data = _describe(run, found, blobs)
    assets = files("trainprobe.monitor.report") / "assets"
    parts = [*(assets / name for name in PARTS), shared("foot.html")]
    meta = ((str(name), str(value)) for name, value in run.meta.items())
    written = {"head": run_head(run.title, meta), "findings": findings_card(run, found)}
    return make_page(run.title, "report", parts, data, blobs.packed, written)


class _Blobs:
    """The page's binary data: each distinct array once, deflated and written as base64."""

    def __init__(self) -> None:
        self.packed: dict[str, str] = {}

    def add(self, array: npt.NDArray[Any]) -> str:
        raw = np.ascontiguousarray(array).tobytes()
        key = "b" + hashlib.sha1(raw, usedforsecurity=False).hexdigest()[:12]
        if key not in self.packed:
            self.packed[key] = packed(raw)
        return key


def _describe(run: RunView, found: Sequence[Finding], blobs: _Blobs) -> dict[str, Any]:
    maps = [_Map.of(metric) for metric in run.metrics]
    every = _steps_a_column([one.packed.codes for one in maps])
    return {
        "scalars": [_describe_curve(name, curve, blobs) for name, curve in run.scalars.items()],
        "metrics": [_describe_map(one, every, blobs) for one in maps],
        "findings": [_describe_finding(f) for f in found],
        "tables": [{"title": t.title, "columns": list(t.columns), "rows": [list(r) for r in t.rows]} for t in run.tables],
        "recorded": run.recorded,
        "jump": run.jump,
    }


@dataclass(frozen=True, slots=True, eq=False)
class _Map:
    """A metric as the page holds it: a byte a cell, where the metric has four or more."""

    head: dict[str, Any]
    steps: npt.NDArray[np.int64]
    ranks: Sequence[int]
    packed: Packed

    @classmethod
    def of(cls, metric: Metric) -> _Map:
        head = {"name": metric.name, "statistic": metric.statistic, "rows": list(metric.rows)}
        return cls(head, metric.steps, metric.ranks, pack(metric.values, metric.missing))


def _steps_a_column(maps: Sequence[Codes]) -> int:
    """Return how many steps a column of a single rank joins, a power of two; the joined ranks keep eight times finer ones."""
    every, single, joined = 1, sum(codes.size for codes in maps), sum(3 * codes[0].size for codes in maps)
    while 2 * single / every + (2 if every > 8 else 1) * joined / max(1, every // 8) > CELL_BUDGET and every < 1 << 20:
        every *= 2
    return every


def _describe_map(one: _Map, every: int, blobs: _Blobs) -> dict[str, Any]:
    packed, joined = one.packed, max(1, every // 8)
    ranks = list(one.ranks) or list(range(packed.codes.shape[0]))
    views = []
    if len(ranks) == 1:
        every = joined
    else:
        largest = packed.codes.max(axis=0)
        views = [
            _view("largest rank", _planes(largest, joined, blobs), joined),
            _view("smallest rank", _planes(smallest(packed.codes, 0, largest), joined, blobs), joined),
        ]
    views += [_view(f"rank {r}", _planes(codes, every, blobs), every) for r, codes in zip(ranks, packed.codes, strict=True)]
    spread = None
    if packed.spread is not None:
        wide = pack(10.0 ** packed.spread[None], np.isnan(packed.spread)[None])
        spread = _view("", _planes(wide.codes[0], joined, blobs), joined)
        spread |= {"knots": _rounded(wide.knots), "domain": [0.0, max(wide.domain[1], 0.05)]}
    return {
        **one.head,
        "steps": _describe_steps(one.steps, blobs),
        "scale": packed.scale,
        "pivot": packed.pivot,
        "knots": _rounded(packed.knots),
        "domain": list(packed.domain),
        "views": views,
        "spread": spread,
    }


def _view(label: str, planes: Sequence[str], every: int) -> dict[str, Any]:
    return {"label": label, "planes": planes, "every": every}


def _planes(codes: Codes, every: int, blobs: _Blobs) -> list[str]:
    """Return the ids of the largest and the smallest plane (the same one where no steps were joined)."""
    return [blobs.add(plane) for plane in bucket(codes, every)]


def _rounded(knots: npt.NDArray[np.float64]) -> list[list[float]]:
    return [[round(float(k), 5) for k in row] for row in knots]


def _describe_steps(steps: npt.NDArray[np.int64], blobs: _Blobs) -> dict[str, Any]:
    steps = np.asarray(steps, dtype=np.int64)
    strides = np.diff(steps)
    if steps.size and (strides.size == 0 or bool((strides == strides[0]).all())):
        return {"start": int(steps[0]), "stride": int(strides[0]) if strides.size else 1, "count": int(steps.size)}
    return {"blob": blobs.add(steps.astype(np.float64)), "count": int(steps.size)}


def _describe_curve(name: str, curve: Curve, blobs: _Blobs) -> dict[str, Any]:
    steps, values = np.asarray(curve[0], dtype=np.int64), np.asarray(curve[1], dtype=np.float64)
    ends = {"first": _number(values[0]), "last": _number(values[-1])} if values.size else {}
    kept = thin(values, CURVE_POINTS)
    return {
        "name": name,
        **ends,
        "steps": _describe_steps(steps[kept], blobs),
        "values": blobs.add(values[kept].astype(np.float32)),
    }


def thin(values: npt.NDArray[np.float64], points: int) -> npt.NDArray[np.int64]:
    """Return about `points` ascending indices: the ends, and each stretch's smallest, largest and first non-finite value."""
    n = values.size
    if n <= points:
        return np.arange(n)
    width = math.ceil(n / (points // 2))
    pad = -n % width
    grid = np.concatenate([values, np.full(pad, values[-1])]).reshape(-1, width)
    base = np.arange(grid.shape[0]) * width
    finite = np.isfinite(grid)
    high = np.where(finite, grid, -np.inf).argmax(axis=1)
    low = np.where(finite, grid, np.inf).argmin(axis=1)
    first_nonfinite = (~finite).argmax(axis=1)
    chosen = np.concatenate(
        [base + high, base + low, (base + first_nonfinite)[~finite.all(axis=1) & (~finite).any(axis=1)], [0, n - 1]]
    )
    return np.unique(np.minimum(chosen, n - 1))


def in_order_shown(found: Sequence[Finding]) -> list[Finding]:
    """Return findings with notes last, and each cause before what follows from it."""
    ordered = sorted(found, key=lambda f: f.severity == "info")
    return [finding for group in _groups(ordered) for finding in group]


def _groups(found: Sequence[Finding]) -> list[list[Finding]]:
    """Return causes, each with what follows from it behind it; a group is where the first of it was."""
    cause = [next((i for i, other in enumerate(found) if _follows(f, other)), at) for at, f in enumerate(found)]
    root = [cause[i] for i in cause]  # what follows from a consequence follows from its cause
    groups: dict[int, list[Finding]] = {at: [found[at]] for at in root}
    for i, at in enumerate(root):
        groups[at] += [found[i]] if i != at else []
    return list(groups.values())


def _follows(finding: Finding, cause: Finding) -> bool:
    """Tell whether a finding is a consequence of another: that the same parameters, or some of them, do not move."""
    if finding.rule not in _FOLLOW.get(cause.rule, ()):
        return False
    about = _names(finding)
    return bool(about) and about <= _names(cause)


def _names(finding: Finding) -> set[str]:
    return set(finding.names) or ({finding.site.name} if finding.site else set())


def first_offender(found: Sequence[Finding]) -> Finding | None:
    """Return the first finding at a step that is no note."""
    return next((f for f in found if f.step is not None and f.severity != "info"), None)


def findings_card(run: RunView, found: Sequence[Finding]) -> Markup:
    """Return the card with what was found. found: as `in_order_shown` returns them."""
    first, on_map = first_offender(found), bool(run.metrics)
    numbers = {id(f): i for i, f in enumerate(found, 1)}
    items = []
    for cause, *following in _groups(found):
        under = [finding_item(f, numbers[id(f)], f is first, on_map, trace=_trace(run, f)) for f in following]
        items.append(finding_item(cause, numbers[id(cause)], cause is first, on_map, under, _trace(run, cause)))
    body = element("ol", *items[:MOST], id="finding-list")
    if not found:
        none = f"{run.recorded}: no findings in these." if run.recorded else "No findings."
        body = element("p", none, class_=None if run.jump or run.recorded else "calm")
    summary = element("summary", f"{len(items) - MOST} more")
    more = element("details", summary, element("ol", *items[MOST:]), id="more-findings") if items[MOST:] else None
    jump = element("p", f"{run.jump}.", id="jump") if run.jump and all(f.severity == "info" for f in found) else None
    title = element("h2", "Findings", id="findings-title")
    notes = listed(run.notes, id="notes")
    return element("section", title, body, more, jump, notes, id="findings", class_="card", aria_labelledby="findings-title")


def _trace(run: RunView, finding: Finding) -> list[tuple[str, str]]:
    """Return what a finding leads to, without what it says itself."""
    known = run.trace(finding.step, finding.place.rank if finding.place is not None else 0, finding.site)
    return [(what, text) for what, text in known if text not in finding.message]


def _describe_finding(finding: Finding) -> dict[str, Any]:
    site, place = finding.site, finding.place
    return {
        "rule": finding.rule,
        "severity": finding.severity,
        "message": finding.message,
        "step": finding.step,
        "rank": place.rank if place else None,
        "name": site.name if site else None,
        "slot": site.slot if site else None,
    }


def _number(value: float | str | None) -> float | str | None:
    """Return a number that JSON can hold: NaN and infinities become their names."""
    if value is None or isinstance(value, str):
        return value
    value = float(value)
    return value if math.isfinite(value) else {True: "NaN", False: "+inf" if value > 0 else "-inf"}[math.isnan(value)]
