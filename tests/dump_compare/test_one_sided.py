"""A dump that ends before the other, and a module that one side alone runs, are told first."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import trainprobe
from tests.dump_compare.small_runs import WORDS, Gpt
from trainprobe.cli import main


def stop(*_):
    raise InterruptedError


def recorded(folder, ends_at: str = "", change: str = "", level: str = "mix"):
    torch.manual_seed(0)
    model = Gpt(change, 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if ends_at:
        model.get_submodule(ends_at).register_forward_pre_hook(stop)
    words = torch.randint(WORDS, (4, 9), generator=torch.Generator().manual_seed(3))
    try:
        with trainprobe.watch(model, optimizer, level=level, step=[0], summary="both", output=folder) as probe, probe.step():
            model(words[:, :-1], words[:, 1:]).backward()
            optimizer.step()
    except InterruptedError:
        assert ends_at
    return str(folder)


def compared(a, b, tmp_path, capsys):
    code = main(["dump-compare", a, b, "--json", str(tmp_path / "all.json"), "--html", str(tmp_path / "page.html")])
    told = json.loads((tmp_path / "all.json").read_text())
    first = capsys.readouterr().out.splitlines()[0]
    assert first == told["verdict"] and code == told["code"]
    assert first[1:40] in (tmp_path / "page.html").read_text()
    return code, first


@pytest.mark.parametrize("level", ["L0", "mix"])
@pytest.mark.parametrize("sides", ["AB", "BA"])
def test_a_step_that_ended_early_is_the_first_thing_that_is_said(level, sides, tmp_path, capsys):
    folders = [recorded(tmp_path / "whole", level=level), recorded(tmp_path / "cut", "layers.1.up", level=level)]
    code, first = compared(*(folders if sides == "AB" else folders[::-1]), tmp_path, capsys)
    calls = [len(json.loads((tmp_path / name / "step0/rank0/dump.json").read_text())["data"]) for name in ("cut", "whole")]
    assert code == 3
    assert first.startswith(
        f"{sides[1]} ends after {calls[0]} of {calls[1]} calls (step 0, rank 0): all that both dumps hold agrees"
    )


def test_where_they_part_before_the_end_both_are_said(tmp_path, capsys):
    folders = [recorded(tmp_path / "whole"), recorded(tmp_path / "cut", "layers.2.up", "scale")]
    code, first = compared(*folders, tmp_path, capsys)
    assert code == 2
    assert first.startswith("B ends after ") and "the first difference is at Tensor.transpose.1.forward" in first


def test_a_dump_of_another_tool_that_ends_early_is_told_by_its_calls(tmp_path, capsys):
    """As one of a run that was killed while it wrote: the first calls, and nothing that says that the step did not end."""
    folders = [recorded(tmp_path / "whole"), recorded(tmp_path / "cut")]
    path = tmp_path / "cut" / "step0" / "rank0" / "dump.json"
    dump = json.loads(path.read_text())
    total = len(dump["data"])
    del dump["trainprobe"]
    dump["data"] = dict(list(dump["data"].items())[:7])
    path.write_text(json.dumps(dump))
    code, first = compared(*folders, tmp_path, capsys)
    assert code == 3 and first.startswith(f"B ends after 7 of {total} calls (step 0, rank 0): ")


def test_two_steps_that_did_not_end_are_no_full_agreement(tmp_path, capsys):
    folders = [recorded(tmp_path / name, "layers.1.up") for name in ("a", "b")]
    code, first = compared(*folders, tmp_path, capsys)
    assert code == 3 and first.startswith("A holds a step that did not end (step 0, rank 0): all")


def test_two_whole_steps_do_not_end_early(tmp_path, capsys):
    code, first = compared(recorded(tmp_path / "a"), recorded(tmp_path / "b"), tmp_path, capsys)
    assert code == 0 and "end" not in first


class Stack(nn.Module):
    """change: "norm" has a module more, "between" multiplies without a module."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change, self.up, self.down = change, nn.Linear(8, 8), nn.Linear(8, 8)
        if change == "norm":
            self.norm = nn.LayerNorm(8)

    def forward(self, x):
        x = self.up(x)
        x = self.norm(x) if self.change == "norm" else x * 1.5 if self.change == "between" else x
        return self.down(x).pow(2).mean()


def stacked(folder, change, level):
    torch.manual_seed(0)
    model = nn.Sequential(Stack(change))
    with trainprobe.watch(model, level=level, step=[0], summary="both", output=folder) as probe, probe.step():
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(1))).backward()
    return str(folder)


@pytest.mark.parametrize("level", ["L0", "mix"])
@pytest.mark.parametrize("sides", ["AB", "BA"])
def test_a_module_of_one_side_comes_before_what_follows_from_it(level, sides, tmp_path, capsys):
    folders = [stacked(tmp_path / "norm", "norm", level), stacked(tmp_path / "plain", "", level)]
    code, first = compared(*(folders if sides == "AB" else folders[::-1]), tmp_path, capsys)
    assert code == 2
    assert first.startswith("the first difference is at Module.0.norm.LayerNorm.forward.0 (step 0, micro-batch 0, rank 0): ")
    assert f"only {sides[0]} runs this module" in first


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_where_no_module_is_alone_the_call_that_is_given_something_else_is_named(level, tmp_path, capsys):
    code, first = compared(stacked(tmp_path / "a", "between", level), stacked(tmp_path / "b", "", level), tmp_path, capsys)
    assert code == 2 and "Module.0.down.Linear.forward.0" in first and "only" not in first
