"""Determinism: the step twice from one state gives the same bits."""

from __future__ import annotations

from trainprobe.engine.capture.step_modes import Traced
from trainprobe.preflight.report import Line, broken, holds
from trainprobe.preflight.subject import Subject


def examine(subject: Subject) -> Line:
    """Compare two runs of the step from equal weights, buffers and random states: what a checkpoint would bring back."""
    if subject.repeats:
        return holds("equal bits")
    traces = Traced(), Traced()
    runs, gap = [subject.run(rewind=False, outputs=True, modes=trace) for trace in traces], subject.twice
    by = next((f", by {one[0]}" for one, other in zip(*(trace.seen for trace in traces), strict=False) if one != other), "")
    text = f"two steps from one state differ, by {gap:.2g} of the gradient's norm"
    for (name, x), (_, y) in zip(runs[0].outputs, runs[1].outputs, strict=False):
        if x.shape != y.shape or not bool((x == y).all()):
            return broken(f"{text}, first in {name}{by}", gap=gap)
    return broken(f"{text}; all modules agree{by}", gap=gap)
