"""A program's own `pause` holds until its `resume`, also where the tool itself lets something rest meanwhile."""

from __future__ import annotations

import pytest
import torch

import trainprobe

torch.set_num_threads(1)
MONITOR = {"activations": True, "batches": True, "features": {"dead_units": {"names": "**"}}}
PLANS = {
    "monitor": {"level": "off", "monitor": MONITOR},
    "modules": {"level": "L0"},
    "ops": {"level": "L1"},
    "all": {"level": "mix", "monitor": MONITOR},
}


def forwards(step_data, kind):
    """Return how many forward calls of the model's only layer were recorded."""
    names = {"module": "0", "op": ".linear"}
    return sum(call.kind == kind and call.phase == "forward" and call.name.endswith(names[kind]) for call in step_data.calls)


def counts(step_data, plan):
    """Return how often each part of the tool saw the model called."""
    found = {"modules": forwards(step_data, "module")} if plan != "ops" else {"ops": forwards(step_data, "op")}
    if "monitor" in PLANS[plan]:
        found |= {"batches": len(step_data.batches), "features": sum(f.name == "0" for f in step_data.features)}
    return found


def small_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3))


def watch(model, optimizer, folder, plan, **more):
    options = {"output": folder, "sinks": ["memory"], "on_error": "raise", **PLANS[plan], **more}
    return trainprobe.watch(model, optimizer, options)


class TriesTwice(torch.optim.SGD):
    """Runs its closure three times: the step's own, and two trials."""

    def step(self, closure):  # pyright: ignore[reportIncompatibleMethodOverride]
        for _ in range(3):
            with torch.enable_grad():
                loss = closure()
        super().step()
        return loss


def run_trials(folder, plan, pauses, resumes):
    """Train one step; pause in one run of the closure, resume in another, and run the model once behind the update."""
    model, x, runs = small_model(), torch.ones(2, 4), []
    optimizer = TriesTwice(model.parameters(), 0.1)
    with watch(model, optimizer, folder, plan) as probe:

        def closure():
            runs.append(None)
            if len(runs) == pauses:
                probe.pause()
            if len(runs) == resumes:
                probe.resume()
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        probe.begin_step(0)
        optimizer.step(closure)
        model(x)
        return counts(probe.end_step(), plan)


@pytest.mark.parametrize("plan", PLANS)
def test_a_pause_in_a_trial_outlasts_it(tmp_path, plan):
    without = run_trials(tmp_path / "a", plan, None, None)
    paused = run_trials(tmp_path / "b", plan, 2, None)
    # a dump holds the trials, the monitor leaves them out; both have the first run and the call behind the update
    assert without == {part: 4 if part in ("modules", "ops") and plan != "monitor" else 2 for part in without}
    assert paused == dict.fromkeys(paused, 1)  # the first run alone


@pytest.mark.parametrize("plan", PLANS)
def test_a_pause_that_ends_in_a_trial_is_over_behind_it(tmp_path, plan):
    found = run_trials(tmp_path, plan, 2, 3)
    trial = 0 if plan == "monitor" else 1  # the trial itself is in the dump
    assert found["modules" if plan != "ops" else "ops"] == 2 + trial
    assert {found.get(part, 2) for part in ("batches", "features")} == {2}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("where", ["before", "inside", "nowhere"])
def test_a_pause_around_a_declared_loss_outlasts_it(tmp_path, plan, where):
    model, x, ran = small_model(), torch.ones(2, 4), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, optimizer, tmp_path, plan, audit={"every": 1}) as probe:

        def loss(stand_in):
            ran.append(None)
            if where == "inside":
                probe.pause()
            return stand_in(x).square().mean()

        probe.declare_loss(loss)
        probe.begin_step(0)
        model(x).square().mean().backward()
        if where == "before":
            probe.pause()
        optimizer.step()
        model(x)
        step_data = probe.end_step()
    assert len(ran) == 1
    assert counts(step_data, plan) == dict.fromkeys(counts(step_data, plan), 2 if where == "nowhere" else 1)


def test_nothing_is_installed_behind_a_step_that_rests(tmp_path):
    own, softmax = torch.nn.Module._call_impl, torch.softmax
    for plan in PLANS:
        run_trials(tmp_path / plan, plan, 2, None)
        assert torch.nn.Module._call_impl is own
        assert torch.softmax is softmax
