"""Determinism: the step twice from one state gives the same bits."""

from __future__ import annotations

from trainprobe.preflight.report import Line, broken, holds
from trainprobe.preflight.subject import Subject


def examine(subject: Subject) -> Line:
    """Compare two runs of the step from equal weights, buffers and random states: what a checkpoint would bring back."""
    if subject.repeats:
        return holds("equal bits")
    runs, gap = [subject.run(rewind=False, backward=False, outputs=True) for _ in range(2)], subject.twice
    for (name, x), (_, y) in zip(runs[0].outputs, runs[1].outputs, strict=False):
        if x.shape != y.shape or not bool((x == y).all()):
            return broken(f"two steps from one state differ, by {gap:.2g} of the gradient's norm, first in {name}", gap=gap)
    return broken(f"two steps from one state differ, by {gap:.2g} of the gradient's norm; all modules agree", gap=gap)
