"""Random operators run again here from the recorded state of the host's generator: what they draw is then known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from trainprobe.op_check.cases import Case, NotChecked, Tensor
from trainprobe.op_check.evaluate import Expected
from trainprobe.op_check.execution import run_here
from trainprobe.op_check.judge import Judgement, gravest, judge
from trainprobe.op_check.noise import UNIT

_RIGHT = ("exact", "rounding")
SOURCE = "run again"


def rerun_from_state(case: Case, backward: bool = False) -> list[Judgement] | None:
    """Judge a random operator by what this machine makes of the same numbers; None where it draws others, or none are recorded.

    A backward is judged where the forward, run again, gives what is recorded of it.
    """
    if case.generator is None or (backward and case.of_inputs):
        return None
    try:
        forward = _judged(case.outputs, _again(case, False).outputs)
        if forward is None or gravest(forward).outcome not in _RIGHT:
            return None
        return _judged(case.results, _again(case, True).results) if backward else forward
    except (NotChecked, RuntimeError, TypeError):
        return None


def _again(case: Case, backward: bool) -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(case.generator)  # pyright: ignore[reportArgumentType]
        return run_here(replace(case), backward)


def _judged(recorded: Sequence[Tensor | None], again: Sequence[Tensor | None]) -> list[Judgement] | None:
    if len(recorded) != len(again):
        return None
    pairs = [(y, r) for y, r in zip(recorded, again, strict=True) if y is not None and r is not None]
    return [judge(y, _expected(r)) for y, r in pairs]


def _expected(r: Tensor) -> Expected:
    """Return what ran here as a reference: a kernel may round it twice in its own format, as dropout does."""
    if r.dtype not in UNIT:
        return Expected(r, None)
    wide = r.to(torch.complex128 if r.is_complex() else torch.float64)
    return Expected(wide, wide.abs() * (2 * UNIT[r.dtype]))
