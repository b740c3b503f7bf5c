"""Reported numbers of tokens against those that the model was called with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trainprobe
from tests.monitor.audit.trained import PLAN

MICRO, BATCH, LENGTH = 3, 2, 5
OF_A_STEP = MICRO * BATCH * LENGTH


def audited(folder, told, lengths=(LENGTH,) * MICRO):
    """Train on tokens; `told(step)` gives name → number that is noted of each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with trainprobe.watch(model, optimizer, plan=PLAN, output=folder) as probe:
        for step in range(4):
            with probe.step(step):
                optimizer.zero_grad()
                for length in lengths:
                    model(torch.randint(0, 11, (BATCH, length))).square().mean().backward()
                optimizer.step()
                for name, number in told(step).items():
                    probe.note(name, number)
    return [f for f in probe.findings if f.severity != "info"]


@pytest.mark.parametrize(
    "told",
    [
        lambda step: {"tokens": OF_A_STEP},
        lambda step: {"num_tokens": OF_A_STEP - 7},  # seven are padding
        lambda step: {"num_input_tokens_seen": (step + 1) * OF_A_STEP, "train/tokens": OF_A_STEP},
        lambda step: {"tokens_per_second": 1e6, "consumed_tokens": 1e9 + step * OF_A_STEP},
    ],
)
def test_counts_that_follow_the_data_raise_no_alarm(tmp_path, told):
    assert audited(tmp_path / "out", told) == []


@pytest.mark.parametrize(
    ("told", "name", "step"),
    [
        (lambda step: {"tokens": OF_A_STEP * (2 if step >= 2 else 1)}, "tokens", 2),  # counted twice
        (lambda step: {"num_tokens": OF_A_STEP / MICRO}, "num_tokens", 0),  # accumulation left out
        (lambda step: {"tokens_seen": (step + 1) * 2 * OF_A_STEP}, "tokens_seen", 1),  # added once a rank
        (lambda step: {"consumed_tokens": step * OF_A_STEP / MICRO}, "consumed_tokens", 1),
    ],
)
def test_counts_that_do_not_are_found(tmp_path, told, name, step):
    found = audited(tmp_path / "out", told)
    assert [(f.rule, f.step, f.site.name) for f in found[:1]] == [("token_count", step, name)]


def test_micro_batches_of_different_lengths_are_added_up(tmp_path):
    assert audited(tmp_path / "out", lambda step: {"tokens": 2 * (3 + 5 + 7)}, (3, 5, 7)) == []
