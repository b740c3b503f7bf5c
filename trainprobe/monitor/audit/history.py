"""What several relations learn of a training from one audited step to the next: what moves by itself, the largest rates."""

from __future__ import annotations

from dataclasses import replace

from trainprobe.monitor.audit.evidence import AuditHistory, Evidence, along, streaks_with
from trainprobe.monitor.audit.facts.updates import UsedGroups
from trainprobe.monitor.audit.messages import key_of
from trainprobe.monitor.audit.untrained import untrained_parameters

STEADY = 3  # audited steps in a row after which something is expected to stay as it is


def learned(evidence: Evidence) -> AuditHistory:
    """Return what is known of the training after this step."""
    return replace(evidence.history, driven=_driven(evidence), streaks=streaks_with(evidence), peaks=_peaks(evidence))


def _peaks(evidence: Evidence) -> tuple[float, ...]:
    rates, peaks = evidence.of(UsedGroups).rates, evidence.history.peaks
    return tuple(map(max, rates, peaks)) if len(rates) == len(peaks) else rates or peaks


def handed_over(evidence: Evidence) -> frozenset[str]:
    """Return the parameters that some ranks of a replica group step and others do not."""
    found: set[str] = set()
    for p in evidence.model.parameters if len(evidence.peers) > 1 else ():
        key = key_of(p.name, "stepped")
        stepped = [key in peer.rows for peer in along(evidence, evidence.over(p.name, "value"))] if p.trainable else []
        if any(stepped) and not all(stepped):
            found.add(p.name)
    return frozenset(found)


def stepped_here(evidence: Evidence) -> dict[int, tuple[int, float]]:
    """Return what a rank reports of the parameters that its optimizers step, if these are not all that are trained."""
    trained = [p for p in evidence.model.parameters if p.trainable]
    if all(p.owned is not False for p in trained):
        return {}
    return {key_of(p.name, "stepped"): (1, 0.0) for p in trained if p.owned}


def _driven(evidence: Evidence) -> dict[str, int]:
    before, seen, driven = evidence.before, evidence.tensors, dict(evidence.history.driven)
    if before is None:
        return driven
    moved: dict[str, bool] = {}
    for name in untrained_parameters(evidence):
        was, now = before.tensors.checksum(name, "value_after"), seen.checksum(name, "value")
        if was is None or now is None or driven.get(name, 0) < 0:
            continue
        moved[name] = was != now
    for name, moves in moved.items():
        root = name.partition(".")[0]
        together = moves or name in driven or any(m for other, m in moved.items() if other.partition(".")[0] == root)
        driven[name] = driven.get(name, 0) + 1 if moves else 0 if together else -1
    return driven
