"""No alarm of any rule or relation on healthy trainings of other kinds than the rules were tuned on."""

from __future__ import annotations

import pytest
import torch

from benchmarks.healthy import KINDS, alarms

torch.set_num_threads(1)
QUICK = ("recurrent", "masters", "pair", "closure", "lion", "layer drop", "gan", "brain", "distilled")


@pytest.mark.parametrize("kind", QUICK)
def test_a_healthy_training_raises_no_alarm(kind):
    assert [f.message for f in alarms(kind, seed=7001, steps=70, every=3)] == []


@pytest.mark.parametrize("kind", ["restarts", "policy"])
def test_warm_restarts_and_a_loss_around_zero_raise_no_alarm(kind):
    assert [f.message for f in alarms(kind, seed=7001)] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (*QUICK, "restarts", "policy")])
def test_a_healthy_training_of_more_kinds_raises_no_alarm(kind):
    assert [f.message for f in alarms(kind, seed=7001)] == []
