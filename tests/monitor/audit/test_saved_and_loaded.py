"""What is loaded is what was saved, at the same places: over two processes' worth of probes, and within one."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import trainprobe

SAVED = 13


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(probe, model, optimizer, steps):
    for step in steps:
        with probe.step(step):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()


def resumed(folder, load, **audit):
    """Train to step 13, save, and go on with a new model, optimizer and probe; return what the second probe found."""
    plan = {"level": "off", "sinks": [], "on_existing": "continue", "output": folder, "audit": audit or True}
    model, optimizer = make()
    with trainprobe.watch(model, optimizer, plan=plan) as probe:
        train(probe, model, optimizer, range(SAVED + 1))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(probe, model, optimizer, range(SAVED + 1, SAVED + 3))
    assert [f for f in probe.findings if f.severity != "info"] == []
    model, optimizer = make()
    load(model, optimizer, *saved)
    with trainprobe.watch(model, optimizer, plan=plan) as probe:
        train(probe, model, optimizer, range(SAVED + 1, SAVED + 9))
    return [f for f in probe.findings if f.severity != "info"]


def whole(model, optimizer, weights, states):
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)


def swapped(model, optimizer, weights, states):
    """The states of two weights of one shape at each other's place."""
    whole(model, optimizer, weights, states)
    a, b = (optimizer.state[model[i].weight] for i in (0, 2))
    a["exp_avg"], b["exp_avg"] = b["exp_avg"], a["exp_avg"]


def without_moments(model, optimizer, weights, states):
    model.load_state_dict(weights)


def initialised_afterwards(model, optimizer, weights, states):
    whole(model, optimizer, weights, states)
    nn.init.normal_(model[2].weight)


def rounded(model, optimizer, weights, states):
    whole(model, optimizer, {name: t.bfloat16().float() if name == "0.weight" else t for name, t in weights.items()}, states)


@pytest.mark.parametrize("load", [whole, lambda *_: None], ids=["a whole resume", "a fresh start"])
def test_a_training_that_resumes_as_it_was_or_begins_anew_raises_no_alarm(tmp_path, load):
    assert [f.message for f in resumed(tmp_path / "out", load)] == []


@pytest.mark.parametrize(
    ("load", "name", "slot", "words"),
    [
        (swapped, "0.weight", "exp_avg", "it holds what was exp_avg of 2.weight"),
        (without_moments, "0.weight", "step", "it is missing"),
        (initialised_afterwards, "2.weight", "value", "its values differ"),
        (rounded, "0.weight", "value", "its values differ"),
    ],
)
def test_what_did_not_come_back_is_named_at_the_first_step_after_the_load(tmp_path, load, name, slot, words):
    """Step 14 is none at which the audit is due by its intervals."""
    found = resumed(tmp_path / "out", load)
    assert [(f.rule, f.step, f.site.name, f.site.slot) for f in found[:1]] == [("saved_and_loaded", SAVED + 1, name, slot)]
    assert words in found[0].message
    assert f"saved at step {SAVED}" in found[0].message


def test_a_relation_that_is_left_out_looks_at_no_save(tmp_path):
    assert resumed(tmp_path / "out", swapped, relations={"saved_and_loaded": False}) == []
    assert not (tmp_path / "out" / "rank0" / "saved_states.json").exists()


def test_a_load_within_one_process_is_judged_at_the_next_step(tmp_path):
    plan = {"level": "off", "sinks": [], "output": tmp_path / "out", "audit": True}
    model, optimizer = make()
    with trainprobe.watch(model, optimizer, plan=plan) as probe:
        train(probe, model, optimizer, range(3))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(probe, model, optimizer, range(3, 5))
        whole(model, optimizer, *saved)
        train(probe, model, optimizer, range(5, 7))
        assert [f.message for f in probe.findings] == []
        swapped(model, optimizer, *saved)
        train(probe, model, optimizer, range(7, 8))
        assert [(f.rule, f.step, f.site.name) for f in probe.findings] == [("saved_and_loaded", 7, "0.weight")]
    assert torch.optim.Optimizer.state_dict.__name__ == "state_dict"
    assert not hasattr(torch.optim.Optimizer.state_dict, "ended")


def test_a_state_dict_that_is_taken_before_anything_was_trained_is_no_save(tmp_path):
    """Most of the model is frozen, so that most of it is as it was then whatever is loaded."""
    plan = {"level": "off", "sinks": [], "output": tmp_path / "out", "audit": True}
    model, optimizer = make()
    for p in list(model.parameters())[:-1]:
        p.requires_grad_(False)
    with trainprobe.watch(model, optimizer, plan=plan) as probe:
        states = optimizer.state_dict()
        optimizer.load_state_dict(states)
        with torch.no_grad():
            model[3].bias.add_(1)
        train(probe, model, optimizer, range(2))
        assert [f.message for f in probe.findings if f.rule == "saved_and_loaded"] == []


# ---- random numbers -----------------------------------------------------------------------------------------------------


def random_numbers(folder, *, dropout, puts_back):
    """Train with dropout or without, resume as a script that seeds first; return what `resumed` says of the generators."""
    plan = {"level": "off", "sinks": [], "on_existing": "continue", "output": folder, "audit": {"severity": "info"}}
    found, saved = [], ()
    for steps in (range(SAVED + 1), range(SAVED + 1, SAVED + 4)):
        torch.manual_seed(0)
        np.random.seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5 if dropout else 0.0), nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if steps[0]:
            whole(model, optimizer, *saved[:2])
            if puts_back:
                torch.set_rng_state(saved[2])
                np.random.set_state(saved[3])
        with trainprobe.watch(model, optimizer, plan=plan) as probe:
            for step in steps:
                with probe.step(step):
                    inputs = torch.from_numpy(np.random.randn(3, 4)).float() + step  # no two batches are alike
                    optimizer.zero_grad()
                    model(inputs).square().sum().backward()
                    optimizer.step()
            saved = (*copy.deepcopy((model.state_dict(), optimizer.state_dict())), torch.get_rng_state(), np.random.get_state())
        found += [f for f in probe.findings if f.rule == "resumed" and f.site.name.startswith("random")]
    return found


@pytest.mark.parametrize(
    ("dropout", "severity", "generator"),
    [(True, "warning", "the generator of torch and that of numpy is in"), (False, "info", "the generator of numpy is in")],
)
def test_random_numbers_that_begin_again_after_a_load_are_found(tmp_path, dropout, severity, generator):
    (found,) = random_numbers(tmp_path / "out", dropout=dropout, puts_back=False)
    assert found.step == SAVED + 1 and found.severity == severity and generator in found.message
    assert random_numbers(tmp_path / "twin", dropout=dropout, puts_back=True) == []
