"""A run that is resumed goes on with schedule and data where it stood.

Relation: after a load (see `saved_and_loaded`, which tells the save that it was) no scheduler stands before where one of its
class stood at the save; and the first data is not that of the first audited step, where the data of at least three steps
was remembered and all of it differed. Where there are other ranks than at the save, or tensors are cut in another way, rank 0
judges it for all when the ranks next compare anything: the data of all ranks then, of which no micro-batch may be among
those of all ranks at the first audited step (one that was cut to another size is not known again). Tolerance none.
Usually caused by a scheduler that is left out of the checkpoint, so that the warm-up begins again, or by a data iterator that
is made anew, so that the first part of the data is seen twice and the last never.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainprobe.engine.facts import SavedTensors, Schedule
from trainprobe.engine.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.relaid import Relaid, data_of_save, first_data, what_was_loaded

COST = frozenset({"host"})
EVERY = 10
STAGE = "state"


def check(evidence: Evidence) -> list[Finding]:
    """Find schedules and data that begin again."""
    saved, relaid = evidence.resumed, evidence.relaid
    found: list[Finding] = []
    if saved is not None:
        found += _schedule(evidence, saved, evidence.facts.schedules)
        found += _data(evidence, saved) if relaid is None else []
    if relaid is not None and relaid.judgeable(evidence.peers):
        found += _over_layouts(evidence, relaid)
    return found


def _over_layouts(evidence: Evidence, relaid: Relaid) -> list[Finding]:
    """Judge on rank 0, which has read what was saved, what all ranks did first."""
    saved = what_was_loaded(relaid, evidence.peers)
    if saved is None:
        return []
    found = _schedule(evidence, saved, relaid.schedules or ())
    known = data_of_save(relaid, saved)
    if len(known) < 3 or len(frozenset().union(*(data for _, data in known))) < sum(len(data) for _, data in known):
        return found
    step, data = known[0]
    return [*found, *_begins_again(evidence, relaid.step, step)] if data & first_data(relaid, evidence.peers) else found


def _schedule(evidence: Evidence, saved: SavedTensors, schedules: Sequence[Schedule]) -> list[Finding]:
    for schedule in schedules:
        stood = saved.positions.get(schedule.kind)
        stands = schedule.position if schedule.rates or schedule.actual else schedule.position - schedule.advances
        if stood is None or stands >= stood:
            continue
        text = (
            f"the schedule begins again: {schedule.kind} stands at {stands} after the load, and stood at {stood} when it was "
            f"saved at step {saved.step}"
        )
        hint = "save and load the scheduler with the optimizer"
        return [
            evidence.finding("resumed", text, "lr", measured=float(stands), expected=float(stood), kind="scalar", next=hint)
        ]
    return []


def _data(evidence: Evidence, saved: SavedTensors) -> list[Finding]:
    known = [batches for _, batches in saved.batches]
    now = evidence.facts.batches
    if not evidence.facts.saved or len(known) < 3 or len(set(known)) < len(known) or now != known[0]:
        return []
    return _begins_again(evidence, evidence.step, saved.batches[0][0])


def _begins_again(evidence: Evidence, step: int, first: int) -> list[Finding]:
    text = f"the data begins again: step {step} after the load trains on what step {first} trained on"
    hint = "save where the data iterator stands, or skip what was seen"
    return [
        evidence.finding(
            "resumed",
            text,
            "batch",
            "input",
            measured="equal",
            expected="different",
            kind="scalar",
            severity="warning",
            next=hint,
        )
    ]
