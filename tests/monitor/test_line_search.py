"""An optimizer that tries other weights within its step: the monitor looks at the first evaluation, the one of the training."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Linear, Tanh

import trainprobe

torch.set_num_threads(1)


def train(seed=0, steps=1, folder=None, **plan):
    """Train by L-BFGS with a line search; return probe, collected steps, loss and gradient of each evaluation, weights."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(Linear(16, 32), Tanh(), Linear(32, 32), Tanh(), Linear(32, 4))
    teacher = torch.nn.Sequential(Linear(16, 16), Tanh(), Linear(16, 4))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=5, history_size=4, line_search_fn="strong_wolfe")
    seen = []

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        seen.append((loss.item(), model[0].weight.grad.norm().item()))
        return loss

    plan = {"level": "off", "sinks": [], **plan}
    with trainprobe.watch(model, optimizer, output=folder, **plan) as probe:
        collected_steps = []
        probe.watchers.append(lambda step_data: collected_steps.append(step_data) or ())
        for step in range(steps):
            x = torch.randn(64, 16)
            y = teacher(x).detach()
            with probe.step(step):
                probe.note("loss", optimizer.step(closure))
    return probe, collected_steps, seen, [p.detach().clone() for p in model.parameters()]


def test_only_the_first_evaluation_is_watched(tmp_path):
    own = torch.nn.Module._call_impl
    collect = {"batches": True, "gradients": {"unreduced": True}, "features": {"dead_units": True}}
    _, (step_data,), seen, _ = train(folder=tmp_path, monitor=collect)
    assert len(seen) > 3
    assert [
        call.call for call in step_data.calls if call.kind == "module" and call.phase == "forward" and call.name == "0"
    ] == [0]
    assert len(step_data.batches) == 1
    norms = {(r.site.name, r.site.slot): r.values["norm"] for r in step_data.records() if r.site.kind == "parameter"}
    assert norms["0.weight", "grad"] == pytest.approx(seen[0][1], rel=1e-6)
    assert norms["0.weight", "grad_unreduced"] == pytest.approx(seen[0][1], rel=1e-6)
    assert step_data.scalars["loss"] == pytest.approx(seen[0][0], rel=1e-6)
    assert torch.nn.Module._call_impl is own


def test_a_dump_holds_every_evaluation(tmp_path):
    _, (step_data,), seen, _ = train(folder=tmp_path, level="L0")
    calls = [call.call for call in step_data.calls if call.kind == "module" and call.phase == "forward" and call.name == "0"]
    assert calls == list(range(len(seen)))


def test_nothing_of_the_training_changes(tmp_path):
    plain, watched = (
        train(steps=4, folder=tmp_path / "a"),
        train(steps=4, folder=tmp_path / "b", monitor=True, audit={"every": 1}),
    )
    assert plain[2] == watched[2]
    assert all(map(torch.equal, plain[3], watched[3]))


@pytest.mark.parametrize("seed", [2, 3, 9])
def test_a_healthy_line_search_raises_no_alarm(tmp_path, seed):
    probe, collected_steps, seen, _ = train(seed, 110, tmp_path, monitor=True)
    assert len(seen) > 2 * len(collected_steps)
    assert max(loss for loss, _ in seen) > 5 * max(
        step_data.scalars["loss"] for step_data in collected_steps[64:]
    )  # it did try far weights
    assert [finding.message for finding in probe.findings] == []
