"""TrainerMon in a plain loop: its calls in the order of each release, its notes, and a second run beside the first."""

from __future__ import annotations

import csv
import json
import math

import pytest
import torch

from trainprobe.engine.storage.dumps import read_log
from trainprobe.errors import PlanError, UsageError
from trainprobe.pytorch import TrainerMon, TrainerMonitorV2

CONFIG = {"targets": {}, "wg_distribution": True, "xy_distribution": True, "all_xy": True, "ops": ["norm", "zeros"]}


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Write a configuration whose output goes below `tmp_path`."""
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / "out"))

    def write(**keys):
        path = tmp_path / "monitor.json"
        path.write_text(json.dumps({**CONFIG, **keys}))
        return str(path)

    return write


def parts():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    return model, torch.optim.Adam(model.parameters(), 0.1)


def train(model, optimizer, steps=2):
    for _ in range(steps):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def rows(folder, name):
    (path,) = (folder / "out").glob(f"*-rank0-*/{name}.csv")
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.mark.parametrize(
    "begin",
    [
        lambda monitor, model, optimizer: monitor.set_monitor(model, grad_acc_steps=1, optimizer=optimizer),
        lambda monitor, model, optimizer: monitor.set_monitor(model, optimizer, 1, None, None),
        lambda monitor, model, optimizer: monitor.set_monitor(model, 1, optimizer),
        lambda monitor, model, optimizer: monitor.monitor_gnorm_with_ad([model], 1, optimizer, None, None, 0),
        lambda monitor, model, optimizer: (monitor.set_wrapped_optimizer(optimizer), monitor.monitor_gnorm_with_ad(model, 1)),
    ],
)
def test_the_calls_of_each_release_watch_the_training(file, tmp_path, begin):
    bare, optimizer = parts()
    train(bare, optimizer)
    model, optimizer = parts()
    monitor = TrainerMon(file(), None, False)
    begin(monitor, model, optimizer)
    train(model, optimizer)
    monitor.close()
    assert all(torch.equal(a, b) for a, b in zip(bare.parameters(), model.parameters(), strict=True))
    assert [row["name"] for row in rows(tmp_path, "grad_reduced_1-1")] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert rows(tmp_path, "actv_0-0")[0]["zeros"] == "0.0"


def test_a_run_that_is_resumed_numbers_its_steps_on(file, tmp_path):
    model, optimizer = parts()
    monitor = TrainerMon(file())
    monitor.set_monitor(model, optimizer, start_iteration=7)
    train(model, optimizer)
    monitor.close()
    assert {row["step"] for row in rows(tmp_path, "grad_reduced_8-8")} == {"8"}


def test_a_second_run_writes_beside_the_first(file, tmp_path):
    for _ in range(2):
        model, optimizer = parts()
        monitor = TrainerMon(file())
        monitor.set_monitor(model, optimizer)
        train(model, optimizer)
        monitor.close()
    assert len(list((tmp_path / "out").glob("*-rank0-*"))) == 2
    assert [step_data.step for step_data in read_log(tmp_path / "out/rank0")] == [0, 1]


def test_numbers_of_the_last_step_are_at_hand(file):
    model, optimizer = parts()
    monitor = TrainerMon(file(format="api"))
    monitor.set_monitor(model, optimizer)
    model(torch.ones(3, 4)).sum().backward()
    norm = float(model[2].weight.grad.norm())
    monitor.adhoc_check(torch.full((4,), 2.0), "mine", "twos", [], ["norm"])
    optimizer.step()
    reduced, unreduced = monitor.generate_wgrad_metrics()
    inputs, gradients = monitor.generate_xy_metrics()
    assert reduced["2.weight"]["norm"] == unreduced["2.weight"]["norm"] == pytest.approx(norm)
    assert inputs["0.input.0"]["norm"] == pytest.approx(math.sqrt(12))
    assert gradients["2.grad_output.0"]["norm"] == pytest.approx(math.sqrt(3))
    monitor.close()


def test_what_modules_hand_on_can_be_switched_while_the_training_runs(file, tmp_path):
    model, optimizer = parts()
    monitor = TrainerMon(file())
    monitor.set_monitor(model, optimizer)
    train(model, optimizer, 1)
    monitor.reload_xy()
    train(model, optimizer, 1)
    monitor.reload_xy(True)
    train(model, optimizer, 1)
    monitor.close()
    (own,) = (tmp_path / "out").glob("*-rank0-*")
    assert sorted(path.stem for path in own.glob("actv_?-?.csv")) == ["actv_0-0", "actv_2-2"]


def test_what_is_different_is_printed_when_the_configuration_is_read(file, capsys):
    TrainerMon(file(mg_direction=True, squash_name=True))
    told = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[2] for line in told] == ["mg_direction", "squash_name"]


def test_what_is_missing_is_a_sentence(file, tmp_path):
    monitor = TrainerMon(file())
    model, optimizer = parts()
    with pytest.raises(UsageError, match="needs the optimizer"):
        monitor.set_monitor(model, grad_acc_steps=4)
    with pytest.raises(UsageError, match="hand over one module"):
        monitor.set_monitor([model, model], optimizer)
    with pytest.raises(UsageError, match="set_monitor"):
        monitor.generate_xy_metrics()
    dump = tmp_path / "config.json"
    dump.write_text(json.dumps({"task": "statistics", "risk_level": "ALL"}))
    with pytest.raises(PlanError, match="no configuration of a monitor"):
        TrainerMon(dump)


def test_the_second_monitor_starts_and_stops(tmp_path):
    monitor = TrainerMonitorV2({"monitors": {"module": {"targets": ["2"]}}, "output_dir": str(tmp_path)}, fr="pytorch")
    model, optimizer = parts()
    monitor.start(model=model, optimizer=optimizer, grad_acc_steps=1)
    train(model, optimizer, 1)
    monitor.step()
    monitor.stop()
    train(model, optimizer, 1)
    assert [path.name for path in (tmp_path / "rank_0").glob("*.csv")] == ["module_step0-0.csv"]
