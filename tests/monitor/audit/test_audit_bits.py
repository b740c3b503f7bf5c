"""The audit changes no bit: losses, gradients, weights, optimizer state and random states are those of the bare training."""

from __future__ import annotations

import pytest
import torch

import trainprobe
from tests.lockstep import differences, train
from tests.zoo import load


@pytest.mark.parametrize(
    "name", ["residual_gpt", "gradient_accumulation", "tied_weights", "batchnorm_branches", "checkpoint_nonreentrant"]
)
def test_training_is_bit_equal_with_and_without_the_audit(name, tmp_path):
    case = load(name)

    def watch(model, optimizer):
        plan = {"level": "off", "audit": {"every": 1}, "output": tmp_path / "out"}
        probe = trainprobe.watch(model, optimizer, plan=plan)
        model.probed = True
        del model.probed
        return probe

    assert differences(train(case), train(case, watch=watch)) == []


def test_the_declared_loss_changes_no_bit_of_dropout_buffers_or_gradients(tmp_path):
    def run(watched):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with trainprobe.watch(
            model, optimizer, level="off", audit={"every": 1} if watched else None, output=tmp_path / str(watched)
        ) as probe:
            for _ in range(3):
                with probe.step():
                    optimizer.zero_grad()
                    x = torch.randn(6, 4)
                    probe.declare_loss(lambda m, x=x: m(x).sum())
                    model(x).sum().backward()
                    optimizer.step()
            assert [f for f in probe.findings if f.rule == "declared_loss"] == []
        return [*model.state_dict().values(), torch.get_rng_state()]

    assert all(map(torch.equal, run(False), run(True)))


def test_nothing_is_left_behind(tmp_path):
    before = (torch.nn.Module._call_impl, torch.nn.Module.train, torch.autograd.backward, torch.optim.Optimizer.zero_grad)
    step = torch.optim.lr_scheduler.LRScheduler.step
    model = torch.nn.Linear(2, 2)
    with trainprobe.watch(model, None, level="off", audit=True, output=tmp_path / "out") as probe, probe.step():
        model.eval()
        model.train()
        model(torch.ones(1, 2)).sum().backward()
    now = (torch.nn.Module._call_impl, torch.nn.Module.train, torch.autograd.backward, torch.optim.Optimizer.zero_grad)
    assert now == before
    assert torch.optim.lr_scheduler.LRScheduler.step is step
    assert not model._forward_pre_hooks
