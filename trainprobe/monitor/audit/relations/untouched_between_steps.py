"""Only the optimizer changes weights and optimizer state.

Relation: for every parameter, its master weight and every tensor of its state, the next update begins with exactly what the
last update left. Checked if the audited steps are consecutive. The running statistics of normalisation layers are unchanged
from the last update to the next forward pass. This is judged on the first rank of each data-parallel group, because wrappers
broadcast its buffers before a forward pass. If other steps lie between, such a layer averaged as many batches in each of them
(`num_batches_tracked`) as in each audited step, of which there were three or more.
State is not compared where optimizers take turns over the same parameters, as each has its own.
Left out are frozen parameters that are moved from the start (the average of a student), parameters that no optimizer holds and
no loss reaches, parameters that the program updates by hand (each with the statistics of their layers), and those that other
ranks hand over. State that neither update changed for any parameter is left out too: it is kept for another purpose (the
weights before an ascent). So are weights that were clamped to common bounds (the critic of Arjovsky et al., 2017), and weights
that now have unit length (prototypes on a sphere). Tolerance zero. It is 1e-5 of the norm, for norm, max and min, if weights
are transformed and restored: for an ascent in this step, or by an optimizer whose groups have a `train_mode` (schedule-free
optimizers do so for an evaluation).
Usually caused by state that was lost, reset or mixed up in saving and loading, by weights that were overwritten in place, by
master weights that are made again from rounded ones, or by corrupted memory. If one parameter now has the former state of
another, the finding says so.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more, plural
from trainprobe.monitor.audit.evidence import Evidence, TensorsOfStep
from trainprobe.monitor.audit.facts.gradients import UsedGradients
from trainprobe.monitor.audit.facts.updates import BufferStates, UpdateCounts, UsedGroups
from trainprobe.monitor.audit.untrained import averaged_parameters, is_part_of, untrained_parameters

COST = frozenset({"fingerprints"})
OBSERVERS = frozenset({"buffers", "gradient_use", "parameter_groups", "updates"})
STAGE = "state"
_WEIGHTS = ("value", "main_value")
_TURNED_BACK = 1e-5  # of the norm: what is left of turning weights into others and back
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_LOOKS = 3  # audited steps with the same number of batches


def check(evidence: Evidence) -> list[Finding]:
    """Find tensors that were changed between two updates."""
    before = evidence.before
    if before is not None and evidence.passed > 1:
        return _averaged_elsewhere(evidence, before)
    if before is None or not evidence.follows or not (before.of(UpdateCounts).once and evidence.of(UpdateCounts).once):
        return []
    written: dict[str, list[str]] = {}
    known = {slot for _, slot in before.tensors.rows}
    slots = dict.fromkeys(slot for _, slot in evidence.tensors.rows if f"{slot}_after" in known)
    if evidence.of(UpdateCounts).in_turns:
        slots = dict.fromkeys(["value"])
    for slot in (slot for slot in slots if slot != "step"):  # counters have a relation of their own
        copied = evidence.mastered | _of_others(evidence) if slot == "value" else ()
        held = [name for name in evidence.tensors.with_slot(slot) if name not in copied]
        turned = _turned_back(evidence, before, held) if slot == "value" else ()
        changed = [name for name in held if name not in turned and _changed(evidence, before, name, slot)]
        if slot == "value" and (_are_clamped(evidence, before, changed) or _are_normalised(evidence, changed)):
            continue
        if changed and (slot in _WEIGHTS or _is_updated(evidence, slot) or _is_updated(before, slot)):
            written[slot] = changed
    found = _written(evidence, before, written)
    found += [] if "value" in written else _statistics(evidence, before)  # what writes to both is told of the weights
    return found if evidence.of(UpdateCounts).in_turns else [*found, *_gone(evidence, before)]


def _gone(evidence: Evidence, before: Evidence) -> list[Finding]:
    """Find state that is no longer there."""
    gone = [
        (name, slot.removesuffix("_after"))
        for name, slot in before.tensors.rows
        if slot.endswith("_after")
        and slot != "value_after"
        and name in set(evidence.tensors.names)
        and (name, slot.removesuffix("_after")) not in evidence.tensors
    ]
    if not gone:
        return []
    names, slot = list(dict.fromkeys(name for name, _ in gone)), gone[0][1]
    another = ": another optimizer makes this update" if evidence.of(UpdateCounts).another else ""
    text = f"the optimizer state {slot} of {and_more(names)} is gone since step {before.step}{another}"
    hint = "look at which parameters each optimizer was given; nothing is wrong where one is to take over" if another else None
    was = "as the last update left it"
    return [evidence.found(text, names, slot, next=hint, measured="absent", expected=was, severity="error")]


def remember(evidence: Evidence) -> dict[str, tuple[float, int]]:
    """Return layer → the batches that it averages in each audited step so far, -1 where that varies, and how many these are."""
    known: dict[str, tuple[float, int]] = dict(evidence.remembered("untouched_between_steps", {}))
    for name, (begun, ended) in evidence.of(BufferStates).averaged.items():
        each, looks = known.get(name, (ended - begun, 0))
        known[name] = (each if each == ended - begun else -1.0), looks + 1
    return known


def _averaged_elsewhere(evidence: Evidence, before: Evidence) -> list[Finding]:
    """Find running statistics that have averaged more batches than the steps since the last audited one have."""
    if any(evidence.place.axes.get(axis, (0, 1))[0] for axis in ("dp", "cp")):
        return []
    was, now, each = before.of(BufferStates).averaged, evidence.of(BufferStates).averaged, remember(evidence)
    steps = max(evidence.passed - 1, evidence.of(UpdateCounts).between)
    more = {
        name: now[name][0] - was[name][1] - steps * each[name][0]
        for name in now
        if name in was and each[name][0] > 0 and each[name][1] >= _LOOKS
    }
    moved = [name for name, batches in more.items() if batches > 0]
    if not moved:
        return []
    first = moved[0]
    layers = [name.rpartition(".")[0] or "root" for name in moved]
    text = (
        f"the running statistics of {and_more(layers)} averaged {more[first]:.0f} more {plural(int(more[first]), 'batch')} "
        f"between steps {before.step} and {evidence.step} than these steps train on ({each[first][0]:.0f} each). The model ran "
        "in training mode outside of the steps"
    )
    return [_moved_outside(evidence, text, moved, f"{more[first]:.0f} more", "as many as the steps have")]


def _moved_outside(evidence: Evidence, text: str, names: list[str], measured: str, expected: str) -> Finding:
    hint = "call model.eval() before evaluating"
    return evidence.found(text, names, "buffer", next=hint, measured=measured, expected=expected)


def _of_others(evidence: Evidence) -> frozenset[str]:
    """Return the parameters that other ranks step and hand over, and frozen ones that something has moved before."""
    here = frozenset(name for group in evidence.of(UsedGroups).groups for name in group.names)
    driven, beside = evidence.history.driven, averaged_parameters(evidence)
    from_start = {name for name in untrained_parameters(evidence) if driven.get(name, 0) >= 0}
    return (evidence.history.handed_over - here) | from_start | beside | evidence.of(UpdateCounts).by_hand


def _turned_back(evidence: Evidence, before: Evidence, names: list[str]) -> frozenset[str]:
    """Return the weights that an ascent or a schedule-free optimizer may have turned into others and back since."""
    free = frozenset(name for group in evidence.of(UsedGroups).groups if "train_mode" in group.options for name in group.names)
    free |= frozenset(names if evidence.of(UsedGradients).climbs else ())
    return frozenset(name for name in names if name in free and _is_about_the_same(evidence, before, name))


def _is_about_the_same(evidence: Evidence, before: Evidence, name: str) -> bool:
    tolerance = _TURNED_BACK * before.tensors.number(name, "value_after", "norm")
    was, now = (
        [tensors.number(name, slot, statistic) for statistic in ("norm", "max", "min")]
        for tensors, slot in ((before.tensors, "value_after"), (evidence.tensors, "value"))
    )
    return all(abs(x - y) <= tolerance for x, y in zip(was, now, strict=True))


def _are_clamped(evidence: Evidence, before: Evidence, names: list[str]) -> bool:
    """Tell whether all that changed was cut off at two bounds, which several tensors share or which differ by the sign."""

    def sides(tensors: TensorsOfStep, slot: str) -> list[tuple[float, float]]:
        return [(tensors.number(name, slot, "min"), tensors.number(name, slot, "max")) for name in names]

    was, now = sides(before.tensors, "value_after"), sides(evidence.tensors, "value")
    low, high = min((a for a, _ in now), default=0.0), max((b for _, b in now), default=0.0)
    shared = low == -high or sum((a == low) + (b == high) for a, b in now) > 2
    return shared and now == [(min(max(a, low), high), max(min(b, high), low)) for a, b in was]


def _are_normalised(evidence: Evidence, names: list[str]) -> bool:
    """Tell whether all that changed has unit length now: as a whole, in each row or in each column."""
    shapes = {p.name: p.shape for p in evidence.model.parameters}

    def has_unit_length(name: str) -> bool:
        square, shape = evidence.tensors.number(name, "value", "norm") ** 2, shapes.get(name, ())
        return any(abs(square - count) <= _TURNED_BACK * count for count in (1, *shape[:2]))

    return all(map(has_unit_length, names))


def _statistics(evidence: Evidence, before: Evidence) -> list[Finding]:
    """Find running statistics that moved between two steps: something ran the model in training mode."""
    if any(evidence.place.axes.get(axis, (0, 1))[0] for axis in ("dp", "cp")):
        return []
    was, now = before.of(BufferStates).updated, evidence.of(BufferStates).begun
    moved = [name for name in now if name.rpartition(".")[2] in _STATISTICS and was.get(name, now[name]) != now[name]]
    beside = averaged_parameters(evidence) | {
        n for n in untrained_parameters(evidence) if _changed(evidence, before, n, "value")
    }
    moved = [name for name in moved if not is_part_of(beside, name.rpartition(".")[0], evidence)]
    if not moved:
        return []
    text = (
        f"the running statistics {and_more(moved)} changed between steps {before.step} and {evidence.step}. The model ran in "
        "training mode outside of a step, on data that is not of the training"
    )
    return [_moved_outside(evidence, text, moved, "changed", "unchanged")]


def _is_updated(evidence: Evidence, slot: str) -> bool:
    """Tell whether the update of a step changed a tensor of the optimizer's state of any parameter."""
    seen = evidence.tensors
    return any(seen.checksum(name, slot) != seen.checksum(name, f"{slot}_after") for name in seen.with_slot(f"{slot}_after"))


def _changed(evidence: Evidence, before: Evidence, name: str, slot: str) -> bool:
    was, now = before.tensors.checksum(name, f"{slot}_after"), evidence.tensors.checksum(name, slot)
    return was is not None and now is not None and was != now


def _written(evidence: Evidence, before: Evidence, written: dict[str, list[str]]) -> list[Finding]:
    """Return a finding for each write. Slots of the same parameters were written together: the first of them is named."""
    found: list[Finding] = []
    while written:
        first = next(iter(written))
        together = [slot for slot, names in written.items() if not set(names).isdisjoint(written[first])]
        names = list(dict.fromkeys(name for slot in together for name in written.pop(slot)))
        found.append(_finding(evidence, before, together, names))
    return found


def _finding(evidence: Evidence, before: Evidence, slots: list[str], names: list[str]) -> Finding:
    first, slot = names[0], slots[0]
    now = evidence.tensors.checksum(first, slot)
    origin = next(
        (
            n
            for n in before.tensors.with_slot(f"{slot}_after")
            if n != first and before.tensors.checksum(n, f"{slot}_after") == now
        ),
        None,
    )
    old, new = before.tensors.number(first, f"{slot}_after", "norm"), evidence.tensors.number(first, slot, "norm")
    if new == 0 and old != 0:
        how = "It was set to zero: the state was lost in loading, or reset"
    elif origin is not None:
        how = f"It is now what that of {origin} was: the state was assigned to the wrong parameter"
    else:
        how = "Something wrote to it: an in-place change, a load, or corrupted memory"
    what = {"value": "the weight", "main_value": "the master weight"}.get(slot, f"the optimizer state {slot}")
    more = f", and {and_more(slots[1:])} with it" if slots[1:] else ""
    text = (
        f"{what} of {and_more(names, len(evidence.tensors.names))} changed between the updates of steps "
        f"{before.step} and {evidence.step} (norm {old:.9g} to {new:.9g}){more}. {how}"
    )
    return evidence.found(text, names, slot, measured=new, expected=old, floor=0.0, severity="error")
