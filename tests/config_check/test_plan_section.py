"""The `config_check` section of a plan is checked strictly and carried out by a tap."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import trainprobe
from trainprobe.config_check.pack_reader import read_pack
from trainprobe.config_check.plan import validate
from trainprobe.engine.plan.model import Plan
from trainprobe.errors import PlanError


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"micro_step": 3}, "did you mean 'micro_steps'"),
        ({"micro_steps": 0}, "at least 1"),
        ({"micro_steps": True}, "at least 1"),
        ({"captures": ["weight"]}, "did you mean 'weights'"),
        ({"framework": "jax"}, "neither of pytorch and mindspore"),
        ({"wait": -1}, "seconds"),
        ({"on_error": "ignore"}, "neither continue nor raise"),
    ],
)
def test_what_cannot_be_used_is_told_with_the_key(section, said):
    with pytest.raises(PlanError, match=said):
        validate(section)
    with pytest.raises(PlanError, match=said):
        Plan(config_check=section)


def written(path):
    """Return the pack, once it is there: it is written on a thread of its own, and waited for when the program ends."""
    deadline = time.monotonic() + 30
    while not (path.exists() and read_pack(path).complete) and time.monotonic() < deadline:
        time.sleep(0.05)
    return read_pack(path)


@pytest.mark.parametrize("section", [True, {"captures": ["weights", "dataset"], "micro_steps": 2}])
def test_a_pack_is_left_in_the_folder_of_the_plan(tmp_path, section):
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with trainprobe.watch(net, optimizer, output=tmp_path, level="off", config_check=section):
        for _ in range(5):
            net(torch.ones(2, 3))
    pack = written(tmp_path / "config_check_pack.zip")
    assert pack.micro_steps == (4 if section is True else 2)
    assert pack.has("randomness") is (section is True)
    assert not net._forward_pre_hooks


def test_the_optimizer_that_was_handed_over_is_captured_though_it_never_steps(tmp_path):
    net = nn.Linear(3, 1)
    groups = [{"params": [net.weight], "weight_decay": 0.1}, {"params": [net.bias], "weight_decay": 0.0}]
    section = {"output": str(tmp_path / "other.zip"), "micro_steps": 1}
    with trainprobe.watch(net, torch.optim.AdamW(groups, lr=0.5), output=tmp_path, level="off", config_check=section):
        net(torch.ones(2, 3))
    assert not _global_optimizer_pre_hooks  # gone with the run
    sources = written(tmp_path / "other.zip").ranks[0].single["hyperparameters"]["sources"]
    values = next(s["values"] for s in sources if s["kind"] == "optimizer")
    assert (values["class"], values["group0.lr"], values["group0.weight_decay"]) == ("AdamW", 0.5, 0.1)
    assert (values["group0.parameters"], values["group1.parameters"]) == (["weight"], ["bias"])


@pytest.mark.parametrize("level", ["L0", "off"])
def test_one_line_in_the_plan_of_a_probe_leaves_a_pack_beside_its_steps(tmp_path, level):
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with trainprobe.watch(net, optimizer, output=tmp_path / "out", level=level, step=[1], config_check=True) as probe:
        for _ in range(6):
            with probe.step():
                optimizer.zero_grad()
                net(torch.ones(2, 3)).sum().backward()
                optimizer.step()
    path = tmp_path / "out" / "config_check_pack.zip"
    pack = written(path)
    assert (pack.micro_steps, pack.complete) == (4, True)
    assert (tmp_path / "out" / "step1").exists() is (level == "L0")
