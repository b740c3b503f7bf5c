"""The targets that count in a loss over classes are those from which the model can learn.

Three relations for `cross_entropy` and `nll_loss` with class indices, at two audited steps in a row:

- At least half of the rows of tokens have a target that is not ignored. (`loss_inputs` reports it if no row has one.)
- For maps, which are targets of an input [N, C, …], `ignore_index` is not the class of more than half of the targets. A model
  that is called with tokens is left out: its padding may have an index of its own.
- The input may differ from the targets by one single token, 8 times or more, which hides them. Then fewer than half of the
  targets are in the input at their own places.

Reported as warnings: each may be intended.
Usual causes are rows that are cut before the part to be learned, and an ignored background in place of pixels without a label.
Another is a masked language model whose labels are not limited to the hidden tokens (transformers issue 20797): nearly all of
the loss is then to copy the input.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.calls import LossCall, LossCalls
from trainprobe.monitor.audit.relations.shifted_targets import predicts_next

COST = frozenset({"host"})
OBSERVERS = frozenset({"loss_inputs"})
STAGE = "data"
_FEWEST_ROWS, _FEWEST_HIDDEN = 4, 8


def check(evidence: Evidence) -> list[Finding]:
    """Find what is wrong with the places that count, where it was so at the audited step before too."""
    before = evidence.before
    was = {} if before is None else _wrong(before.of(LossCalls).losses)
    for name, (text, measured, hint) in _wrong(evidence.of(LossCalls).losses).items():
        if name in was:
            return [evidence.found(text, "labels", next=hint, measured=measured, expected="at most 0.5", kind="scalar")]
    return []


def _wrong(calls: tuple[LossCall, ...]) -> dict[str, tuple[str, float, str]]:
    """Return each violation of a step: what is to be told, the share, and what to do."""
    found: dict[str, tuple[str, float, str]] = {}
    rows, bare = (
        sum(n for call in calls if call.number("valid") and (n := call.number(f"{what} 1")) == n) for what in ("rows", "bare")
    )
    if rows >= _FEWEST_ROWS and bare > rows / 2:
        text = f"{bare:.0f} of {rows:.0f} rows of tokens have no target that counts: their labels are all ignored"
        found["rows"] = (
            text,
            bare / rows,
            "look at the longest length and at the mask of the labels: what is learned is cut off",
        )
    for call in calls:
        ignored, own = call.count - call.number("valid"), call.number("ignored_class")
        if own >= 0 and len(call.shapes[0]) > 2 and not call.rows and ignored > call.count / 2:
            text = (
                f"ignore_index {own:.0f} of {call.kind} is a class of its own input, and {ignored / call.count:.0%} of the "
                "targets are of this class: the model is never told of it"
            )
            found["ignored"] = text, ignored / call.count, "give ignore_index a number that is no class, such as 255 or -100"
        pairs, equal = call.number("pairs 1 0"), call.number("equal 1 0")
        token = call.number("hidden_low 1")
        hidden = token == call.number("hidden_high 1") and pairs - equal >= _FEWEST_HIDDEN
        if hidden and equal > pairs / 2 and not predicts_next(call):
            text = (
                f"{equal:.0f} of {pairs:.0f} targets of {call.kind} stand in the input at their own places. At the others the "
                f"input is token {token:.0f}, which hides them: positions that were not hidden are trained too"
            )
            found["visible"] = text, equal / pairs, "set the labels to ignore_index (-100) where the input was not hidden"
    return found
