"""A sum whose terms cancel is held against its terms: what rounding leaves of them is no bug, and what is more is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import trainprobe
from benchmarks.dump_compare.healthy import PAIRS
from benchmarks.dump_compare.runs import train
from trainprobe.cli import main
from trainprobe.dump_compare.cancellation import Terms
from trainprobe.dump_compare.dump_side import Side
from trainprobe.engine.core.step_data import entry_name


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("gpt: threads", {"level": "mix", "summary": "both"}),
        ("gpt: float64", {"level": "L1"}),
        ("gpt: eager attention in bfloat16", {"level": "L0"}),
        ("conv: threads", {"level": "L1", "task": "tensor"}),
        ("conv: channels last", {"level": "mix"}),
        ("conv: fused optimizer", {"level": "L0"}),
        ("moe: bfloat16 autocast", {"level": "mix"}),
    ],
)
def test_healthy_pairs_have_no_bug_and_no_suspicion(tmp_path, capsys, name, plan):
    subject, *ways = PAIRS[name]
    sides = [train(tmp_path / side, subject, way, **plan) for side, way in zip("ab", ways, strict=True)]
    capsys.readouterr()
    code = main(["dump-compare", *map(str, sides)])
    said = capsys.readouterr().out
    assert code in (1, 3), said
    assert " bug" not in said and " suspicious" not in said


class Layers(nn.Module):
    """One layer of each sort whose gradients are sums."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv2d(3, 6, 3), nn.LayerNorm(6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(self.conv(x).flatten(2).transpose(1, 2)))


def root_of_squares(terms: Tensor) -> float:
    return float(terms.detach().square().sum().sqrt())


@pytest.mark.parametrize("level", ["L0", "L1"])
def test_norms_of_terms_are_those_of_all_terms(tmp_path, level):
    torch.manual_seed(0)
    model, x, weight = Layers(), torch.randn(4, 3, 9, 9), torch.randn(4, 49, 5)
    with trainprobe.watch(model, output=tmp_path, level=level, console=False) as probe, probe.step():
        (model(x) * weight).sum().backward()
    side = Side(tmp_path / "step0/rank0")
    terms = Terms(side.step_data.calls, side)
    found = {
        f"{entry_name(call).removeprefix('Module.')} {slot}": terms.of(call, slot)[0]
        for call in side.step_data.calls
        for slot in ("output", "weight", "bias", "grad_input.0", "grad_input.1", "grad_input.2")
    }
    rows = weight.flatten(0, 1)  # the gradient of what the linear layer gives, [196, 5]
    hidden = functional.layer_norm(model.conv(x).flatten(2).transpose(1, 2), (6,)).flatten(0, 1)  # what it is given, [196, 6]
    bias = root_of_squares(rows)
    of_weight = root_of_squares(rows[:, :, None] * hidden[:, None])
    if level == "L0":
        expected = {
            "linear.Linear.parameters_grad.0 bias": bias,
            "linear.Linear.parameters_grad.0 weight": of_weight,
            "linear.Linear.forward.0 output": root_of_squares(hidden[:, :, None] * model.linear.weight.T[None]),
        }
    else:
        patches = functional.unfold(x, 3)  # [4, 27, 49]
        expected = {
            "Torch.conv2d.0.forward output": root_of_squares(patches[:, None] * model.conv.weight.flatten(1)[None, :, :, None]),
        }
    for name, true in expected.items():
        assert 0.4 * true <= found[name] <= 2.5 * true, (name, found[name], true)


class Centred(nn.Module):
    """A bias whose gradient is zero: the mean over rows is taken away behind it. `more` is added to its gradient."""

    def __init__(self, more: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.linear.bias.register_hook(lambda grad: grad + more)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return h - h.mean(0)


def centred(folder: Path, more: float) -> str:
    torch.manual_seed(0)
    model, x, weight = Centred(more), torch.randn(64, 8), torch.randn(64, 8)
    with trainprobe.watch(model, output=folder, level="L0", console=False) as probe, probe.step():
        (model(x) * weight).sum().backward()
    return str(folder)


@pytest.mark.parametrize(("more", "code"), [(0.0, 0), (1e-6, 1), (1e-2, 2)])
def test_what_is_left_of_a_zero_is_rounding_unless_it_is_more(tmp_path, capsys, more, code):
    sides = centred(tmp_path / "a", 0.0), centred(tmp_path / "b", more)
    capsys.readouterr()
    found = main(["dump-compare", *sides])
    said = capsys.readouterr().out
    assert found == code, said
    if code == 2:
        assert "Module.linear.Linear.parameters_grad.0" in said and "of what was summed to get it" in said
