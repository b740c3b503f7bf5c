"""Precision: autocast gives the loss and gradients of float32, as far as its dtype can."""

from __future__ import annotations

import torch

from trainprobe.engine.capture.step_gradients import Gradients, apart, relative, sampled
from trainprobe.engine.capture.step_modes import REDUCTIONS, without_autocast
from trainprobe.preflight.report import Line, broken, holds, not_applicable
from trainprobe.preflight.subject import Seen, Subject

LOW = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
TIMES = 8  # what autocast may be off, in multiples of what rounded weights are
LOST = 0.01  # share of the gradients' elements that may be lost


def examine(subject: Subject) -> Line:
    """Compare the step with one without autocast, and with what weights that are rounded to its dtype change."""
    used = {kind for kinds in subject.base.dtypes.values() for kind in kinds if kind in LOW}
    if not used or any(p.dtype in LOW for p in subject.parameters.values()):
        return not_applicable("no autocast to 16 bits is used" if not used else "the weights themselves have 16 bits")
    kind = min(used, key=lambda k: torch.finfo(k).max)
    full = subject.run(modes=without_autocast(), kept=dict)
    gap, off, eps = apart(full.gradients, subject.base.gradients), relative(full.loss, subject.base.loss), torch.finfo(kind).eps
    worst = max(full.gradients, key=lambda name: _off(full.gradients, subject.base.gradients, name), default="")
    lost = _lost(subject.base.gradients, full.gradients)
    full.gradients = sampled(full.gradients)
    floor, floor_of_loss = eps, eps / 8
    if gap > TIMES * floor or off > TIMES * floor_of_loss:
        rounded = _rounded(subject, kind)
        floor, floor_of_loss = (
            max(floor, apart(full.gradients, rounded.gradients)),
            max(floor_of_loss, relative(full.loss, rounded.loss)),
        )
    name = LOW[kind]
    reduced = sorted(n for n, used_there in subject.base.reductions.items() if n in REDUCTIONS and used_there in LOW)
    figures = {"gap": gap, "floor": floor, "lost": lost}
    if lost > LOST:
        return broken(f"{lost:.1%} of the gradients' elements are 0 in {name} and not in float32", **figures)
    if reduced:
        return broken(f"the loss is computed in {name} ({reduced[0]})", **figures)
    if gap > TIMES * floor:
        return broken(
            f"gradients under {name} are off by {gap:.2g} of their norm, most in {worst}; {floor:.2g} is rounding", **figures
        )
    if off > TIMES * floor_of_loss:
        return broken(f"the loss under {name} is off by {off:.2g}", **figures)
    return holds(f"{name} changes the gradients by {gap:.2g} of their norm", **figures)


def _off(full: Gradients, low: Gradients, name: str) -> float:
    return apart({name: full[name]}, {name: low[name]} if name in low else {})


def _rounded(subject: Subject, kind: torch.dtype) -> Seen:
    """Run the step in float32 with weights that are rounded to a dtype."""
    subject.guard.rewind()
    with torch.no_grad():
        for p in subject.parameters.values():
            p.copy_(p.to(kind))
    return subject.run(rewind=None, modes=without_autocast(), kept=sampled)


def _lost(low: Gradients, full: Gradients) -> float:
    pairs = [(gradient != 0, low[name] == 0) for name, gradient in full.items() if name in low]
    return sum(int((there & lost).sum()) for there, lost in pairs) / max(sum(int(there.sum()) for there, _ in pairs), 1)
