"""The targets of a language model are the next tokens, and not padding.

Relation, if a loss over classes (`cross_entropy`, `nll_loss`) has one target for each input token: the valid targets are not
all the input token at the same place, two places later, or one place earlier, unless they are also the next token. Targets that
are the next token are at places where the attention mask is not 0, except one a row (an end-of-text token may be the padding
token). At least 16 targets, and an equality that holds for all of them; tolerance none. Where labels were shifted twice, what
stands two places further may be padding, which is not compared. If one loss of the step predicts the next token, others may
predict the one after it. Encoder-decoder models are not judged, as their input may be copied. Reported as a warning, because a
model that should reproduce its input does the first on purpose.
Usually caused by labels that are not shifted (the loss falls to nothing, as the model may copy), that both loader and model
shift, or that are a copy of padded inputs. A model that predicts the next token of text cannot violate this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.calls import LossCall, LossCalls

COST = frozenset({"host"})
OBSERVERS = frozenset({"loss_inputs"})
STAGE = "data"
_FEWEST = 16
_WRONG = {
    0: (
        "the input tokens themselves. They are not shifted, and the model can copy them",
        "predict the token that comes next: logits[:, :-1] against tokens[:, 1:]",
    ),
    2: (
        "the input token two places further. They are shifted twice, and the next token is never predicted",
        "shift the labels once, in the data or in the model (models of transformers shift by themselves)",
    ),
    -1: (
        "the input token one place before. They are shifted the wrong way, and the model has seen them",
        "predict the token that comes next: logits[:, :-1] against tokens[:, 1:]",
    ),
}


def check(evidence: Evidence) -> list[Finding]:
    """Find targets that are not those of a language model."""
    calls = [call for call in evidence.of(LossCalls).losses if call.number("valid") >= _FEWEST]
    if _encodes_and_decodes(evidence.model.modes):
        return []
    if any(_all_equal(call, 1) for call in calls):
        return [_masked(evidence, call) for call in calls if _masked_targets(call) > call.rows][:1]
    if any(_all_but_padding(call, 1) for call in calls):
        return []
    for shift, (what, hint) in _WRONG.items():
        call = next((call for call in calls if _all_equal(call, shift) or (shift > 1 and _all_but_padding(call, shift))), None)
        if call is not None:
            equal = max(call.numbers.get(f"equal {dim} {shift}", 0.0) for dim in (0, 1))
            number = "all" if _all_equal(call, shift) else f"{equal:.0f} of"
            text = f"{number} {call.number('valid'):.0f} targets of {call.kind} are {what}"
            text += " (assuming that the model is to predict the next token)"
            return [_finding(evidence, text, float(shift), 1.0, hint)]
    return []


def _all_equal(call: LossCall, shift: int, dims: Sequence[int] = (0, 1)) -> bool:
    return any(
        call.number(f"pairs {dim} {shift}") >= _FEWEST
        and call.number(f"equal {dim} {shift}") == call.number(f"pairs {dim} {shift}")
        for dim in dims
    )


def _all_but_padding(call: LossCall, shift: int) -> bool:
    """Tell whether all of at least 16 targets equal what stands so many places further, unless that is padding."""
    return any(
        call.number(f"equal {dim} {shift}") >= _FEWEST
        and call.number(f"equal {dim} {shift}") + call.number(f"masked {dim} {shift}") >= call.number(f"pairs {dim} {shift}")
        for dim in (0, 1)
    )


def predicts_next(call: LossCall, dims: Sequence[int] = (0, 1)) -> bool:
    """Tell whether all of at least 16 valid targets are the next token along one of these dimensions of the tokens."""
    return call.number("valid") >= _FEWEST and _all_equal(call, 1, dims)


def trains_masked_targets(evidence: Evidence) -> bool:
    """Tell whether targets count where the attention mask is 0."""
    return any(_masked_targets(call) > call.rows for call in evidence.of(LossCalls).losses)


def _masked_targets(call: LossCall) -> float:
    """Return how many targets that are the next token stand where the mask is 0."""
    return call.number("masked 1 1") if _all_equal(call, 1) else 0.0


def _masked(evidence: Evidence, call: LossCall) -> Finding:
    count, valid = _masked_targets(call), call.number("valid")
    text = (
        f"{count:.0f} of {valid:.0f} targets of {call.kind} are tokens at which the attention mask is 0. The model is "
        "trained to predict padding, and the mean is divided by it"
    )
    hint = "set the labels to ignore_index (-100) where the attention mask is 0"
    return _finding(evidence, text, count, 0.0, hint)


def _encodes_and_decodes(modules: Iterable[str]) -> bool:
    last = {name.rpartition(".")[2] for name in modules}
    return "encoder" in last and "decoder" in last


def _finding(evidence: Evidence, text: str, measured: float, expected: float, hint: str) -> Finding:
    return evidence.found(text, "labels", next=hint, measured=measured, expected=expected, kind="scalar")
