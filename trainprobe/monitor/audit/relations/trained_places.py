"""No gradient arrives at output places that are padding, or that belong to a prompt which the program did not sample.

Two relations for the first call of the model with rows [rows, time] in a step, at two audited steps in a row:

- Rows that end with two or more of a token that occurs nowhere else, or with frames of zeros, are padded. Fewer than half of
  the padded places, except the first, have a gradient. Not more than half of the padded rows have a gradient there alone.
  (`shifted_targets` reports it if a loss has targets that a mask leaves out.)
- Some rows begin with the same three tokens or more as the row before, and others do not. If at least half do, they are several
  answers to each of several prompts. Fewer than nine in ten places whose next token is shared have a gradient.

No tolerance: a masked place has a gradient of 0. Reported as warnings, because padding and prompts are inferred from the rows.
Usual causes are labels that are not ignored at padding, and lengths of the padded rows (speechbrain issue 496). Others are a
reward at the last place of the row instead of the last token (gpt-neox issue 1285), and log-probabilities of the prompt in a
policy's loss.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.gradients import TrainedPlaces
from trainprobe.monitor.audit.relations.shifted_targets import trains_masked_targets

COST = frozenset({"host"})
OBSERVERS = frozenset({"output_gradients", "loss_inputs"})
STAGE = "backward"
PYTORCH_ONLY = "the gradient of the output is seen on PyTorch's graph"
_ALL = 0.9


def check(evidence: Evidence) -> list[Finding]:
    """Find places that are trained and should not be, as at the audited step before."""
    before, now = evidence.before, _wrong(evidence)
    was = {} if before is None else _wrong(before)
    for kind, (text, hint) in now.items():
        if kind in was:
            name = evidence.of(TrainedPlaces).argument
            return [evidence.found(text, name, next=hint, measured="a gradient", expected="none", kind="scalar")]
    return []


def _wrong(evidence: Evidence) -> dict[str, tuple[str, str]]:
    """Return each violation of a step: what is to be told, and what to do."""
    found: dict[str, tuple[str, str]] = {}
    seen = evidence.of(TrainedPlaces)
    places, trained, rows, alone = seen.padding
    assumed = f"(assuming that what ends the rows of {seen.argument} is padding)"
    if rows > 1 and alone > rows / 2:
        text = f"in {alone} of {rows} padded rows the gradient enters the output at padded positions alone {assumed}"
        found["alone"] = text, "take the output at the last token of each row: its length less one"
    elif rows > 1 and trained > places / 2 and not trains_masked_targets(evidence):
        text = f"{trained} of {places} padded positions of the output carry a gradient: padding is trained {assumed}"
        found["padding"] = text, "leave padding out of the loss: ignore_index (-100) in the labels, a mask, or the true lengths"
    alike, pairs, length, others = seen.prompts
    places, trained = seen.prompted
    if alike > 1 and 2 * alike >= pairs and others and places and trained >= _ALL * places:
        text = (
            f"{trained} of {places} positions of the output that predict the prompt carry a gradient. Rows of {seen.argument} "
            f"share their first {length} tokens in groups, so these are assumed to be prompts, and what follows to be sampled"
        )
        found["prompt"] = text, "count the tokens of the answers alone in the loss"
    return found
