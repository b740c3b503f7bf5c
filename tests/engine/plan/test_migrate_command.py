"""`trainprobe migrate`: the plan that is written means what the config.json means."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import trainprobe
from trainprobe import PrecisionDebugger
from trainprobe.cli import main
from trainprobe.engine.plan.loading import load_plan
from trainprobe.integrations.trainer_mon import TrainerMon

CONFIGURATIONS = [
    {
        "task": "statistics",
        "dump_path": "./out",
        "rank": [],
        "step": [0, "2-4"],
        "level": "mix",
        "statistics": {"list": ["fc"]},
    },
    {"task": "tensor", "dump_path": "./out", "tensor": {"scope": ["Module.a.B.forward.0", "Module.c.D.forward.0"]}},
    {"dump_path": "x", "statistics": {"summary_mode": ["max", "nan count", "hash"], "slice": [{"dim": 0, "end": 3}]}},
    {"dump_path": "x", "task": "grad_probe", "grad_probe": {"param_list": ["fc"]}},
    {"dump_path": "x", "level": "L0", "statistics": {"data_mode": ["backward"]}, "seed": 3, "zzz": 1},
]


@pytest.mark.parametrize("config", CONFIGURATIONS)
def test_the_plan_is_the_one_that_the_configuration_is_read_as(tmp_path, capsys, config):
    path, plan = tmp_path / "config.json", tmp_path / "plan.yaml"
    path.write_text(json.dumps(config))
    assert main(["migrate", str(path), "-o", str(plan)]) == 0
    assert load_plan(plan).model_dump() == load_plan(path).model_dump()
    assert load_plan(plan).notes == ()
    text = " ".join(plan.read_text().replace("#", " ").split())
    assert all(note.removeprefix(f"{path}: ") in text for note in load_plan(path).notes)
    assert main(["migrate", str(path), "-o", str(plan)]) == 3
    assert "nothing is overwritten" in capsys.readouterr().err


def test_a_plan_needs_no_migration_and_what_cannot_be_had_is_a_sentence(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text('{"output": "x"}')
    assert main(["migrate", str(path)]) == 3
    path.write_text('{"level": "L2", "dump_path": "x"}')
    assert main(["migrate", str(path)]) == 3
    told = capsys.readouterr().err
    assert "it is a plan already" in told and "'L2' (kernel dumps) is what MindSpore itself writes" in told


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.layers = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 4)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.gelu(self.first(x))
        for layer in self.layers:
            x = x + layer(x)
        return x


def loops(step: Any) -> None:
    """Two steps of a small model; `step` is called with the model and what makes one step."""
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)

    def run() -> None:
        model(torch.arange(12.0).reshape(3, 4)).sum().backward()

    for number in range(2):
        step(model, optimizer, number, run)
        optimizer.step()
        optimizer.zero_grad()


def dumped(folder: Path) -> dict[str, Any]:
    """Return what a dump says of each call of each step, and which tensors lie beside it."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("step*/rank0/dump.json")):
        found |= {f"{path.parts[-3]} {name}": call for name, call in json.loads(path.read_text())["data"].items()}
        found |= {f"{path.parts[-3]} {file.name}": file.stat().st_size for file in path.parent.glob("dump_tensor_data/*")}
    return found


FULL = "Module.layers.0.1.Linear.forward.0"
DUMPS: list[dict[str, Any]] = [
    {"level": "L0"},
    {},
    {"level": "mix", "step": [1]},
    {"risk_level": "ALL", "extra_info": False},
    {"level": "L0", "statistics": {"scope": ["Module.layers.0.Sequential.forward.0", FULL]}},
    {"statistics": {"scope": ["Functional.layer_norm.0.forward", "Functional.linear.2.forward"]}},
    {"level": "L0", "statistics": {"list": [FULL]}},
    {"level": "mix", "statistics": {"list": ["layers.1"], "data_mode": ["forward", "output"]}},
    {"level": "L0", "statistics": {"tensor_list": ["LayerNorm"]}},
    {"statistics": {"tensor_list": ["linear"], "summary_mode": "md5"}},
    {"level": "L0", "task": "tensor", "tensor": {"list": ["first"], "file_format": "npy"}},
    {"task": "tensor", "tensor": {"data_mode": ["backward"], "slice": [{"dim": 0, "begin": 0, "end": 2}]}},
    {"task": "structure", "level": "mix"},
    {"task": "nan_check", "statistics": {}},
    {"task": "overflow_check", "overflow_check": {"overflow_nums": 1}},
    {"level": "L0", "statistics": {"summary_mode": ["max", "nan count"]}},
]


@pytest.mark.parametrize("config", DUMPS, ids=json.dumps)
def test_the_migrated_plan_writes_the_files_of_the_configuration(tmp_path, config):
    path, plan = tmp_path / "config.json", tmp_path / "plan.yaml"
    path.write_text(json.dumps({"task": "statistics", "dump_path": str(tmp_path / "classic"), **config}))
    assert main(["migrate", str(path), "-o", str(plan)]) == 0
    debugger = PrecisionDebugger(str(path))

    def classic(model: Any, optimizer: Any, number: int, run: Any) -> None:
        debugger.start(model)
        run()
        debugger.stop()
        debugger.step()

    loops(classic)
    PrecisionDebugger.close()
    probes: list[Any] = []
    with ExitStack() as stack:

        def planned(model: Any, optimizer: Any, number: int, run: Any) -> None:
            if not probes:
                watching = trainprobe.watch(model, plan=str(plan), output=str(tmp_path / "migrated"))
                probes.append(stack.enter_context(watching))
            with probes[0].step(number):
                run()

        loops(planned)
    before, after = dumped(tmp_path / "classic"), dumped(tmp_path / "migrated")
    assert before and after == before


def tables(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("*rank*/*.csv")}


@pytest.mark.parametrize(
    "config",
    [
        {"param_distribution": True, "targets": {"layers.1": {}}},
        {"xy_distribution": True, "all_xy": True, "forward_only": True, "step_interval": 2, "ops": ["max", "zeros"]},
        {"wg_distribution": True, "mv_distribution": True, "step_count_per_record": 2, "alert": {"rules": [], "dump": True}},
        {"output_dir": "x", "monitors": {"module": {"targets": ["first"]}, "weight_grad": {"enabled": True}}},
    ],
    ids=json.dumps,
)
def test_the_migrated_plan_writes_the_files_of_the_monitor(tmp_path, monkeypatch, config):
    path, plan = tmp_path / "monitor.json", tmp_path / "plan.yaml"
    path.write_text(json.dumps(config))
    assert main(["migrate", str(path), "-o", str(plan)]) == 0
    for file, name in ((path, "classic"), (plan, "migrated")):
        monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / name))
        monitor = TrainerMon(str(file))

        def watched(model: Any, optimizer: Any, number: int, run: Any, monitor: TrainerMon = monitor) -> None:
            if not number:
                monitor.set_monitor(model, 1, optimizer)
            run()

        loops(watched)
        monitor.close()
    before, after = tables(tmp_path / "classic"), tables(tmp_path / "migrated")
    assert before and after == before
