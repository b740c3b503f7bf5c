"""What is told of a parameter around the optimizer step, against the tensors themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import trainprobe
from trainprobe.engine.stats.partials import PARTIALS


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


def held(model, optimizers, after):
    """Return (parameter, slot) → norm of what the model and its optimizers hold; after: the step."""
    names = {p: name for name, p in model.named_parameters()}
    slots = {(name, "value"): p for p, name in names.items()}
    slots |= {(name, "grad"): p.grad for p, name in names.items() if p.grad is not None and not after}
    for optimizer in optimizers:
        slots |= {(names[p], slot): t for p, state in optimizer.state.items() for slot, t in state.items()}
    return {(name, f"{slot}_after" if after else slot): float(t.detach().double().norm()) for (name, slot), t in slots.items()}


def told(folder, **monitor):
    """Return every call of three collected steps, two optimizers stepping one after the other, and the numbers of torch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    model[1].bias.requires_grad_(False)
    optimizers = [
        torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.3}], lr=0.1),
        torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9),
    ]
    seen, true = [], []
    with trainprobe.watch(model, optimizers, level="off", output=folder, monitor={"rules": [], **monitor}) as probe:
        for _ in range(3):
            probe.begin_step()
            model(torch.randn(8, 6)).square().mean().backward()
            norms = held(model, optimizers, False)
            for optimizer in optimizers:
                optimizer.step()
            true.append(norms | held(model, optimizers, True))
            for optimizer in optimizers:
                optimizer.zero_grad()
            step_data = probe.end_step()
            calls = []
            for call in step_data.calls:
                slots = {
                    slot: (v.dtype, tuple(v.shape), *map(repr, step_data.partials[v.row].tolist()))
                    for slot, v in call.params.items()
                    if slot != "update"
                }
                calls.append((call.kind, call.name, call.call, call.phase, call.cls, call.micro, call.parent, call.node, slots))
            seen.append(calls)
    return seen, true


@pytest.mark.parametrize("monitor", [{"optimizer_state": True}, {"parameters": False}, {"parameters": {"names": ["0.*"]}}])
def test_every_slot_of_every_parameter_has_torchs_norm_looked_at_in_one_go_or_one_by_one(monitor, tmp_path):
    seen, true = told(tmp_path / "in_one_go", activations=False, **monitor)
    sums = PARTIALS.index("sumsq")
    for calls, norms in zip(seen, true, strict=True):
        found = {(c[1], slot): float(numbers[2 + sums]) ** 0.5 for c in calls for slot, numbers in c[-1].items()}
        assert found == pytest.approx({key: norms[key] for key in found}, rel=1e-6) and len(found) >= 5
    if monitor.get("parameters", True) is True:  # updates are worked out one parameter after the other
        assert told(tmp_path / "one_by_one", activations=False, update=True, **monitor) == (seen, true)
