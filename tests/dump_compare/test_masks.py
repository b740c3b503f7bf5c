"""The lowest numbers of two formats are one mask, whether statistics or elements tell it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trainprobe
from trainprobe.cli import main


class Masked(nn.Module):
    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.scores, self.hidden = nn.Linear(6, 6), hidden

    def forward(self, x):
        scores = self.scores(x)
        return scores.masked_fill(self.hidden, torch.finfo(scores.dtype).min).contiguous().softmax(-1)


def train(output, dtype, hidden=None, by=0.0):
    torch.manual_seed(0)
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1) if hidden is None else hidden
    model, x = Masked(hidden), torch.randn(6, 6)
    if by:
        model.scores.register_forward_hook(lambda module, given, made: made + by)
    model, x = model.to(dtype), x.to(dtype)
    with trainprobe.watch(model, output=output, console=False, level="mix", task="tensor") as probe, probe.step():
        model(x)
    return output


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return train(tmp_path_factory.mktemp("masks") / "a", torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_masks_of_two_formats_agree(tmp_path, single, capsys, dtype):
    code = main(["dump-compare", str(single), str(train(tmp_path / "b", dtype))])
    assert code == 1, capsys.readouterr().out


def test_another_mask_and_another_number_beside_it_are_told(tmp_path, single, capsys):
    wide = torch.ones(6, 6, dtype=torch.bool).triu(1)
    wide[5, 0] = True
    for name, changes in (("mask", {"hidden": wide}), ("number", {"by": 0.01})):
        code = main(["dump-compare", str(single), str(train(tmp_path / name, torch.float64, **changes))])
        said = capsys.readouterr().out
        assert code == 2, said
        assert "masked_fill" in said.splitlines()[0] if name == "mask" else "Module.scores" in said.splitlines()[0], said
