"""Integers that mean positions, steps and kinds keep their differences.

A short dtype cannot represent all integers above 256 (bfloat16) or 2048 (float16). Three relations follow, without a
threshold of size:

- The integers with which the model is called: 24 or more cannot be represented. Some of them are odd, if any of the rest are.
- The places of a row, by which constants rotate features (rotary positions): 16 or more cannot be represented. Fewer than a
  quarter of these have the numbers of the place before, if none of the other places do.
- More than 272 classes, if targets from 224 to 255 occur: one above 255 is a target within 500 targets. Targets that are the
  next token are not judged: bytes of a text may have classes beside them.

Reported as warnings. Usually caused by indices that went through a column of half floats or bytes: different places are then
equal. By chance, 24 numbers that were never rounded are all even once in 16 million times.
Other conversions inside a model are not seen: replacing a method of `Tensor` would change what function modes receive.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.calls import GivenNumbers, LossCalls
from trainprobe.monitor.audit.relations.dependence import OutputDependence
from trainprobe.monitor.audit.relations.shifted_targets import predicts_next

COST = frozenset({"host"})
OBSERVERS = frozenset({"dependence", "given_numbers", "loss_inputs"})
STAGE = "data"
_FEWEST, _TARGETS, _PLACES = 24, 500, 16
_BYTE, _MARGIN, _LAST = 256, 16, 32  # classes: of a byte, how many more there must be, and the last of a byte that must come


def remember(evidence: Evidence) -> Any:
    """Return how often each class was a target so far; None where targets are no classes."""
    known = evidence.remembered("held_numbers", None)
    calls = [c for c in evidence.of(LossCalls).losses if len(c.classes) > 2 * (_BYTE + _MARGIN) and not predicts_next(c)]
    for call in calls:
        counts = np.array(call.classes[: len(call.classes) // 2])
        known = counts if known is None or len(known) != len(counts) else known + counts
    return known


def check(evidence: Evidence) -> list[Finding]:
    """Find the first whole numbers that were rounded or cut off."""
    for name, text, hint in _rounded(evidence):
        return [evidence.found(text, name, next=hint, measured="rounded", expected="exact", kind="scalar")]
    return []


def _rounded(evidence: Evidence) -> Iterator[tuple[str, str, str]]:
    """Yield the place, what is to be told, and what to do."""
    for argument in evidence.of(GivenNumbers).arguments:
        for dtype, (above, odd, low) in argument.wholes.items():
            if above >= _FEWEST and not odd and low:
                most = {"bfloat16": 256, "float16": 2048}[dtype]
                text = (
                    f"the {above} whole numbers above {most} in the input {argument.name} are all even, and smaller "
                    f"ones are not. They were rounded to {dtype} on their way, and different ones became equal"
                )
                yield argument.name, text, "read and keep indices as whole numbers"
    for dtype, (above, same, below) in evidence.of(OutputDependence).equal.items():
        if above >= _PLACES and 4 * same >= above and not below:
            most = {"bfloat16": 256, "float16": 2048}[dtype]
            text = (
                f"{same} of {above} positions above {most} have the rotary numbers of the position before, and none below: "
                f"positions were rounded to {dtype}, and different ones became equal"
            )
            yield "root", text, "work positions and their angles out in float32, and convert cosines and sines"
    counts = remember(evidence)
    if counts is not None and counts.sum() >= _TARGETS and not counts[_BYTE:].any() and counts[_BYTE - _LAST : _BYTE].any():
        text = f"no target of {counts.sum():.0f} is above 255, and there are {len(counts)} classes: they went through a byte"
        yield "labels", text, "keep labels in int64, and not in uint8"
