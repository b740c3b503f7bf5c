"""Training and evaluation modes agree: over steps, chunks and ranks.

Relation: in a step with a backward pass the model is in training mode; modules are in the mode they were in at the audited
step before; chunks of one model, and ranks that hold the same part of it, have the same modes. Tolerance none. Modules
of a moving average beside the model are left out. Where no module is in training mode as any backward pass begins, layers that
drop or keep running statistics, beside trained parameters, are named in a warning.
Usually caused by an evaluation that did not switch back (or switched only one chunk), which turns dropout off and freezes the
running statistics of batch normalisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence, along, group_words
from trainprobe.monitor.audit.facts.gradients import Backwards
from trainprobe.monitor.audit.facts.updates import BufferStates, UpdateCounts
from trainprobe.monitor.audit.messages import key_of
from trainprobe.monitor.audit.untrained import averaged_parameters, is_part_of

COST = frozenset({"host"})
OBSERVERS = frozenset({"backward_starts", "buffers", "training_modes", "updates"})
STAGE = "forward"


@dataclass(frozen=True, slots=True)
class RestingModel:
    """Whether the model was trained in evaluation mode."""

    rests: bool = False
    """No module was in training mode as any backward pass began."""


def check(evidence: Evidence) -> list[Finding]:
    """Find modules that are in another mode than they should be."""
    modes = evidence.model.modes
    if not evidence.of(Backwards).count:
        return []
    chunks = {name: mode for name, mode in modes.items() if name.endswith(".")}  # "0." is a chunk, "0" a module of the model
    before = evidence.before.model.modes if evidence.before is not None else evidence.set_up.modes
    changed = [name for name, mode in modes.items() if before.get(name, mode) != mode]
    beside = averaged_parameters(evidence)
    off = [name for name in changed if not modes[name] and not is_part_of(beside, name, evidence)]
    if off and evidence.before is not None:
        first = off[0] or "root"
        text = (
            f"{len(off)} of {len(modes)} modules left training mode since step {evidence.before.step}: "
            f"{and_more([n or 'the whole model' for n in off])}"
        )
        return [_finding(evidence, text, first, "evaluation mode", "training mode", off)]
    if len(set(chunks.values())) > 1:
        first = next(name for name, mode in chunks.items() if not mode)
        return [
            _finding(
                evidence,
                f"chunk {first.rstrip('.')} of the model is in evaluation mode, others are in training mode",
                first,
                "mixed",
                "one mode",
            )
        ]
    if resting := _resting(evidence, beside):
        text = (
            "the whole model trains in evaluation mode, so dropout is off and running statistics do not change: "
            f"{and_more(resting)}"
        )
        return [_finding(evidence, text, resting[0], "evaluation mode", "training mode", resting, severity="warning")]
    axes = frozenset({"dp", "cp", "tp"})
    group = along(evidence, axes)
    if len({peer.marks["modes"] for peer in group}) > 1:
        in_eval_mode = {
            name: [p.rank for p in group if key_of(name, "rests") in p.rows] for name, mode in modes.items() if mode
        }
        differing = [name for name, ranks in in_eval_mode.items() if ranks and not is_part_of(beside, name, evidence)]
        if not differing:
            return []  # ranks with other modules, or this one rests: the others tell
        first = next((name for name in differing if name), "root")
        ranks = ", ".join(map(str, in_eval_mode.get(first, in_eval_mode.get("", ()))))
        text = (
            f"training modes differ in the {group_words(evidence, axes, group)}: {first} is in evaluation "
            f"mode on rank {ranks} only"
        )
        return [_finding(evidence, text, first, "evaluation mode", "equal on all ranks", differing)]
    return []


def _resting(evidence: Evidence, beside: frozenset[str]) -> list[str]:
    """Return the layers of a model without any module in training mode that would do something else in it, and are trained."""
    if not evidence.of(RestingModel).rests or not evidence.of(UpdateCounts).updates:
        return []
    kept = {name.rpartition(".")[0] for name in evidence.of(BufferStates).updated if name.rpartition(".")[2] == "running_mean"}
    trained = [name for p in evidence.model.parameters if p.trainable for name in p.names if name not in beside]
    layers = (layer for layer in evidence.model.modes if layer in kept or layer in evidence.model.dropouts)
    around = ((layer, layer.rpartition(".")[0]) for layer in layers)
    return [layer for layer, module in around if any(name.startswith(f"{module}." if module else "") for name in trained)]


def _finding(
    evidence: Evidence, text: str, name: str, measured: str, expected: str, names: Sequence[str] = (), severity: str = "error"
) -> Finding:
    hint = "call model.train() after every evaluation, on every chunk and rank"
    return evidence.found(
        text,
        name.rstrip(".") or "root",
        "mode",
        next=hint,
        measured=measured,
        expected=expected,
        kind="module",
        severity=severity,
        names=[other or "root" for other in names],
    )
