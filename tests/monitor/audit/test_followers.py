"""Copies that follow the weights: what is wrong with one is named, and a right one gets no word."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn

import trainprobe
from trainprobe.engine.core.live_objects import instances_of
from trainprobe.monitor.audit.observers.copies import Copy

HEALTHY = ("average", "with a warm-up", "hard", "now and then", "at rest", "of torch", "trained itself")
FAULTS = {
    "away": ("moves away from them, by 0.01", "0.weight"),
    "exchanged": ("keeps 0.01 of itself", "0.weight"),
    "itself": ("is updated with its own numbers", "0.weight"),
    "in 16 bits": ("is kept in bfloat16, where its updates round away", "0.weight"),
    "matrices alone": ("follows in some tensors, and not in 0.bias and 1 more", "0.bias"),
}


def follow(how: str, step: int, slow: nn.Module, model: nn.Module) -> None:
    decay = {"exchanged": 0.01, "with a warm-up": min(0.99, (1 + step) / (10 + step)), "hard": 0.0}.get(how, 0.99)
    if how == "at rest" or (how == "now and then" and step % 4):
        return
    if how == "itself":
        slow.load_state_dict(slow.state_dict())
    elif how == "now and then":
        slow.load_state_dict(model.state_dict())
    elif how == "of torch":
        slow.update_parameters(model)
    else:
        for mine, its in zip(slow.parameters(), model.parameters(), strict=True):
            if how != "matrices alone" or mine.dim() > 1:
                mine.data.add_(its.data.to(mine.dtype) - mine.data, alpha=(-1 if how == "away" else 1) * (1 - decay))


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Train on a batch of its own, and return it."""
    x = torch.randn(32, 6)
    loss = (model(x) - x[:, :3]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return x


def found(how: str, folder) -> list:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))
    slow = copy.deepcopy(model).requires_grad_(how == "trained itself")
    slow = torch.optim.swa_utils.AveragedModel(model) if how == "of torch" else slow
    slow = slow.bfloat16() if how == "in 16 bits" else slow
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with trainprobe.watch(model, optimizer, output=folder / "out", audit={"every": 2}, monitor=False) as probe:
        for step in range(24):
            with probe.step():
                x = one_step(model, optimizer)
                if how == "trained itself":  # on the same rows: its own gradient leads away, and it is no average
                    (-slow(x).square().mean()).backward()
                follow(how, step, slow, model)
    return [f for f in probe.findings if f.severity != "info"]


@pytest.mark.parametrize("how", HEALTHY)
def test_a_copy_that_follows_or_rests_gets_no_word(how, tmp_path):
    assert found(how, tmp_path) == []


@pytest.mark.parametrize("how", FAULTS)
def test_what_is_wrong_with_a_copy_is_named(how, tmp_path):
    words, name = FAULTS[how]
    told = found(how, tmp_path)
    assert [f.rule for f in told] == ["followers"]
    assert words in told[0].message and told[0].site.name == name, told[0].message


def test_a_copy_that_goes_while_it_is_read_is_left_out():
    """Garbage is collected at any moment, so also behind the look whether a copy is still there."""
    model = nn.Linear(2, 2)
    gone = Copy(copy.deepcopy(model), model, ("weight", "bias"))
    assert gone.both() is None


class Shadows:
    """Averages as programs keep them: in a list, in a dict of new tensors, in a dict with buffers, as buffers of a module."""

    def __init__(self, model: nn.Module, form: str) -> None:
        self.form, self.sign = form, 1
        named = {name: p.detach().clone() for name, p in model.named_parameters()}
        if form == "buffers":
            self.module = nn.Module()
            self.module.register_buffer("decay", torch.tensor(0.9))
            for name, value in named.items():
                self.module.register_buffer(name.replace(".", ""), value)
        else:
            self.held = list(named.values()) if form == "list" else dict(named)

    def update(self, model: nn.Module) -> None:
        for i, (name, p) in enumerate(model.named_parameters()):
            key = i if self.form == "list" else name
            held = self.module._buffers if self.form == "buffers" else self.held
            key = name.replace(".", "") if self.form == "buffers" else key
            step = self.sign * 0.1 * (p.detach() - held[key])
            if self.form == "dict":
                held[key] = held[key] + step
            else:
                held[key].add_(step)


def found_of_tensors(form: str, folder, *, wrong: bool, within: bool) -> list:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))
    average, optimizer = Shadows(model, form), torch.optim.AdamW(model.parameters(), lr=1e-2)
    average.sign = -1 if wrong else 1
    gone = weakref.ref(average)
    with trainprobe.watch(model, optimizer, output=folder / "out", monitor=False) as probe:
        for step in range(48):
            with probe.step():
                one_step(model, optimizer)
                if within and average is not None:
                    average.update(model)
            if not within and average is not None:
                average.update(model)
            average = average if step < 40 else None
        held = [one for one in instances_of([Copy]) if one._tensors is not None]
    assert gone() is None and held == []
    return [(f.rule, f.site.name, f.message) for f in probe.findings if f.severity != "info"]


@pytest.mark.parametrize("within", [True, False], ids=["within", "between"])
@pytest.mark.parametrize("form", ["list", "dict", "buffers"])
def test_tensors_that_follow_are_a_copy_too(form, within, tmp_path):
    assert found_of_tensors(form, tmp_path, wrong=False, within=within) == []
    [(rule, name, message)] = found_of_tensors(form, tmp_path, wrong=True, within=within)
    assert (rule, name) == ("followers", "0.weight")
    assert "tensors in a" in message and "moves away from them, by 0.1 of the distance" in message
