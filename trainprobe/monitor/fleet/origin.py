"""Which rank of a fleet made the first value that is not finite, and which ones were only handed it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.fleet.survey import Survey
from trainprobe.monitor.fleet.words import place_in_words, ranks_in_words
from trainprobe.monitor.frames_of_run_log import RunLog
from trainprobe.monitor.plan import make_rules
from trainprobe.monitor.watcher import judge_frames

Place = Mapping[str, Any]
_ENTERING = {"input", "kwargs", "grad_output"}
MADE, GIVEN, MADE_BACKWARD, GIVEN_BACKWARD, JOINED = range(5)
TRIES = 5


def first_not_finite(survey: Survey, spelled: Mapping[int, Place]) -> list[Finding]:
    """Return the finding on the first value that is not finite, by the rule `nonfinite` of the rank that had it first.

    Infinite gradients under a loss scale and constants are notes, as they are to that rule; what follows them is looked at.
    """
    rows = survey.table("bad").to_pylist()
    notes: list[Finding] = []
    begin = min((row["step"] for row in rows), default=None)
    for _ in range(TRIES):
        if begin is None:
            break
        here = [row for row in rows if row["step"] == begin]
        found = _judged(survey, _earliest(survey, here, spelled), len(here))
        if found.severity != "info":
            return [found]
        notes.append(found)
        begin = min((row["step"] for row in rows if row["step"] > begin), default=None)
    return notes[:1]


def _earliest(survey: Survey, rows: Sequence[Mapping[str, Any]], spelled: Mapping[int, Place]) -> list[Mapping[str, Any]]:
    """Return the rows of the ranks that come first: the first one, and those that are as early."""

    def order(row: Mapping[str, Any]) -> tuple[int, int]:
        how = how_it_came(spelled[row["place"]])
        stage = survey.catalog.places[row["rank"]].axes.get("pp", (0, 1))[0]
        return how, -stage if how in (MADE_BACKWARD, GIVEN_BACKWARD) else stage if how != JOINED else 0

    first = min(map(order, rows))
    return sorted((row for row in rows if order(row) == first), key=lambda row: (row["position"], row["rank"]))


def how_it_came(place: Place) -> int:
    """Tell how a rank's first value that is not finite came about, judged by where it stands; in the order of a step."""
    entering = place["slot"].partition(".")[0] in _ENTERING or place["kind"] == "collective"
    if (place["slot"] in ("grad", "grad_unclipped") and place["micro"] is None) or place["kind"] == "optimizer":
        return JOINED  # after the ranks' gradients were joined
    if place["phase"] in ("forward", "recompute"):
        return GIVEN if entering else MADE
    return GIVEN_BACKWARD if entering else MADE_BACKWARD


def _judged(survey: Survey, first: list[Mapping[str, Any]], count: int) -> Finding:
    rank, step = first[0]["rank"], first[0]["step"]
    catalog = survey.catalog
    frames = RunLog(catalog.files[rank].folder).frames([("step", ">=", step), ("step", "<=", step + TRIES)])
    rules = make_rules(["nonfinite"])
    found = next((f for f in _most_severe_first(judge_frames(frames, rules))), None)
    place = catalog.places[rank]
    text = found.message if found is not None else f"step {step} has values that are not finite"
    if len(first) > 1:
        subject = ranks_in_words([row["rank"] for row in first], catalog.places)
        head = f"{subject} have it alike, and nothing that was recorded came before: which of them made it cannot be told"
        advice = f"run again from before step {step} with `monitor: {{gradients: {{unreduced: true}}, activations: true}}`"
    else:
        where = place_in_words(place)
        head = f"rank {rank}{f' ({where})' if where else ''} had the first value that is not finite, at step {step}"
        head += f"; {count - 1} other ranks have one at that step, after it was handed on" if count > 1 else ""
        advice = None if found is None else found.next
    made = found or Finding("nonfinite", "error", text, step)
    ranks = tuple(sorted(row["rank"] for row in first))
    return replace(made, message=f"{head}: {text}", step=step, place=place, next=advice or made.next, ranks=ranks, count=1)


def _most_severe_first(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda f: (f.severity == "info", f.step or 0))
