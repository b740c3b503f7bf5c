"""Activation checkpointing under the audit: silent where the second forward is the first, and right where it is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import trainprobe
from tests.monitor.audit.trained import PLAN


class Checkpointed(nn.Module):
    def __init__(self, drop: float = 0.3, **how) -> None:
        super().__init__()
        self.how = how
        self.inner = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(drop), nn.Linear(8, 8)) for _ in range(3))

    def forward(self, x):
        x = self.inner(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, **self.how)
        return x


def audited(folder, model, spoil=None, interleaved=False):
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with trainprobe.watch(model, optimizer, plan=PLAN, output=folder) as probe:
        for step in range(4):
            with probe.step(step):
                optimizer.zero_grad()
                losses = []
                for _ in range(3):
                    losses.append(model(torch.randn(4, 6)).square().mean())
                    if spoil is not None and step >= 2:
                        spoil(model)
                    if not interleaved or len(losses) > 1:
                        losses.pop(0).backward()
                for loss in losses:
                    loss.backward()
                optimizer.step()
    return [f for f in probe.findings if f.severity != "info"]


@pytest.mark.parametrize("interleaved", [True, False], ids=["as a pipeline", "one by one"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_that_restores_the_random_state_repeats_the_first_forward(tmp_path, reentrant, interleaved):
    """Also where forwards and backward passes of several micro-batches run in turns."""
    found = audited(tmp_path / "out", Checkpointed(use_reentrant=reentrant), interleaved=interleaved)
    assert [f.message for f in found] == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_dropout_that_draws_anew_is_found_in_its_module(tmp_path, reentrant):
    """Which modules run again is learned at the first checked step, so the second one tells."""
    found = audited(tmp_path / "out", Checkpointed(use_reentrant=reentrant, preserve_rng_state=False))
    assert (found[0].rule, found[0].step, found[0].site.name) == ("recomputed_forward", 1, "blocks.0.1")


def test_a_flag_that_changes_between_the_two_forwards_is_found(tmp_path):
    def spoil(model):
        model.blocks[1][1].p = 0.9

    found = audited(tmp_path / "out", Checkpointed(use_reentrant=False), spoil)
    assert (found[0].rule, found[0].step, found[0].site.name) == ("recomputed_forward", 2, "blocks.1.1")


def test_without_checkpointing_nothing_is_looked_at(tmp_path):
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5))
    assert audited(tmp_path / "out", model) == []
