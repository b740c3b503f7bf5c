"""A buffer that changes at each step continues to change while its module trains.

Relation: consider a buffer that changed between the first forward pass and the update at five or more audited steps in a row
(running statistics, an averaged codebook, a queue). It changes at each later step in which its module runs in training mode and
an update is made. Running statistics change if their batch counter (`num_batches_tracked`) did at five audited steps in a row.
Tolerance none. Reported as a warning.
Usually caused by a momentum of 0, by a buffer that was replaced, so that the module updates one object and saves the other, or
by a forward pass that takes another path after an evaluation. Modules in evaluation mode are left to `modes`. Not judged are
modules whose observer the program has just switched off (torch.ao's `observer_enabled`). A buffer of a module in training mode
that follows its data cannot violate this.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.calls import TrainingCalls
from trainprobe.monitor.audit.facts.updates import BufferStates, UpdateCounts

COST = frozenset({"fingerprints"})
OBSERVERS = frozenset({"buffers", "model_calls", "updates"})
STAGE = "update"
_LOOKS = 5
_STATISTICS, _COUNT = ("running_mean", "running_var"), "num_batches_tracked"


def check(evidence: Evidence) -> list[Finding]:
    """Find buffers that stand still."""
    known = evidence.history.streaks
    if not evidence.of(UpdateCounts).updates or evidence.before is None:
        return []
    moved = [name for (kind, name), streak in known.items() if kind == "moves" and streak.value and streak.count >= _LOOKS]
    running = [name for name in moved if (name.rpartition(".")[0] or "root") in evidence.of(TrainingCalls).called]
    stopped = [name for name in running if _stands(evidence, name) and not _is_switched_off(evidence, evidence.before, name)]
    if not stopped:
        return _never_moved(evidence)
    text = (
        f"{and_more(stopped, len(moved))} moved at each audited step until {evidence.before.step} and did not move at this one"
    )
    hint = "look for a changed momentum, a buffer that was assigned anew, or a forward that no longer updates it"
    return [evidence.found(text, stopped, "buffer", next=hint, measured="unchanged", expected="changed")]


def _never_moved(evidence: Evidence) -> list[Finding]:
    """Find running statistics that stand still while their module counts the batches that it averages."""
    buffers = evidence.of(BufferStates)
    counting = [
        module
        for name in buffers.begun
        if name.rpartition(".")[2] == _COUNT and not _stands(evidence, name)
        for module in [name.rpartition(".")[0]]
        if _streak(evidence, module, _COUNT, True) and all(_streak(evidence, module, s, False) for s in _STATISTICS)
    ]
    still = [_joined(module, name) for module in counting for name in _STATISTICS]
    still = [name for name in still if name not in buffers.spoiled]  # a NaN stays one: `finite_buffers` tells
    if not still or not all(_stands(evidence, name) for name in still):
        return []
    text = (
        f"{and_more(still)} has not moved at any audited step, though its module is in training mode and counts the batches "
        "that it averages. It is evaluated with the statistics that it began with"
    )
    hint = "give the normalisation layer a momentum above 0 (torch's default is 0.1)"
    return [evidence.found(text, still, "buffer", next=hint, measured="unchanged", expected="changed")]


def _streak(evidence: Evidence, module: str, name: str, moves: bool) -> bool:
    """Tell whether a buffer of a module moved, or stood still, at so many audited steps in a row before."""
    streak = evidence.history.streaks.get(("moves", _joined(module, name)))
    return streak is not None and streak.value == moves and streak.count >= _LOOKS


def _joined(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _is_switched_off(evidence: Evidence, before: Evidence, name: str) -> bool:
    """Tell whether the observer that moves a buffer, its module or one around it, was switched on or off since."""
    parts = name.split(".")
    switches = [".".join([*parts[:end], "observer_enabled"]) for end in range(1, len(parts))]
    return any(before.of(BufferStates).updated.get(s) != evidence.of(BufferStates).updated.get(s) for s in switches)


def _stands(evidence: Evidence, name: str) -> bool:
    buffers = evidence.of(BufferStates)
    return name in buffers.begun and buffers.begun[name] == buffers.updated.get(name)
