"""What the optimizer is given and makes is compared where dumps hold it, and pointed at where they do not."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import trainprobe
from trainprobe.cli import main

MONITOR = {"monitor": {"parameters": True, "gradients": True}}
STEPS = 3


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """Return the folder of dumps, one for each change of the optimizer, with a monitor in the same steps and without."""
    folder = tmp_path_factory.mktemp("states")
    for change in ("none", "none again", "learning rate", "clipping", "last step"):
        for name, more in (("monitored", MONITOR), ("plain", {})):
            train(folder / name / change, change, **more)
    return folder


def train(output, change, **more):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.1e-3 if change == "learning rate" else 1e-3)
    generator = torch.Generator().manual_seed(1)
    with trainprobe.watch(model, optimizer, output=output, console=False, level="L0", summary="both", **more) as probe:
        for step in range(STEPS):
            x = torch.randn(5, 8, generator=generator)
            with probe.step():
                optimizer.zero_grad()
                (model(x) ** 2).mean().backward()
                if change == "clipping":
                    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.param_groups[0]["lr"] *= 1.5 if change == "last step" and step == STEPS - 1 else 1
                optimizer.step()


def compared(a, b, capsys, *more):
    capsys.readouterr()
    code = main(["dump-compare", str(a), str(b), *map(str, more)])
    return code, capsys.readouterr().out


PLACES = {
    "learning rate": (
        "Parameter.0.weight (step 0, rank 0): the learning rate lr is 0.001 in A and 0.0011 in B; all that it is given agrees",
        "makes of the",
    ),
    "clipping": ("Parameter.0.weight.grad (step 0, rank 0): all that it is given agrees, grad is", ""),
    "last step": (
        "Parameter.0.weight (step 2, rank 0): the learning rate lr is 0.001 in A and 0.0015 in B; all that it is given agrees",
        "makes of the",
    ),
}


@pytest.mark.parametrize("change", PLACES)
def test_what_an_optimizer_does_otherwise_is_named_without_its_operators(dumps, capsys, tmp_path, change):
    code, said = compared(dumps / "monitored/none", dumps / f"monitored/{change}", capsys, "--html", tmp_path / "page.html")
    where, hint = PLACES[change]
    assert code == 2, said
    assert where in said.splitlines()[0], said
    assert hint in said


def test_equal_optimizers_agree(dumps, capsys):
    code, said = compared(dumps / "monitored/none", dumps / "monitored/none again", capsys)
    assert code == 0, said
    assert "all 54 calls agree" in said, said  # 30 of modules, and of 4 parameters and 3 steps a gradient and an update


def test_what_one_dump_alone_holds_of_parameters_is_no_agreement(dumps, capsys):
    code, said = compared(dumps / "monitored/none", dumps / "plain/none", capsys)
    assert code == 3, said
    assert "24 calls have no partner; the first is Parameter.0.weight.grad" in said, said


@pytest.mark.parametrize("change", ["learning rate", "clipping"])
def test_weights_that_part_between_two_steps_point_at_what_was_not_recorded(dumps, capsys, change):
    code, said = compared(dumps / "plain/none", dumps / f"plain/{change}", capsys)
    first, *rest = said.splitlines()
    assert code == 2, said
    assert "Module.0.Linear.forward.0 (step 1, micro-batch 0, rank 0): the weights differ" in first, first
    assert "step 0, the last that was compared before, agrees in what both dumps hold" in first, first
    assert "the optimizer's step" in first, first
    assert "record `monitor: {parameters: true, gradients: true}` or `level: mix`" in rest[0], said


def test_a_gradient_that_cancels_is_held_against_those_beside_it(tmp_path, capsys):
    """That of a bias before batch norm is zero but for rounding; no gradients of modules are recorded here."""
    for name, form in (("a", torch.contiguous_format), ("b", torch.channels_last)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(memory_format=form)
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(6, 3, 12, 12).to(memory_format=form)
        plan = {"output": tmp_path / name, "console": False, "level": "L0", "phases": ["forward"], **MONITOR}
        with trainprobe.watch(model, optimizer, **plan) as probe, probe.step():
            (model(x) ** 2).mean().backward()
            optimizer.step()
    code, said = compared(tmp_path / "a", tmp_path / "b", capsys, "--json", tmp_path / "all.json")
    calls = json.loads((tmp_path / "all.json").read_text())["calls"]
    (bias,) = [call for call in calls if call["a"] == "Parameter.0.bias.grad"]
    assert max(value["low"] for value in bias["values"]) > 1e-3, "nothing to tell"
    assert code == 1, said
