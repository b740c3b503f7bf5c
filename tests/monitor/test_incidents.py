"""One incident, one finding, whichever rules see it; what is graver, or acts otherwise, is told besides."""

import numpy as np
import pytest
from frames_by_hand import frame, grads, noisy

from trainprobe.monitor.frames import SeriesTable
from trainprobe.monitor.plan import make_rules
from trainprobe.monitor.watcher import Watcher, judge_frames


def judged(watcher, step, rng, height=1.0):
    values = grads({name: noisy(rng) * height for name in "abcdef"})
    return watcher.judge(frame(step, watcher.table, *values, loss=noisy(rng) * height, lr=1e-3))


def diverging(rules):
    """A training that leaves at step 100 and never comes back; return what is found in it."""
    table, rng, frames = SeriesTable(), np.random.default_rng(0), []
    for step in range(260):
        height = 1.0 if step < 100 else 30.0 * 1.05 ** min(step - 100, 80)
        values = grads({name: noisy(rng) * height for name in "abcdef"})
        frames.append(frame(step, table, *values, loss=noisy(rng) * height, lr=1e-3))
    return judge_frames(frames, make_rules(rules))


def test_a_divergence_is_one_finding_that_counts_the_steps_it_lasts():
    (found,) = diverging({})
    assert (found.rule, found.step, found.site.name) == ("spike", 100, "loss")
    assert found.count > 60 and found.last_step > 160


def test_without_folding_the_rules_would_have_told_of_it_one_by_one():
    assert {f.rule for f in diverging(["drift"])} == {"drift"}


def test_a_rule_with_an_action_of_its_own_is_heard_within_an_incident():
    found = diverging({"drift": {"actions": ["log", "stop"]}})
    assert [f.rule for f in found] == ["spike", "drift"]


def test_what_is_graver_is_told_within_an_incident():
    found = diverging({"drift": {"severity": "error"}})
    assert [(f.rule, f.severity) for f in found] == [("spike", "warning"), ("drift", "error")]


@pytest.mark.parametrize("restart", [False, True])
def test_the_next_incident_is_another_finding_and_a_restart_does_not_tell_of_one_again(restart):
    watcher, rng, found = Watcher(make_rules({})), np.random.default_rng(0), []
    for step in range(200):
        found += judged(watcher, step, rng, 30.0 if step in (*range(100, 106), 160) else 1.0)
        if restart and step == 102:
            state, watcher = watcher.state(), Watcher(make_rules({}))
            watcher.restore(state)
    assert [f.step for f in found] == [100, 160]
