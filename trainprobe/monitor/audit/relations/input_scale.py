"""Bytes are scaled once.

Relation, for the numbers [rows, …] that the model is called with: they are not all whole multiples of 1/255² with none above
1/255 (the largest at least 16 such parts, and eight or more between 0 and the largest). Tolerance 1e-3 of a part; up to four
rows are looked at. Reported as a warning.
Usually caused by a division by 255 behind a transform that scales to [0, 1] already (`ToTensor`, `to_dtype(scale=True)`): the
picture is nearly black, and the biases of the first layer outweigh it. Bytes that were divided once are whole multiples of
1/255 up to 1, and other data do not lie on this grid.
"""

from __future__ import annotations

from trainprobe.engine.core.facts import InputScale
from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence

COST = frozenset({"host"})
OBSERVERS = frozenset({"module_inputs"})
EVERY = 10
STAGE = "data"
_PART = 1 / 255**2
_LEAST = 16 * _PART
_OFF = 1e-3
_BETWEEN = 8  # elements; masks have none


def check(evidence: Evidence) -> list[Finding]:
    """Find the first input whose bytes were divided twice."""
    scale = next(filter(_is_divided_twice, evidence.facts.scales), None)
    if scale is None:
        return []
    text = (
        f"{scale.name}, an input of the model, is made of bytes that were divided by 255 twice: its largest is "
        f"{scale.high:.3g}, and all are whole multiples of 1/255²"
    )
    hint = "divide once: ToTensor and to_dtype(scale=True) give [0, 1] already"
    return [
        evidence.finding(
            "input_scale",
            text,
            "batch",
            "input",
            measured=scale.high,
            expected=scale.high * 255,
            kind="scalar",
            severity="warning",
            next=hint,
        )
    ]


def _is_divided_twice(scale: InputScale) -> bool:
    return _LEAST <= scale.high <= (1 + 1e-5) / 255 and scale.off <= _OFF and scale.between >= _BETWEEN
