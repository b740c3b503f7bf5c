"""The global state of the thread is the same at each update.

Relation: where the first optimizer of a step begins to update, the following are as at the audited step before: autocast, grad
mode, inference mode, the default dtype, deterministic algorithms and the precision of float32 matrix products. Autocast is off
there, since it is for the forward pass and the loss. Tolerance none. Reported as warnings, since a program may do either on
purpose.
Usually caused by an evaluation or a library that changes one of them and does not restore it (`torch.set_default_dtype`,
`set_float32_matmul_precision`, an `__enter__` without its end). New tensors, caches and optimizer states then have a different
dtype, and the same code computes different numbers. Another cause is `with torch.autocast` around the whole step. A loop whose
steps run the same code in the same place cannot violate this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence

COST = frozenset({"host"})
OBSERVERS = frozenset({"ambient_state"})
STAGE = "update"
PYTORCH_ONLY = "it is about global switches of torch"


@dataclass(frozen=True, slots=True)
class Ambient:
    """What holds for the whole thread where the first update of a step begins."""

    states: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name → state, in words: autocast, grad mode, default dtype …"""


def check(evidence: Evidence) -> list[Finding]:
    """Find the first of them that changed, or an update under autocast."""
    before = evidence.before.of(Ambient).states if evidence.before is not None else {}
    for name, now in evidence.of(Ambient).states.items():
        was = before.get(name, now)
        if was != now:
            step = evidence.before.step if evidence.before is not None else 0
            text = f"{name} at the update is {now} and was {was} at step {step}: something set it and did not restore it"
            hint = "look for what sets it between these steps (an evaluation, a callback, an import), and restore it there"
            return [_finding(evidence, name, text, now, was, hint)]
    now = evidence.of(Ambient).states.get("autocast", "off")
    if now != "off":
        text = (
            f"autocast ({now}) is on at the update: matrix products of the optimizer, and of a backward pass in the same place"
        )
        text += f", are computed in {now}"
        hint = "end the autocast context before backward() and step(): it is for the forward pass and the loss"
        return [_finding(evidence, "autocast", text, now, "off", hint)]
    return []


def _finding(evidence: Evidence, name: str, text: str, measured: str, expected: str, hint: str) -> Finding:
    return evidence.found(text, name, next=hint, measured=measured, expected=expected, kind="scalar")
