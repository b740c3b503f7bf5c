"""What is learned of a training from one audited step to the next: what moves by itself, which settings stay, and so on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainprobe.monitor.audit.class_shares import observed
from trainprobe.monitor.audit.evidence import Evidence, Past, along, resting, streaks_with
from trainprobe.monitor.audit.messages import key_of
from trainprobe.monitor.audit.recurrences import learned
from trainprobe.monitor.audit.relations.divided_losses import micro_batches
from trainprobe.monitor.audit.relations.learning_rate import follows
from trainprobe.monitor.audit.relations.rates_together import paces
from trainprobe.monitor.audit.relations.reduced_gradients import divisor_of
from trainprobe.monitor.audit.relations.reported_loss import exactly_explained
from trainprobe.monitor.audit.relations.shuffled_data import classes_in_a_row

STEADY = 3  # audited steps in a row after which something is expected to stay as it is
_RANDOM_STATES = 32  # that are remembered
SETTINGS = frozenset(
    {"betas", "momentum", "weight_decay", "eps", "alpha", "dampening", "nesterov", "amsgrad", "rho", "maximize", "centered"}
)


def remembered(evidence: Evidence) -> Past:
    """Return what is known of the training after this step."""
    past = evidence.past
    return replace(
        past,
        exactly=past.exactly + 1 if exactly_explained(evidence) else 0,
        driven=_driven(evidence),
        randoms=(*past.randoms, evidence.facts.random)[-_RANDOM_STATES:],
        settings=_settings(evidence),
        divisor=_divisor(evidence),
        recurrences=learned(evidence),
        paced=past.paced | {s.kind for s in evidence.facts.schedules if 0 < s.advances <= s.updates},
        kept=past.kept + 1 if evidence.facts.updates and not evidence.facts.discarded else 0,
        followed=past.followed | {s.kind for s in evidence.facts.schedules if follows(s)},
        streaks=streaks_with(evidence),
        peaks=_peaks(evidence),
        micro_batches=micro_batches(evidence),
        paces=paces(evidence),
        classes=classes_in_a_row(past.classes, evidence.facts),
        class_shares=observed(past.class_shares, evidence.facts),
    )


def _peaks(evidence: Evidence) -> tuple[float, ...]:
    rates, peaks = evidence.facts.rates, evidence.past.peaks
    return tuple(map(max, rates, peaks)) if len(rates) == len(peaks) else rates or peaks


def handed_over(evidence: Evidence) -> frozenset[str]:
    """Return the parameters that some ranks of a replica group step and others do not."""
    found: set[str] = set()
    for p in evidence.model.parameters if len(evidence.peers) > 1 else ():
        key = key_of(p.name, "stepped")
        told = [key in peer.rows for peer in along(evidence, evidence.over(p.name, "value"))] if p.trainable else []
        if any(told) and not all(told):
            found.add(p.name)
    return frozenset(found)


def stepped_here(evidence: Evidence) -> dict[int, tuple[int, float]]:
    """Return what a rank tells of the parameters that its optimizers step, where these are not all that are trained."""
    trained = [p for p in evidence.model.parameters if p.trainable]
    if all(p.owned is not False for p in trained):
        return {}
    return {key_of(p.name, "stepped"): (1, 0.0) for p in trained if p.owned}


def settings_of(evidence: Evidence) -> dict[tuple[int, str], Any]:
    """Return (parameter group, setting) → value of what schedulers of the rate leave as it is."""
    groups = enumerate(evidence.facts.groups)
    return {(i, name): value for i, group in groups for name, value in group.options.items() if name in SETTINGS}


def _driven(evidence: Evidence) -> dict[str, int]:
    before, seen, driven = evidence.before, evidence.tensors, dict(evidence.past.driven)
    if before is None:
        return driven
    moved: dict[str, bool] = {}
    for name in resting(evidence):
        was, now = before.tensors.checksum(name, "value_after"), seen.checksum(name, "value")
        if was is None or now is None or driven.get(name, 0) < 0:
            continue
        moved[name] = was != now
    for name, moves in moved.items():
        beside = name.partition(".")[0]
        together = moves or name in driven or any(m for other, m in moved.items() if other.partition(".")[0] == beside)
        driven[name] = driven.get(name, 0) + 1 if moves else 0 if together else -1
    return driven


def _settings(evidence: Evidence) -> dict[tuple[int, str], tuple[Any, int]]:
    known = evidence.past.settings
    if not evidence.facts.groups:
        return dict(known)
    now = settings_of(evidence)
    return {key: (value, known[key][1] + 1 if known.get(key, (None, 0))[0] == value else 1) for key, value in now.items()}


def _divisor(evidence: Evidence) -> tuple[float, int, int]:
    factor, (was, passes, count) = divisor_of(evidence), evidence.past.divisor
    if factor is None:
        return evidence.past.divisor
    same = passes == evidence.facts.backwards and abs(factor - was) <= 1e-2 * abs(was)
    return factor, evidence.facts.backwards, count + 1 if same else 1
