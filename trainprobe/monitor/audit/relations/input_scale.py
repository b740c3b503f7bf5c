"""The model's inputs are scaled once, and are not all zero.

Relation, for the numbers [rows, …] with which the model is called: they are not all multiples of 1/255² with none above 1/255
(the largest at least 16/255², and eight or more between 0 and the largest). Tolerance 1e-3 of 1/255²; up to four rows are
sampled. The inputs are not all 0 at three audited steps in a row, unless the model is also given integers. Reported as a
warning.
Usually caused by a division by 255 after a transform that already scales to [0, 1] (`ToTensor`, `to_dtype(scale=True)`). The
image is then nearly black, and the biases of the first layer dominate. Bytes that were divided once are multiples of 1/255 up
to 1, and other data are not on this grid. Zeros come from files that could not be read, from a buffer that is used before it is
filled, or from an integer division.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.calls import GivenInputs, InputScale, TrainingCalls

COST = frozenset({"host"})
OBSERVERS = frozenset({"module_inputs"})
STAGE = "data"
_PART = 1 / 255**2
_LEAST = 16 * _PART
_OFF = 1e-3
_BETWEEN = 8  # elements; masks have none
_IN_A_ROW = 3


def check(evidence: Evidence) -> list[Finding]:
    """Find the first input whose bytes were divided twice."""
    scale = next(filter(_is_divided_twice, evidence.of(GivenInputs).scales), None)
    if scale is None:
        return _nothing(evidence)
    text = (
        f"{scale.name}, an input of the model, is made of bytes that were divided by 255 twice. Its largest is "
        f"{scale.high:.3g}, and all are whole multiples of 1/255²"
    )
    hint = "divide once: ToTensor and to_dtype(scale=True) give [0, 1] already"
    return [evidence.found(text, "batch", "input", next=hint, measured=scale.high, expected=scale.high * 255, kind="scalar")]


def remember(evidence: Evidence) -> int:
    """Return at how many audited steps in a row all inputs were zeros."""
    given = evidence.of(GivenInputs)
    zeros = (
        bool(given.scales)
        and not evidence.of(TrainingCalls).whole_numbers
        and all(s.high == 0 and s.off == 0 for s in given.scales)
    )
    return evidence.remembered("input_scale", 0) + 1 if zeros else 0


def _nothing(evidence: Evidence) -> list[Finding]:
    if remember(evidence) < _IN_A_ROW:
        return []
    names = " and ".join(scale.name for scale in evidence.of(GivenInputs).scales)
    text = f"{names}, all that the model is given, has been zeros at {_IN_A_ROW} audited steps in a row"
    hint = "look at what loads and prepares the data: files that cannot be read, a buffer that is not filled yet"
    return [evidence.found(text, "batch", "input", next=hint, measured=0.0, expected="numbers", kind="scalar")]


def _is_divided_twice(scale: InputScale) -> bool:
    return _LEAST <= scale.high <= (1 + 1e-5) / 255 and scale.off <= _OFF and scale.between >= _BETWEEN
