"""Which ranks a fleet lacks steps of, and which ranks come late: from the steps that each logged, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.fleet.catalog import Catalog
from trainprobe.monitor.fleet.words import ranks_in_words

F64 = npt.NDArray[np.float64]
OPEN_STEPS, OPEN_SECONDS = 5, 2.0  # how far a rank may be behind while logs are open: the writer hands steps on in batches
EARLY = 10  # percent of the ranks: the earliest of a step, which all others are measured against
LATE_SECONDS = 1.0  # a rank is late by a step's duration and by at least this much
FIRST = 3  # steps that show how a rank's clock is set
LEAST = 3  # steps for which a rank must be late, up to the last one


class Timetable:
    """When each rank logged each step. ranks [n], steps [m]: ascending. seconds [n, m]: since the first, NaN where missing."""

    def __init__(self, catalog: Catalog) -> None:
        at = catalog.steps
        self.catalog = catalog
        self.ranks, row = np.unique(at.rank, return_inverse=True)
        self.steps, column = np.unique(at.step, return_inverse=True)
        self.seconds: F64 = np.full((len(self.ranks), len(self.steps)), np.nan)
        self.seconds[row, column] = (at.time - at.time.min()) / 1e6
        self.there = ~np.isnan(self.seconds)
        self.expected = self.there.sum(axis=0) * 2 > len(self.ranks)  # steps that most ranks have

    def pace(self) -> float:
        """Return the usual duration of a step in seconds, 0 where there is one step."""
        starts = np.nanmedian(self.seconds, axis=0)
        return float(np.median(np.diff(starts))) if len(starts) > 1 else 0.0

    def lag(self) -> F64:
        """Return by how many seconds each rank logged each step after the earliest ranks did, [n, m]."""
        return self.seconds - np.nanpercentile(self.seconds, EARLY, axis=0)


def missing_steps(table: Timetable) -> list[Finding]:
    """Return findings on ranks that stopped before the others, and on ranks that lack steps in between or before."""
    there, expected = table.there[:, table.expected], table.steps[table.expected]
    if not len(expected):
        return []
    stopped: dict[int, list[int]] = {}
    lacking: dict[tuple[int, int], list[int]] = {}
    for row in np.flatnonzero(~there.all(axis=1)).tolist():
        has, rank = np.flatnonzero(there[row]), int(table.ranks[row])
        last = int(has[-1]) if has.size else -1
        if last < len(expected) - 1 and not _may_come(table, row, last, len(expected)):
            stopped.setdefault(last, []).append(rank)
        gaps = np.flatnonzero(~there[row, : last + 1])
        if gaps.size:
            lacking.setdefault((int(expected[gaps[0]]), len(gaps)), []).append(rank)
    return [*_stopped(table, stopped, expected.tolist()), *_lacking(table, lacking)]


def _may_come(table: Timetable, row: int, last: int, count: int) -> bool:
    """Tell whether what a rank lacks at the end may still be on its way, or was lost in a kill of all."""
    if not table.catalog.live or count - 1 - last > OPEN_STEPS:
        return False
    return bool(np.nanmax(table.seconds) - np.nanmax(table.seconds[row]) <= max(OPEN_SECONDS, 2 * table.pace()))


def _stopped(table: Timetable, stopped: dict[int, list[int]], expected: list[int]) -> Iterator[Finding]:
    for last, ranks in sorted(stopped.items()):
        step = expected[last + 1]
        subject = ranks_in_words(ranks, table.catalog.places)
        ended = f"after step {expected[last]}" if last >= 0 else "before the first step of the others"
        yield Finding(
            "fleet_steps",
            "error",
            f"{subject} stopped {ended}; the others went on to step {expected[-1]}",
            step,
            table.catalog.places.get(ranks[0]),
            measured=float(expected[last]) if last >= 0 else None,
            expected=float(expected[-1]),
            next=f"look at the log of {_process(ranks)}; `trainprobe black-box {{output}}/rank{ranks[0]}` shows its last steps",
            ranks=tuple(ranks),
        )


def _lacking(table: Timetable, lacking: dict[tuple[int, int], list[int]]) -> Iterator[Finding]:
    for (first, count), ranks in sorted(lacking.items()):
        steps = "step" if count == 1 else f"{count} steps, the first of them"
        yield Finding(
            "fleet_steps",
            "warning",
            f"{ranks_in_words(ranks, table.catalog.places)} lack {steps} {first}, which most ranks logged",
            first,
            table.catalog.places.get(ranks[0]),
            next=f"compare the plan of {_process(ranks)} with that of the others; a full disk loses steps too",
            ranks=tuple(ranks),
        )


def _process(ranks: list[int]) -> str:
    return f"rank {ranks[0]}'s process"


def late_ranks(table: Timetable) -> list[Finding]:
    """Return findings on ranks that came late from some step on, to the end; those late from the first step are a note."""
    if table.seconds.shape[1] < LEAST + 1 or len(table.ranks) < 2:
        return []
    lag = table.lag()
    base = np.nanmedian(lag[:, :FIRST], axis=1, keepdims=True)
    floor = max(LATE_SECONDS, table.pace())
    findings = list(_late(table, lag - base, floor, "warning", _since))
    return [*findings, *_late(table, base + 0 * lag, floor, "info", lambda late: 0 if late[0] else None)]


def _since(late: npt.NDArray[np.bool_]) -> int | None:
    """Return from which on all steps are late, None where the last ones are not."""
    on_time = np.flatnonzero(~late)
    since = int(on_time[-1]) + 1 if on_time.size else 0
    return since if len(late) - since >= LEAST else None


def _late(
    table: Timetable, lag: F64, floor: float, severity: Any, since: Callable[[npt.NDArray[np.bool_]], int | None]
) -> Iterator[Finding]:
    found: dict[int, list[int]] = {}
    for row in np.flatnonzero((lag > floor).any(axis=1)).tolist():
        here = np.flatnonzero(~np.isnan(lag[row]))
        at = since(lag[row, here] > floor)
        if at is not None:
            found.setdefault(int(here[at]), []).append(row)
    for column, rows in sorted(found.items()):
        ranks, behind = [int(table.ranks[row]) for row in rows], float(np.nanmedian(lag[rows, column:]))
        subject, step = ranks_in_words(ranks, table.catalog.places), int(table.steps[column])
        text = (
            f"logged every step {behind:.1f} s after the earliest ranks, from the first one on: a clock that is set otherwise"
        )
        late = (
            f"came late from step {step} on: {behind:.1f} s after the earliest ranks, where a step takes {table.pace():.1f} s"
        )
        yield Finding(
            "fleet_late",
            severity,
            f"{subject} {text if severity == 'info' else late}" + (" would look the same" if severity == "info" else ""),
            step,
            table.catalog.places.get(ranks[0]),
            measured=behind,
            floor=floor,
            next=f"compare clocks, disk and load of rank {ranks[0]}'s machine with those of a rank that is on time",
            ranks=tuple(ranks),
        )
