"""The line for the next loss: what noise makes stays below it, what the rule `spike` tells is above it."""

from __future__ import annotations

import numpy as np
import pytest
from frames_by_hand import Bench

from trainprobe.monitor.alarm_line import AlarmLine

STEPS = 1500
NOISE = {
    "normal": lambda draw: 2 + 0.1 * draw.standard_normal(STEPS),
    "falling": lambda draw: 5 * np.arange(1, STEPS + 1) ** -0.4 * np.exp(0.05 * draw.standard_normal(STEPS)),
    "lognormal": lambda draw: np.exp(0.5 * draw.standard_normal(STEPS)),
    "heavy tail": lambda draw: 1 + draw.pareto(4, STEPS),
    "falls steeply": lambda draw: np.exp(-0.01 * np.arange(STEPS) + 0.1 * draw.standard_normal(STEPS)),
}


@pytest.mark.parametrize("kind", NOISE)
def test_no_alarm_of_noise(kind: str):
    above = 0
    for seed in range(4):
        line = AlarmLine(1.4, 8)
        for value in NOISE[kind](np.random.default_rng(seed)).tolist():
            above += value > line.line
            line.add(value)
    assert above == 0


def test_a_jump_is_above_it_where_the_rule_tells_a_spike():
    values = NOISE["normal"](np.random.default_rng(1))[:200]
    for at, factor in ((70, 1.2), (100, 2.5), (150, 10.0), (199, 1.05)):
        jumped = values.copy()
        jumped[at] *= factor
        line = AlarmLine(1.4, 1)
        lines = []
        for value in jumped.tolist():
            lines.append(line.line)
            line.add(value)
        bench = Bench("spike")
        told = [step for step, value in enumerate(jumped.tolist()) if bench.feed(loss=value)]
        above = [step for step, value in enumerate(jumped) if value > lines[step]]
        assert above == told == ([at] if factor > 2 else [])
