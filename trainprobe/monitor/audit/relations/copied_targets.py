"""The model is not given its own target.

Judged if the only torch loss of a backward pass has a target of 16 elements or more, which vary. (A second loss may well
reconstruct a part of the input.) Equality is bitwise and holds for all elements:

- `mse_loss`, `l1_loss` …: no column of an argument [N, F] of the model, F > 1, is the target [N].
- The same losses: the target is not an argument of a model that has other arguments too. A model with a weight narrower than
  the target is left out: it is an autoencoder, and the target has to pass through it.
- `cross_entropy`, `nll_loss`: where two or more embeddings look up rows of indices, the last is the decoder's. It does not look
  up the targets at their own places. (An encoder may be given what is to be reproduced.)

Reported as warnings: some models should reproduce their input.
Usual causes are a table from which the target was not dropped, a denoiser that is given the noise instead of the noisy data,
and a decoder whose input is not shifted. If the numbers differ in one bit, this is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.calls import LossCall, LossCalls

COST = frozenset({"host"})
OBSERVERS = frozenset({"loss_inputs"})
STAGE = "data"
_FEWEST = 16
_COPY, _COLUMN, _LOOKED_UP = "copy of ", "column of ", "looked up by "


def check(evidence: Evidence) -> list[Finding]:
    """Find the first loss whose target the model was given."""
    calls = evidence.of(LossCalls).losses
    passes = [call.backward for call in calls]
    for call in (call for call in calls if passes.count(call.backward) == 1):
        for name, text, hint in _copies(call, evidence):
            return [evidence.found(text, name, next=hint, measured="the target", expected="other numbers", kind="scalar")]
    return []


def _copies(call: LossCall, evidence: Evidence) -> Iterator[tuple[str, str, str]]:
    """Yield the argument that is the target, what is to be told, and what to do."""
    for key, number in call.numbers.items():
        if key.startswith(_COLUMN) and number >= 0:
            name = key.removeprefix(_COLUMN)
            text = f"column {number:.0f} of the input {name} is the target of {call.kind}, in all {call.count} rows"
            yield name, text, "drop the column from the input: it is what the model is to find"
        elif key.startswith(_COPY) and number == 1 and call.number("arguments") > 1 and not _is_narrow(call, evidence):
            name = key.removeprefix(_COPY)
            text = f"the target of {call.kind} is the model's input {name}, to the bit: the model has only to copy it"
            yield name, text, "look at what the model is called with: the noisy input and the noise may have been exchanged"
        elif key.startswith(_LOOKED_UP) and number == call.number("valid") >= _FEWEST:
            name = key.removeprefix(_LOOKED_UP)
            text = (
                f"all {number:.0f} targets of {call.kind} are the tokens that {name} looks up at the same place: the decoder's "
                "input is its target, and is not shifted"
            )
            yield name, text, "give the decoder what was said before: a start token and target[:, :-1]"


def _is_narrow(call: LossCall, evidence: Evidence) -> bool:
    """Tell whether a weight has fewer outputs than the target has features, so that the target cannot be passed on whole."""
    shape = call.shapes[1]
    width = shape[1] if len(shape) > 1 else 1
    return any(len(p.shape) > 1 and p.shape[0] < width for p in evidence.model.parameters)
