"""A loss function gets inputs for which it is defined.

Relations for the functions of `torch.nn.functional` in training:

- `cross_entropy`: the input is not a probability already (no element below 0, all sums over classes 1).
- `cross_entropy` and `…_with_logits`: the smallest input is not 0 exactly while others are larger.
- `nll_loss`, `kl_div`, `ctc_loss`: the input is a log-probability; no element is above 0.
- `binary_cross_entropy`, with logits or without: targets are in [0, 1].
- `…_with_logits`: of 64 or more inputs, which differ, some are outside of [0, 1]. Reported at two audited steps in a row, both
  after the twentieth step of the run.
- `kl_div`: targets are probabilities; no element is below 0 (unless `log_target`).
- `ctc_loss`: less than one in twenty transcripts is longer than its input. Reported at two audited steps in a row.
- `ctc_loss`: no letter of a transcript is the blank.
- `mse_loss`, `l1_loss`, `huber_loss` …: input and target are not broadcast against each other, [N, 1] and [N] to [N, N].
- `cross_entropy`, `nll_loss`: not all targets of all calls are ignored. Reported at two audited steps in a row. The same holds
  for each call that returns a mean, which is then NaN.

Tolerance: 1e-3 for bounds, 5e-3 for sums. The first 16 entries of each other dimension of inputs over classes are checked.
Reported as warnings: torch computes all of this, and it may be intended.
Usual causes are a softmax, a sigmoid or a ReLU in the model before a loss that takes logits, and a loss that expects logarithms
and gets none. Others are images in 0 … 255 as targets, and a prediction [N, 1] against targets [N]. Strides may leave fewer
frames than a transcript has letters (with `zero_infinity`). A prompt template that matches nothing, or a cut that leaves only
the prompt, masks all labels. A loss function with inputs for which it is defined cannot violate this.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.calls import LossCall, LossCalls

COST = frozenset({"host"})
OBSERVERS = frozenset({"loss_inputs"})
STAGE = "forward"
_BOUND, _SUM = 1e-3, 5e-3
_EARLY = 20  # steps in which logits that have hardly been trained may all be small
_FEWEST = 64
_TOO_LONG = 0.05  # share of transcripts: single ones are what `zero_infinity` is for
_LEAST_DISTANCE = 1e-2  # inputs that differ by less may be the output of a layer that begins as zeros


def check(evidence: Evidence) -> list[Finding]:
    """Find the first call of a loss function whose input does not fit it."""
    before, empty = evidence.before, mean_of_nothing(evidence)
    if empty is not None or (before is not None and _all_ignored(evidence) and _all_ignored(before)):
        return [_nothing_to_learn(evidence, empty)]
    for call in evidence.of(LossCalls).losses:
        problem = _wrong(call) or _twice_squashed(call, evidence) or _longer(call, evidence)
        if problem is not None:
            what, hint = problem
            return [evidence.found(what, call.kind, next=hint, kind="scalar")]
    return []


def _all_ignored(evidence: Evidence) -> bool:
    """Tell whether a step has targets that are classes, and no loss has any other target than ignored ones."""
    counts = [(call.count, call.number("valid")) for call in evidence.of(LossCalls).losses]
    return any(count > 0 for count, _ in counts) and all(valid == 0 for _, valid in counts)


def mean_of_nothing(evidence: Evidence) -> LossCall | None:
    """Return the first call that takes the mean over targets of which all are ignored: 0 / 0."""
    means = (call for call in evidence.of(LossCalls).losses if call.reduction in ("mean", "weighted") and call.count > 0)
    return next((call for call in means if call.number("valid") == 0), None)


def _nothing_to_learn(evidence: Evidence, empty: LossCall | None) -> Finding:
    calls = evidence.of(LossCalls).losses if empty is None else (empty,)
    count, kind = sum(call.count for call in calls), calls[0].kind
    what = ", as at the audited step before: there is nothing to learn from" if empty is None else ": their mean is 0 / 0, NaN"
    text = f"all {count} targets of {kind} are ignored (ignore_index){what}"
    hint = "look at how the labels are made: what masks the prompt or the padding masks everything"
    return evidence.found(text, kind, next=hint, kind="scalar")


def _wrong(call: LossCall) -> tuple[str, str] | None:
    """Return what is wrong with a call and what to do, or None."""
    low, high = call.number("input_low"), call.number("input_high")
    if _is_outer(call):
        shapes = " and ".join(str(list(shape)) for shape in call.shapes)
        what = f"{call.kind} was given {shapes}, which are broadcast against each other"
        return (
            f"{what}: each prediction is compared with every target",
            "give input and target one shape: squeeze or unsqueeze one of them",
        )
    if call.kind in ("cross_entropy", "nll_loss") and low >= 0 and call.number("off_one") <= _SUM and high <= 1 + _BOUND:
        what = f"the input of {call.kind} is probabilities (in [{low:.3g}, {high:.3g}], each sum over the classes is 1)"
        if call.kind == "nll_loss":
            return f"{what}, and it expects their logarithms", "give it log_softmax, or give logits to cross_entropy"
        return (
            f"{what}, and it applies softmax itself: applied twice, gradients are small",
            "give it the logits, without softmax",
        )
    if call.kind in ("nll_loss", "kl_div", "ctc_loss") and high > _BOUND:
        what = f"the input of {call.kind} is no log-probability: its largest element is {high:.3g}, above 0"
        return what, "give it log_softmax of the logits"
    if call.kind in ("cross_entropy", "binary_cross_entropy_with_logits") and low == 0 < high:
        what = f"no input of {call.kind} is below 0 and some are 0 exactly (the largest is {high:.3g}): a ReLU, not logits"
        return what, "remove the activation behind the last layer"
    if call.kind == "ctc_loss" and call.number("blanks") > 0:
        what = f"{call.number('blanks'):.0f} letters of the transcripts of ctc_loss are the blank, which is no letter"
        return what, "number the letters from 1 where the blank is 0, or pass blank="
    least, most = call.number("target_low"), call.number("target_high")
    if call.kind == "kl_div" and least < -_BOUND:
        return (
            f"the target of kl_div is no probability: its smallest element is {least:.3g}",
            "exponentiate it, or pass log_target",
        )
    if call.kind.startswith("binary") and (least < -_BOUND or most > 1 + _BOUND):
        return f"the targets of {call.kind} are in [{least:.3g}, {most:.3g}], and not in [0, 1]", "scale the targets to [0, 1]"
    return None


def _is_outer(call: LossCall) -> bool:
    """Tell whether input and target were each expanded along a dimension of the other."""
    if not call.kind.endswith(("mse_loss", "l1_loss", "huber_loss")):
        return False
    pairs = list(zip(*call.shapes, strict=False))
    return any(a == 1 < b for a, b in pairs) and any(b == 1 < a for a, b in pairs)


def _longer(call: LossCall, evidence: Evidence) -> tuple[str, str] | None:
    """Return the finding that transcripts do not fit into what they are read from, as at the audited step before."""
    before = evidence.before.of(LossCalls).losses if evidence.before is not None else ()
    if not _is_too_long(call) or not any(map(_is_too_long, before)):
        return None
    count, valid = call.number("too_long"), call.number("valid")
    what = (
        f"{count:.0f} of {valid:.0f} transcripts of ctc_loss are longer than the input that they are read from. Such a loss is "
        "infinite, and zero_infinity makes it and its gradient 0, so nothing is learned from them"
    )
    return what, "leave them out, cut the audio less, or let the strides of the encoder leave more frames"


def _is_too_long(call: LossCall) -> bool:
    return call.kind == "ctc_loss" and call.number("too_long") >= max(1.0, _TOO_LONG * call.number("valid"))


def _twice_squashed(call: LossCall, evidence: Evidence) -> tuple[str, str] | None:
    """Return the finding that logits are probabilities, where they were so at the audited step before too."""
    before = evidence.before
    if before is None or evidence.ordinal <= _EARLY or not _looks_squashed(call):
        return None
    if not all(_looks_squashed(other) for other in before.of(LossCalls).losses if other.kind == call.kind):
        return None
    bounds = f"[{call.number('input_low'):.3g}, {call.number('input_high'):.3g}]"
    what = f"all inputs of {call.kind} are in {bounds}. They look like probabilities, and it applies the sigmoid itself"
    return what, "give it the logits, without sigmoid"


def _looks_squashed(call: LossCall) -> bool:
    low, high = call.number("input_low"), call.number("input_high")
    return (
        call.kind == "binary_cross_entropy_with_logits"
        and call.count >= _FEWEST
        and 0 <= low <= high - _LEAST_DISTANCE
        and high <= 1
    )
