"""The first line says the cause as a person would: another learning rate, random numbers, an optimizer of other operators."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trainprobe
from trainprobe.cli import main


class Attends(nn.Module):
    """Attention whose dropout is an argument of the operator."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.functional, self.attend = functional, nn.MultiheadAttention(16, 2, 0.3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.functional:
            return self.attend(x, x, x)[0]
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.3)


@pytest.mark.parametrize("functional", [False, True])
def test_attention_that_drops_is_said_to_draw_random_numbers(tmp_path, capsys, functional):
    for seed in (1, 2):
        torch.manual_seed(0)
        model, x = Attends(functional), torch.randn(2, 5, 16, requires_grad=True)
        torch.manual_seed(seed)
        with trainprobe.watch(model, level="mix", summary="both", output=tmp_path / str(seed)) as probe, probe.step():
            model(x).sum().backward()
    assert main(["dump-compare", str(tmp_path / "1"), str(tmp_path / "2")]) == 2
    first = capsys.readouterr().out.splitlines()[0]
    assert "attention" in first and "it draws random numbers" in first, first


@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("monitored", [False, True])
def test_another_learning_rate_is_named_as_that(tmp_path, capsys, how, kind, monitored):
    watched = {"monitor": {"parameters": True, "gradients": True}} if monitored else {}
    for rate in (0.01, 0.011):
        torch.manual_seed(0)
        model, x = nn.Linear(16, 16), torch.randn(8, 16)
        optimizer = getattr(torch.optim, kind)(model.parameters(), rate, **how)
        plan = {"level": "L0" if monitored else "mix", "summary": "both", "output": tmp_path / str(rate), **watched}
        with trainprobe.watch(model, optimizer, **plan) as probe, probe.step():
            model(x).square().sum().backward()
            optimizer.step()
    assert main(["dump-compare", str(tmp_path / "0.01"), str(tmp_path / "0.011")]) == 2
    first = capsys.readouterr().out.splitlines()[0]
    wanted = (
        "the learning rate lr is 0.01 in A and 0.011 in B" if monitored else "the learning rate of B is 1.1 times that of A"
    )
    assert wanted in first, first


@pytest.mark.parametrize("ways", [({}, {"fused": True}), ({"foreach": False}, {"foreach": True}), ({"fused": True}, {})])
def test_an_optimizer_of_other_operators_is_no_dump_that_ends_early(tmp_path, capsys, ways):
    for name, how in zip("ab", ways, strict=True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, **how)
        with trainprobe.watch(model, optimizer, level="mix", summary="both", output=tmp_path / name) as probe, probe.step():
            model(torch.randn(8, 16)).square().sum().backward()
            optimizer.step()
    assert main(["dump-compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 3
    assert capsys.readouterr().out.startswith("all that both dumps hold agrees, but parts of one have no partner in the other")


@pytest.mark.parametrize("how", [{"betas": (0.8, 0.999)}, {"betas": (0.9, 0.99)}, {"eps": 1e-3}, {"weight_decay": 0.1}])
@pytest.mark.parametrize("implementation", [{"foreach": False}, {"foreach": True}])
def test_another_setting_of_the_optimizer_is_no_learning_rate(tmp_path, capsys, how, implementation):
    for name, settings in (("a", {}), ("b", how)):
        torch.manual_seed(0)
        model = nn.Linear(16, 16)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, **settings, **implementation)
        with trainprobe.watch(model, optimizer, level="mix", summary="both", output=tmp_path / name) as probe:
            for _ in range(2):
                with probe.step():
                    optimizer.zero_grad()
                    model(torch.randn(8, 16)).square().sum().backward()
                    optimizer.step()
    assert main(["dump-compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    first = capsys.readouterr().out.splitlines()[0]
    assert "the first difference is at" in first and "learning rate" not in first, first
