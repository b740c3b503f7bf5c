"""What ends a text is a target as well.

Judged where a language model predicts the next token and is called with an attention mask, if all masked tokens are the same
token. If at least half of the rows also hold this token where the mask is not 0, it ends a text. It is then a target there at
least once, in this audited step or the one before. No tolerance. Reported as a warning: the end may be left out on purpose.

Usually caused by `pad_token = eos_token`, with labels of -100 wherever they are the padding token. The model is then never
trained to stop, and generates until it is cut off. A separate padding token, or labels that are ignored by the mask, cannot
violate this.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.calls import LossCall, LossCalls
from trainprobe.monitor.audit.relations.shifted_targets import predicts_next

COST = frozenset({"host"})
OBSERVERS = frozenset({"loss_inputs"})
STAGE = "data"


def check(evidence: Evidence) -> list[Finding]:
    """Find a token that ends texts and is never a target."""
    calls = [call for call in evidence.of(LossCalls).losses if predicts_next(call)]
    before = (
        [call for call in evidence.before.of(LossCalls).losses if predicts_next(call)] if evidence.before is not None else []
    )
    if not calls or not before or not all(map(_never_ends, (*calls, *before))):
        return []
    ends = sum(_of(call, "ends") for call in calls)
    text = (
        f"token {calls[0].number('pad_high'):.0f} pads, and is at {ends:.0f} places where the attention mask is not 0, "
        "but no target is that token. The model is never trained to end a text"
    )
    hint = "give padding a token of its own, or set labels to -100 where the attention mask is 0 and nowhere else"
    return [evidence.found(text, "labels", next=hint, measured=0.0, expected=ends, kind="scalar")]


def _never_ends(call: LossCall) -> bool:
    one = call.number("pad_low") == call.number("pad_high")
    return one and _of(call, "ends") >= max(2.0, call.rows / 2) and _of(call, "ended") == 0


def _of(call: LossCall, what: str) -> float:
    return next((n for n in (call.number(f"{what} {dim}") for dim in (1, 0)) if n == n), 0.0)
