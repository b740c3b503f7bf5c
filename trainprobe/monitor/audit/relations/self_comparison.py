"""A loss does not compare a thing with itself.

Relation: (a) if a loss over classes has as many classes as rows [N, N], N at least 8, and no target is the entry of the same
number, these diagonal entries are not all equal (within 1e-4) and the largest of their rows, as the similarity of a thing with
itself is. (b) a loss function that measures a difference (`mse_loss`, `l1_loss`, `kl_div` …) and is called with gradients
enabled is not 0, within 1e-6 for each element, and without a gradient, at two audited steps in a row after the twentieth, while
its target varies. Reported as warnings.
Usually caused by (a) a contrastive loss whose similarities are not masked on the diagonal, so that each sample competes with
itself; (b) a loss between a teacher, or a detached copy, and itself. If one of two compared things is trained, the difference
has a gradient, and a masked diagonal is not the largest of its rows.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.calls import LossCall, LossCalls

COST = frozenset({"host"})
OBSERVERS = frozenset({"loss_inputs"})
STAGE = "forward"
_FEWEST = 8
_EQUAL, _NOTHING = 1e-4, 1e-6
_EARLY = 20  # steps in which a copy may still be what it was copied from


def check(evidence: Evidence) -> list[Finding]:
    """Find a loss that compares something with itself."""
    call = next((call for call in evidence.of(LossCalls).losses if _has_itself(call)), None)
    if call is not None:
        text = (
            f"the largest logit of each row of {call.kind} is the one of its own number, {call.number('self_high'):.6g} in all "
            f"{call.count} rows, and never a target. Each sample is compared with itself"
        )
        return [_finding(evidence, call, text, "mask the diagonal of the similarities with -inf before the loss")]
    before = evidence.before
    if before is None or min(evidence.ordinal, before.ordinal) <= _EARLY:
        return []
    known = {call.kind for call in _nothings(before)}
    call = next((call for call in _nothings(evidence) if call.kind in known), None)
    if call is None:
        return []
    text = (
        f"{call.kind} is 0 and has no gradient: its input and its target are the same numbers, and neither depends on a weight"
    )
    return [_finding(evidence, call, text, "give it the output of what is trained as its input, not that of the target again")]


def _has_itself(call: LossCall) -> bool:
    high, low = call.number("self_high"), call.number("self_low")
    near = _EQUAL * abs(high)
    outputs_equal = high - low <= near and call.number("self_below") <= near
    inputs_differ = call.number("input_high") - call.number("input_low") > 10 * near
    return outputs_equal and inputs_differ and call.count >= _FEWEST and call.number("self_targets") == 0


def _nothings(evidence: Evidence) -> list[LossCall]:
    """Return the calls that gave 0 and no gradient, though their target varies."""
    return [
        call
        for call in evidence.of(LossCalls).ungraded
        if call.number("apart") <= _NOTHING * call.count and call.number("target_high") - call.number("target_low") > 1e-3
    ]


def _finding(evidence: Evidence, call: LossCall, text: str, hint: str) -> Finding:
    return evidence.found(text, call.kind, next=hint, kind="scalar")
