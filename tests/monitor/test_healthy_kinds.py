"""No alarm of any rule or relation on healthy trainings of other kinds than the rules were tuned on."""

from __future__ import annotations

import pytest
import torch

from benchmarks.healthy import KINDS, alarms

torch.set_num_threads(1)
QUICK = ("recurrent", "masters", "pair", "closure", "lion", "layer drop", "gan", "brain")


@pytest.mark.parametrize("kind", QUICK)
def test_a_healthy_training_raises_no_alarm(kind):
    assert [f.message for f in alarms(kind, seed=7001, steps=70, every=3)] == []


def test_warm_restarts_raise_no_alarm():
    assert [f.message for f in alarms("restarts", seed=7001)] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in QUICK])
def test_a_healthy_training_of_more_kinds_raises_no_alarm(kind):
    assert [f.message for f in alarms(kind, seed=7001)] == []
