"""The classic front: PrecisionDebugger with start, stop, step and save, and the config.json that people have."""

from __future__ import annotations

import json

import pytest
import torch

from trainprobe import PrecisionDebugger
from trainprobe.errors import UsageError


@pytest.fixture
def config(tmp_path):
    """Write a config.json in the dialect of mindstudio-probe; end the process's debugger afterwards."""
    path = tmp_path / "config.json"
    statistics = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}
    settings = {"task": "statistics", "dump_path": str(tmp_path / "out"), "rank": [], "step": [0, 2], "level": "mix"}
    path.write_text(json.dumps({**settings, "statistics": statistics}))
    yield path
    PrecisionDebugger.close()


def train(debugger, steps=3, save=False):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        debugger.start(model=model)
        loss = model(torch.ones(3, 4)).sum()
        loss.backward()
        if save:
            debugger.save(loss, "loss")
        debugger.stop()
        optimizer.step()
        optimizer.zero_grad()
        debugger.step()


def entries(tmp_path, step):
    return json.loads((tmp_path / f"out/step{step}/rank0/dump.json").read_text())["data"]


def test_the_selected_steps_are_dumped_and_no_other(config, tmp_path):
    train(PrecisionDebugger(config))
    PrecisionDebugger.close()
    assert sorted(path.name for path in (tmp_path / "out").glob("step*")) == ["step0", "step2"]


def test_forward_and_backward_between_start_and_stop_are_recorded(config, tmp_path):
    train(PrecisionDebugger(config))
    PrecisionDebugger.close()
    names = set(entries(tmp_path, 0))
    assert {"Module.0.Linear.forward.0", "Module.0.Linear.backward.0", "Functional.linear.1.backward"} <= names


def test_nothing_is_recorded_after_stop(config, tmp_path):
    train(PrecisionDebugger(config))
    PrecisionDebugger.close()
    assert not [name for name in entries(tmp_path, 0) if "add_" in name]  # the optimizer ran after stop


def test_saved_values_stand_beside_the_rest(config, tmp_path):
    train(PrecisionDebugger(config), save=True)
    PrecisionDebugger.close()
    assert entries(tmp_path, 2)["loss.0.debug"]["Norm"] >= 0


def test_every_verb_works_on_the_class(config, tmp_path):
    PrecisionDebugger(config)
    train(PrecisionDebugger)
    PrecisionDebugger.close()
    assert entries(tmp_path, 2)


def test_a_second_construction_with_the_same_settings_is_the_same_debugger(config):
    assert PrecisionDebugger(config) is PrecisionDebugger(config)


def test_a_second_construction_with_other_settings_is_an_error_that_names_them(config):
    PrecisionDebugger(config)
    with pytest.raises(UsageError, match="level: 'mix' and 'L0'"):
        PrecisionDebugger(config, level="L0")


def test_start_without_a_model_says_what_is_missing(config):
    PrecisionDebugger(config)
    with pytest.raises(UsageError, match="start\\(model=your_model\\)"):
        PrecisionDebugger.start()


def test_a_verb_before_the_first_construction_is_an_error():
    with pytest.raises(UsageError, match="make one first"):
        PrecisionDebugger.step()


def test_debug_level_records_only_what_is_saved(tmp_path):
    debugger = PrecisionDebugger(level="debug", dump_path=tmp_path / "out", step=[0])
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    debugger.save({"y": [y, 1.5]}, "values")
    y.sum().backward()
    debugger.step()
    PrecisionDebugger.close()
    data = json.loads((tmp_path / "out/step0/rank0/debug.json").read_text())["data"]
    assert list(data) == ["values.0.debug", "values_grad.0.debug"]
    assert data["values_grad.0.debug"]["y"][0]["Mean"] == 1.0
