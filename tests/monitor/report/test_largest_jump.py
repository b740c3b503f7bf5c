"""A needle in the loss of a run without findings is told of, with the reason why it is no spike."""

import numpy as np
import pytest

from trainprobe.monitor.report.largest_jump import largest_jump
from trainprobe.monitor.report.page import _Blobs, _describe
from trainprobe.monitor.report.run_view import RunView


def curve(needle=1.0, at=150, noise=0.1, steps=200, seed=0):
    x = 2 * np.exp(np.random.default_rng(seed).normal(0, noise, steps))
    x[at] *= needle
    return np.arange(steps), x


def test_a_smooth_loss_has_none():
    assert largest_jump("loss", curve()) == ""


def test_the_needle_is_named_with_its_height_and_how_rare_it_is():
    text = largest_jump("loss", curve(needle=4.0, noise=0.5))
    assert text.startswith("Largest jump of loss: step 150, ")
    assert "not called a spike because by the noise of the 128 steps before, one step in " in text


@pytest.mark.parametrize("at", [20, 63])
def test_one_in_the_first_steps_says_how_many_are_needed(at):
    text = largest_jump("loss", curve(needle=4.0, at=at))
    assert f"step {at}, " in text and f"only {at} steps came before it, and 64 are needed" in text


def test_a_loss_below_zero_has_no_such_scale():
    steps, values = curve(needle=4.0)
    assert largest_jump("loss", (steps, values - 2)) == ""


def test_the_page_has_it():
    assert _describe(RunView("run", jump="Largest jump"), [], _Blobs())["jump"] == "Largest jump"
