"""How a step's rounding is imitated: the same for the same call, whatever was judged before it."""

from __future__ import annotations

import torch

from trainprobe.op_check.noise import Noise
from trainprobe.op_check.run import SINGLE


def test_the_call_that_first_asks_for_random_factors_does_not_move_them() -> None:
    unit = 2.0**-21  # that no other call asks for
    with Noise(0, SINGLE, SINGLE) as noise:
        factors = noise.draws.factors(torch.ones(1 << 12, dtype=torch.float64), unit)
    assert set(factors.tolist()) == {1 - unit, 1 + unit}
