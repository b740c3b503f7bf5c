"""One answer of ckpt-compare, as the command gives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainprobe.ckpt_compare.compare import compare, logical
from trainprobe.ckpt_compare.formats import open_checkpoint
from trainprobe.ckpt_compare.tolerance import selected
from trainprobe.ckpt_compare.verdict import verdict_of
from trainprobe.comparison.verdict import Verdict
from trainprobe.errors import ProbeError


@dataclass(frozen=True, slots=True)
class Answer:
    """Model, layout, cause (empty: healthy), whether the answer is right, and the first line."""

    model: str
    layout: str
    cause: str
    good: bool
    sentence: str


def judged(a: Path, b: Path, only: Sequence[str] = ()) -> Verdict:
    """Compare two checkpoints as the command does; only: its patterns of tensors."""
    try:
        sides = logical(open_checkpoint(a), open_checkpoint(b))
    except ProbeError as error:
        return Verdict(3, str(error), ())
    left, right = (selected(side, only, ()) for side in sides)
    return verdict_of(compare(left, right))
