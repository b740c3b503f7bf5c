"""Weights that have moved alike and otherwise, against trainings by hand in float64 that are rounded to float32."""

from __future__ import annotations

import numpy as np
import pytest

from trainprobe.engine.compare.movement import moved_otherwise, shares

NAMES = [f"w{i}" for i in range(9)]


def numbers(weight: np.ndarray) -> dict[str, float]:
    return {
        "norm": float(np.linalg.norm(weight)),
        "max": float(weight.max()),
        "min": float(weight.min()),
        "mean": float(weight.mean()),
    }


def moved(rate: dict[str, float], noise: float = 0.0) -> dict[str, float]:
    """Return the shares of nine weights that A moves by one step of SGD at the rate 1, and B at its own, with noise."""
    draw = np.random.default_rng(3)
    found = []
    for name in NAMES:
        start, gradient = draw.standard_normal((2, 8, 8)).astype(np.float32)
        a = start - np.float32(0.01) * gradient
        b = start - np.float32(0.01 * rate.get(name, 1.0)) * gradient * (1 + noise * draw.standard_normal((8, 8)))
        found.append((name, numbers(start), numbers(start), numbers(a), numbers(b.astype(np.float32))))
    return shares(found)


@pytest.mark.parametrize("noise", [0.0, 1e-6, 1e-4])
def test_rounding_is_no_other_movement(noise: float) -> None:
    assert moved_otherwise(moved({}, noise), 1, NAMES) is None


@pytest.mark.parametrize("rate", [0.5, 0.97, 1.03, 3.0, -1.0])
def test_another_rate_moves_all_weights_otherwise(rate: float) -> None:
    found = moved_otherwise(moved(dict.fromkeys(NAMES, rate)), 1)
    assert found is not None
    assert found[0] == NAMES
    assert found[1] == pytest.approx(abs(1 - rate) / max(1, abs(rate)), rel=0.02)


def test_some_weights_count_where_their_gradients_are_known_to_agree() -> None:
    two = moved({"w3": 0.1, "w7": -0.2})
    assert moved_otherwise(two, 1) is None
    assert moved_otherwise(two, 1, NAMES) == (["w3", "w7"], two["w3"])
    assert moved_otherwise(moved({"w3": 0.1}), 1, NAMES) is None  # one may be rounding alone


def test_weights_that_rest_are_left_out() -> None:
    rests = numbers(np.ones(4))
    assert shares([("w", rests, rests, rests, rests)]) == {}
