"""Buffers that a step has changed stand in the entry of their module, and the training's bits stay."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import trainprobe
from trainprobe.engine.storage.dumps import read_step


class Scaled(nn.Module):
    """Holds a buffer that stays, one that is written in place, and one that is another tensor from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("fixed", torch.ones(2))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("cache", None)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.training:
            self.seen += 1
        if self.calls in (1, 3):
            self.cache = torch.full((2,), float(self.calls))
        return x * self.fixed[0]


def train(folder=None, steps=3, micro=1, **plan):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Scaled(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []

    def step():
        for _ in range(micro):
            model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append({name: b.double().norm().item() for name, b in model.named_buffers()})

    if folder is None:
        for _ in range(steps):
            step()
    else:
        with trainprobe.watch(model, optimizer, {"output": str(folder), **plan}) as probe:
            for n in range(steps):
                with probe.step(n):
                    step()
    return seen, [t.clone() for t in model.state_dict().values()]


def parameters(folder, step, module, call=0):
    data = json.loads((folder / f"step{step}/rank0/dump.json").read_text())["data"]
    (name,) = [name for name in data if name.startswith(f"Module.{module}.") and name.endswith(f".forward.{call}")]
    return data[name].get("parameters", {})


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("level", ["L0", "mix"])
def test_changed_buffers_stand_in_their_modules_entry_and_the_bits_stay(tmp_path, native, level):
    bare = train()
    seen, state = train(tmp_path, level=level, native=native)
    assert all(torch.equal(a, b) for a, b in zip(bare[1], state, strict=True))
    for step in range(3):
        norms = {f"1.{name}": leaf["Norm"] for name, leaf in parameters(tmp_path, step, 1).items()}
        assert set(norms) == {f"1.{n}" for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
        for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
            assert norms[name] == pytest.approx(seen[step][name])
        assert set(parameters(tmp_path, step, 2)) == {"seen"} | ({"cache"} if step in (0, 2) else set())
        assert set(parameters(tmp_path, step, 0)) == {"weight", "bias"}


def test_of_several_micro_batches_the_last_call_has_them(tmp_path):
    seen, _ = train(tmp_path, steps=1, micro=2, record="L0")
    assert set(parameters(tmp_path, 0, 1, call=0)) == {"weight", "bias"}
    assert parameters(tmp_path, 0, 1, call=1)["running_mean"]["Norm"] == pytest.approx(seen[0]["1.running_mean"])


def test_values_of_buffers_are_saved_and_read_back(tmp_path):
    _, state = train(tmp_path, steps=1, task="tensor")
    step_data = read_step(tmp_path / "step0")[0]
    found = {r.site.slot: r for r in step_data.records() if r.site.name == "1" and r.step.phase == "forward"}
    assert found["parameters.running_var"].shape == (4,)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "step0/rank0/tensors.safetensors")
    assert torch.equal(saved["Module.1.BatchNorm1d.forward.0.parameters.running_mean"], state[4])


@pytest.mark.parametrize("plan", [{"data": ["input", "output"]}, {"phases": ["backward"]}, {"modules": ["0"]}])
def test_a_plan_without_parameters_of_calls_has_no_buffers(tmp_path, plan):
    train(tmp_path, steps=1, **plan)
    assert "running_mean" not in (tmp_path / "step0/rank0/dump.json").read_text()


def test_an_evaluation_changes_no_running_statistics(tmp_path):
    model = nn.Sequential(nn.BatchNorm1d(4)).eval()
    with trainprobe.watch(model, plan={"output": str(tmp_path), "record": "L0"}) as probe, probe.step(0):
        model(torch.randn(8, 4))
    assert set(parameters(tmp_path, 0, 0)) == {"weight", "bias"}


@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_a_buffer_that_changes_after_the_update_is_looked_at_again(tmp_path, task):
    model = Scaled()
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.1)
    with (
        trainprobe.watch(model, optimizer, {"output": str(tmp_path), "task": task, "on_error": "raise"}) as probe,
        probe.step(0),
    ):
        model(weight).sum().backward()
        optimizer.step()
        model.seen += 5
    assert parameters(tmp_path, 0, "root")["seen"]["Max"] == (1 if task == "tensor" else 6)
