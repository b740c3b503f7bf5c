"""What is told of a parameter around the optimizer step, against the tensors themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import trainprobe
from trainprobe.engine.taps import parameter_states


def run(folder, steps=3, **monitor):
    """Train two layers; return, for each step, slot → norm of the parameter `0.weight`, and the same from the tensors."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    weight = model[0].weight
    seen, true = [], []
    with trainprobe.watch(model, optimizer, level="off", output=folder, monitor={"rules": [], **monitor}) as probe:
        for _ in range(steps):
            probe.begin_step()
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            before = weight.detach().clone()
            grad = weight.grad.clone()
            optimizer.step()
            step_data = probe.end_step()
            norms = step_data.numbers()["norm"]
            seen.append(
                {
                    slot: norms[value.row]
                    for call in step_data.calls
                    if call.kind == "state" and call.name == "0.weight"
                    for slot, value in call.params.items()
                }
            )
            tensors = {"value": before, "value_after": weight, "grad": grad, "update": weight - before}
            tensors |= {f"{slot}_after": optimizer.state[weight][slot] for slot in ("exp_avg", "exp_avg_sq")}
            true.append({slot: float(np.linalg.norm(t.detach().double().numpy())) for slot, t in tensors.items()})
    return seen, true


@pytest.mark.parametrize("slot", ["value", "value_after", "grad", "update", "exp_avg_after", "exp_avg_sq_after"])
def test_each_slot_has_the_norm_of_its_tensor(slot, tmp_path):
    seen, true = run(tmp_path, update=True, optimizer_state=True)
    assert [s[slot] for s in seen] == pytest.approx([t[slot] for t in true], rel=1e-12)


def test_what_is_not_asked_for_is_absent(tmp_path):
    seen, _ = run(tmp_path, parameters=False, gradients={"reduced": False})
    assert seen == [{}, {}, {}]


def test_every_collects_at_each_so_many_steps_only(tmp_path):
    seen, _ = run(tmp_path, 5, gradients={"every": 2})
    assert ["grad" in s for s in seen] == [True, False, True, False, True]


def told(folder, **monitor):
    """Return every call of two collected steps, two optimizers stepping one after the other, and the step numbers of Adam."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    model[1].bias.requires_grad_(False)
    optimizers = [
        torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.3}], lr=0.1),
        torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9),
    ]
    seen = []
    with trainprobe.watch(model, optimizers, level="off", output=folder, monitor={"rules": [], **monitor}) as probe:
        for _ in range(3):
            probe.begin_step()
            model(torch.randn(8, 6)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            step_data = probe.end_step()
            for call in step_data.calls:
                slots = {
                    slot: (v.dtype, tuple(v.shape), *step_data.partials[v.row].tolist()) for slot, v in call.params.items()
                }
                seen.append((call.kind, call.name, call.call, call.phase, call.cls, call.micro, call.parent, call.node, slots))
    return seen


@pytest.mark.skipif(parameter_states.native is None, reason="the compiled parts are not built")
@pytest.mark.parametrize("monitor", [{"optimizer_state": True}, {"parameters": False}, {"parameters": {"names": ["0.*"]}}])
def test_the_compiled_parts_look_at_the_same(monitor, tmp_path, monkeypatch):
    ours = told(tmp_path / "compiled", activations=False, **monitor)
    monkeypatch.setattr(parameter_states, "native", None)
    assert ours == told(tmp_path / "python", activations=False, **monitor)
    assert len(ours) >= 3 * 5
