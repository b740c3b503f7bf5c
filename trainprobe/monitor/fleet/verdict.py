"""Findings about a fleet: who left its replicas, who made the first NaN, who stopped or comes late, whose scalars deviate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainprobe.engine.core.findings import in_folder
from trainprobe.engine.core.records import Finding, Site
from trainprobe.engine.core.words import counted
from trainprobe.engine.storage.run_log.schema import kind_of_address
from trainprobe.engine.storage.step_counts import shortfall
from trainprobe.monitor.fleet.clocks import Timetable, late_ranks, missing_steps
from trainprobe.monitor.fleet.groups import Group
from trainprobe.monitor.fleet.origin import first_not_finite
from trainprobe.monitor.fleet.scalars import deviating_scalars
from trainprobe.monitor.fleet.survey import Survey
from trainprobe.monitor.fleet.words import place_in_words, ranks_in_words
from trainprobe.monitor.remote_run import origin
from trainprobe.monitor.rules import GRAVITY

Place = Mapping[str, Any]  # a row of `Examined.places`


@dataclass(frozen=True, slots=True)
class FleetVerdict:
    """What is known of a fleet. findings: gravest first, then by step. compared, compared_ranks: how many values a step were
    compared, in all groups together, and among how many ranks. notes: what was not seen, and on what the grouping rests.
    """

    survey: Survey
    table: Timetable
    findings: tuple[Finding, ...]
    compared: int
    compared_ranks: int
    notes: tuple[str, ...]

    @property
    def code(self) -> int:
        """Return the exit code: 0 nothing found, 1 a warning or an error, 3 steps were lost, or no rank has a replica."""
        if any(finding.severity != "info" for finding in self.findings):
            return 1
        return 0 if self.compared and not self.short else 3

    @property
    def short(self) -> str:
        """Return "4 of 300 steps recorded of rank 2", empty where no step is missing."""
        return shortfall(self.survey.catalog.folder, self.survey.catalog.written)


def judge_fleet(survey: Survey) -> FleetVerdict:
    """Judge what `survey` learned."""
    catalog, table = survey.catalog, Timetable(survey.catalog)
    spelled = {row["place"]: row for row in survey.table("places").to_pylist()}
    found = [
        *_parted(survey, spelled),
        *first_not_finite(survey, spelled),
        *missing_steps(table),
        *late_ranks(table),
        *deviating_scalars(survey.table("scalars"), survey.groups, catalog.places),
        *_unreadable(survey),
        *_absent(survey),
    ]
    found.sort(key=lambda f: (-GRAVITY[f.severity], f.step if f.step is not None else -1))
    findings = tuple(in_folder(finding, origin(catalog.folder)) for finding in found)
    values = {row["grp"]: row["places"] for row in survey.table("compared").to_pylist()}
    ranks = sum(len(group.ranks) for group in survey.groups if values.get(group.number))
    return FleetVerdict(survey, table, findings, sum(values.values()), ranks, tuple(_notes(survey, values)))


def _parted(survey: Survey, spelled: Mapping[int, Place]) -> list[Finding]:
    """Return a finding for each first place in which ranks left their replicas, and for each group that fell apart."""
    groups = {group.number: group for group in survey.groups}
    group_of = {rank: group.number for group in survey.groups for rank in group.ranks}
    tied: dict[int, dict[str, Any]] = {}
    for row in survey.table("tied").to_pylist():
        if row["grp"] not in tied or row["step"] < tied[row["grp"]]["step"]:
            tied[row["grp"]] = row
    first: dict[int, dict[str, Any]] = {}
    steps: dict[int, int] = {}
    for row in survey.table("differing").to_pylist():
        rank = row["rank"]
        before = tied.get(group_of[rank])
        if before is None or row["step"] < before["step"]:
            steps[rank] = steps.get(rank, 0) + 1
            if rank not in first or row["step"] < first[rank]["step"]:
                first[rank] = row
    together: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for rank, row in sorted(first.items()):
        together.setdefault((group_of[rank], row["step"], row["place"]), []).append(row)
    found = [_left(survey, groups[key[0]], rows, spelled[key[2]], steps) for key, rows in together.items()]
    return [
        *found,
        *(_group_without_majority(survey, groups[number], row, spelled[row["place"]]) for number, row in tied.items()),
    ]


def _left(survey: Survey, group: Group, rows: Sequence[Mapping[str, Any]], place: Place, steps: Mapping[int, int]) -> Finding:
    ranks, step = [row["rank"] for row in rows], rows[0]["step"]
    places = survey.catalog.places
    stayed = next((rank for rank in group.ranks if rank not in ranks), ranks[0])
    where = place_in_words(places[ranks[0]]) if len(ranks) == 1 else group.label
    more = f"{rows[0]['n']} values differ" if rows[0]["n"] > 1 else "it alone differs"
    subject = ranks_in_words(ranks, places)
    return Finding(
        "fleet_replicas",
        "error",
        f"{subject}{f' ({where})' if where else ''} left {len(group.ranks) - len(ranks)} replicas at step {step} in "
        f"{_in_words(place)} ({more} at that step; values differ at {counted(steps[ranks[0]], 'step')})",
        step,
        places[ranks[0]],
        _site(place),
        next=_compare(step, stayed, ranks[0]),
        count=steps[ranks[0]],
        ranks=tuple(ranks),
    )


def _compare(step: int, stayed: int, left: int) -> str:
    return (
        f"run again from before step {step} with `level: mix, summary: both, step: [{step}], rank: [{stayed}, {left}]`, then "
        f"`trainprobe dump-compare OUTPUT/step{step}/rank{stayed} OUTPUT/step{step}/rank{left}`; where nothing differs then, "
        f"test the machine of rank {left}"
    )


def _group_without_majority(survey: Survey, group: Group, row: Mapping[str, Any], place: Place) -> Finding:
    subject = ranks_in_words(group.ranks, survey.catalog.places)
    return Finding(
        "fleet_replicas",
        "error",
        f"{subject} ({group.label}) are replicas and differ from step {row['step']} in {_in_words(place)}: "
        f"{row['n']} values differ and no majority holds the same bits, so which rank is wrong cannot be told",
        row["step"],
        survey.catalog.places[group.ranks[0]],
        _site(place),
        next=f"look at what joins gradients and parameters of these ranks before step {row['step']}: an all-reduce that a rank "
        "left out, a parameter outside of the wrapper, a random op in the update",
        ranks=group.ranks,
    )


def _in_words(place: Place) -> str:
    return f"{place['kind']} {place['name']}, {place['slot'].replace('_', ' ')}"


def _site(place: Place) -> Site:
    return Site(kind_of_address(place["kind"]), place["name"], place["slot"], place["call"])  # pyright: ignore[reportArgumentType]


def _unreadable(survey: Survey) -> list[Finding]:
    bad = {rank: files.unreadable for rank, files in survey.catalog.files.items() if files.unreadable}
    return [
        Finding(
            "fleet_files",
            "warning",
            f"{why}; this rank is judged without it",
            next=f"fetch {Path(survey.catalog.files[rank].folder).name} again from the machine that wrote it",
            ranks=(rank,),
        )
        for rank, why in sorted(bad.items())
    ]


def _absent(survey: Survey) -> list[Finding]:
    """Return a finding where some ranks of the job left nothing; where most did, the plan has chosen the others."""
    places, absent = survey.catalog.places, _without_log(survey)
    if not absent or len(absent) >= len(places):
        return []
    return [
        Finding(
            "fleet_files",
            "warning",
            f"{ranks_in_words(absent, places)} left no run log, of {len(places) + len(absent)}: nothing is known of them",
            next=f"look at the log of rank {absent[0]}'s process, which may have ended before its first step, or fetch "
            f"rank{absent[0]} from the machine that wrote it",
            ranks=tuple(absent),
        )
    ]


def _without_log(survey: Survey) -> list[int]:
    places = survey.catalog.places
    world_size = max((place.world_size for place in places.values()), default=0)
    return sorted({*range(world_size)} - places.keys() - survey.catalog.files.keys())


def _notes(survey: Survey, values: Mapping[int, int]) -> list[str]:
    """Say what the grouping rests on, and what was not seen."""
    groups, notes = survey.groups, [*filter(None, [shortfall(survey.catalog.folder, survey.catalog.written)])]
    learned = [group for group in groups if not group.by_topology and len(group.ranks) > 1]
    if learned:
        notes.append(
            f"the topology in the log does not tell which ranks are replicas: {len(learned)} groups were formed of ranks with "
            "equal layouts and equal parameters at the first step"
        )
    alone = sum(len(group.ranks) for group in groups if not values.get(group.number))
    if alone:
        notes.append(
            f"{alone} ranks have no replica with the same values at first (data-parallel size 1, or shards of their own): "
            "their values were not compared"
        )
    if any(values.values()) and not any(one.fingerprints for one in survey.examined):
        notes.append(
            "the run took no fingerprints: values were compared by their statistics, which a swap of elements does not change "
            "(`summary: both` takes fingerprints)"
        )
    absent = _without_log(survey)
    if absent and len(absent) >= len(survey.catalog.places):
        notes.append(f"{len(absent)} of the job's ranks left no run log: nothing is known of them")
    repeated = sum(len(steps) for steps in survey.catalog.repeated.values())
    if repeated:
        notes.append(f"{repeated} steps of ranks were logged more than once, after a restart: they were not compared")
    return notes


def differing_counts(verdict: FleetVerdict) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return how many values of each rank differ from its replicas' at each step, [ranks, steps] as in the timetable."""
    return _grid(verdict, "differing")


def bad_counts(verdict: FleetVerdict) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return how many values of each rank are not finite at each step, [ranks, steps] as in the timetable."""
    return _grid(verdict, "bad")


def _grid(verdict: FleetVerdict, name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    rows, table = verdict.survey.table(name), verdict.table
    grid = np.zeros(table.seconds.shape, np.int64)
    rank, step = (rows[column].to_numpy() for column in ("rank", "step"))
    grid[np.searchsorted(table.ranks, rank), np.searchsorted(table.steps, step)] = rows["n"].to_numpy()
    return grid
