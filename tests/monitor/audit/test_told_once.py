"""One cause is one finding: what comes and goes is counted, and a step without an update is no step in which nothing ran."""

from __future__ import annotations

import pytest
import torch

import trainprobe


def train(folder, *, steps, disturb=None, every=1, scaler=None, **plan):
    """Train with AdamW, updating at every so many steps; disturb: step → the layer whose weight is written before it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with trainprobe.watch(model, optimizer, output=folder, **plan) as probe:
        for step in range(steps):
            if disturb and step in disturb:
                model[disturb[step]].weight.data.add_(0.5)
            with probe.step():
                loss = model(torch.randn(16, 4)).square().sum()
                if scaler is not None:
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                else:
                    loss.backward()
                    if (step + 1) % every == 0:
                        optimizer.step()
                        optimizer.zero_grad()
    return [f for f in probe.findings if f.severity != "info"]


def test_a_violation_that_comes_and_goes_is_one_finding_that_is_counted(tmp_path):
    (found,) = train(tmp_path / "out", steps=9, disturb={2: 0, 5: 0, 8: 0}, audit={"every": 1})
    assert (found.rule, found.step, found.count, found.last_step) == ("untouched_between_steps", 2, 3, 8)


def test_another_cause_of_the_same_relation_is_another_finding(tmp_path):
    found = train(tmp_path / "out", steps=7, disturb={2: 0, 5: 2}, audit={"every": 1})
    assert [(f.step, f.site.name, f.count) for f in found] == [(2, "0.weight", 1), (5, "2.weight", 1)]


MONITOR = {"level": "off", "monitor": True, "black_box": False}


@pytest.mark.parametrize("every", [1, 4])
def test_a_step_that_only_accumulates_is_no_step_in_which_nothing_was_seen(every, tmp_path):
    assert train(tmp_path / "out", steps=8, every=every, **MONITOR) == []


def test_neither_is_one_that_a_scaler_skips(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)  # the first steps overflow
    assert [f.message for f in train(tmp_path / "out", steps=6, scaler=scaler, **MONITOR) if f.rule == "probe"] == []


def test_but_one_in_which_nothing_ran_is(tmp_path):
    model = torch.nn.Linear(3, 1)
    with trainprobe.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), output=tmp_path / "out", **MONITOR) as probe:
        for _ in range(2):
            with probe.step():
                pass
    assert ["nothing was seen" in f.message for f in probe.findings if f.rule == "probe"] == [True]


def test_weights_and_moments_that_are_written_together_are_one_finding(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with trainprobe.watch(model, optimizer, output=tmp_path / "out", audit={"every": 1}, monitor=False) as probe:
        for step in range(4):
            if step == 3:
                for p in model.parameters():
                    for tensor in (p.data, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]):
                        tensor.mul_(1.5)
            with probe.step():
                optimizer.zero_grad()
                model(torch.randn(16, 4)).square().sum().backward()
                optimizer.step()
    [found] = [f for f in probe.findings if f.severity != "info"]
    assert (found.rule, found.step, found.site.name, found.site.slot) == ("untouched_between_steps", 3, "weight", "value")
    assert ", and exp_avg and 1 more with it." in found.message and set(found.names) == {"weight", "bias"}


@pytest.mark.parametrize("when", ["before the optimizer", "behind it", "never"])
def test_parameters_that_a_loop_updates_by_hand_are_not_lost(when, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.01)

    def by_hand():
        for p in model[2].parameters():
            p.data -= 0.1 * p.grad

    with trainprobe.watch(model, optimizer, output=tmp_path / "out", monitor=False) as probe:
        for _ in range(25):
            with probe.step():
                model.zero_grad()
                x = torch.randn(16, 6)
                (model(x) - x[:, :3]).square().mean().backward()
                if when == "before the optimizer":
                    by_hand()
                optimizer.step()
                if when == "behind it":
                    by_hand()
    told = [(f.rule, f.site.name) for f in probe.findings if f.severity != "info"]
    assert told == ([("ownership", "2.weight"), ("movement", "2.weight")] if when == "never" else [])
