"""Plateau: a loss that no longer falls."""

import numpy as np
from frames_by_hand import Bench


def test_a_loss_that_stands_still_is_a_plateau_told_once():
    bench, rng = Bench("plateau", window=200), np.random.default_rng(0)
    for _ in range(600):
        bench.feed(loss=2.0 + rng.normal(0, 0.05))
    assert [f.severity for f in bench.found] == ["info"]


def test_a_loss_that_still_falls_is_no_plateau():
    bench, rng = Bench("plateau", window=200), np.random.default_rng(0)
    for step in range(600):
        bench.feed(loss=2.0 - step / 1000 + rng.normal(0, 0.05))
    assert bench.found == []
