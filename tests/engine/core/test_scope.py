"""Which calls of a step a dump keeps: entries by parts of names, scopes by when calls run, phases."""

from __future__ import annotations

import json

import pytest
import torch

import trainprobe


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = torch.nn.LayerNorm(4), torch.nn.Linear(4, 4)

    def forward(self, x):
        return x + torch.nn.functional.gelu(self.fc(self.norm(x)))


def recorded(folder, **plan):
    """Return the names of the calls in the dump of one step, and what the probe found."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(), Block())
    with trainprobe.watch(model, output=folder, sinks=["dump"], **plan) as probe, probe.step():
        model(torch.ones(2, 4)).sum().backward()
    return list(json.loads((folder / "step0/rank0/dump.json").read_text())["data"]), probe.findings


def test_entries_select_by_parts_of_full_names(tmp_path):
    everything, _ = recorded(tmp_path / "all", level="L0")
    for i, texts in enumerate((["fc"], ["Linear.forward"], ["Module.1.fc.Linear.backward.0"], ["norm", ".parameters_grad."])):
        names, findings = recorded(tmp_path / str(i), level="L0", entries=texts)
        assert names == [name for name in everything if any(text in name for text in texts)]
        assert names and not findings


def test_at_level_mix_an_entry_selects_what_ran_inside_a_module(tmp_path):
    everything, _ = recorded(tmp_path / "all", level="mix")
    names, _ = recorded(tmp_path / "one", level="mix", entries="Module.1.Block.forward.0")
    begin = everything.index("Module.1.Block.forward.0")
    assert names == everything[begin : begin + len(names)]
    assert names[1:3] == ["Module.1.norm.LayerNorm.forward.0", "Functional.layer_norm.1.forward"]
    assert names[-1] == "Tensor.add.1.forward"


def test_an_entry_that_is_part_of_no_name_is_reported(tmp_path):
    _, findings = recorded(tmp_path, level="L0", entries=["fc", "attention"])
    assert [f.message for f in findings] == ["the plan's entries 'attention' occurs in no call name of any collected step"]


def test_a_scope_keeps_the_modules_that_end_within_it(tmp_path):
    names, findings = recorded(
        tmp_path, level="L0", scope=("Module.0.fc.Linear.forward.0", "Module.1.norm.LayerNorm.forward.0")
    )
    assert names == [
        "Module.0.Block.forward.0",
        "Module.0.fc.Linear.forward.0",
        "Module.1.Block.forward.0",
        "Module.1.norm.LayerNorm.forward.0",
    ]
    assert not findings


def test_a_scope_that_ends_with_a_backward_keeps_its_parameters_gradients(tmp_path):
    names, _ = recorded(tmp_path, level="L0", scope=("Module.1.norm.LayerNorm.forward.0", "Module.1.fc.Linear.backward.0"))
    assert names[-1] == "Module.1.fc.Linear.parameters_grad.0"


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_without_the_forward_phase_no_forward_call_is_kept(tmp_path, level):
    names, _ = recorded(tmp_path, level=level, phases=["backward"])
    assert names and not [name for name in names if ".forward" in name]


def test_what_a_dump_leaves_out_is_still_judged(tmp_path):
    model = torch.nn.Linear(4, 1)
    plan = {"level": "L0", "entries": "nothing", "monitor": {"gradients": True}, "output": tmp_path}
    with trainprobe.watch(model, torch.optim.SGD(model.parameters(), 0.1), **plan) as probe, probe.step():
        (model(torch.ones(2, 4)).sum() * float("nan")).backward()
    assert "nonfinite" in {finding.rule for finding in probe.findings}
