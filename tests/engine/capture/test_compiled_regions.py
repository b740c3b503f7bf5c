"""Compiled code is compiled as often, and computes the same bits, as without the tool."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import trainprobe
from tests.matrices import matrix

STEPS = 12
KINDS = ["model", "model in place", "blocks", "blocks, recomputed", "loss", "model and loss"]
PLANS: dict[str, dict[str, Any]] = {
    "default": {},
    "L0": {"level": "L0", "step": ["every 3"]},
    "L1": {"level": "L1", "step": ["every 3"]},
    "mix": {"level": "mix", "step": ["every 3"]},
    "monitor": {
        "level": "off",
        "monitor": {"activations": True, "activation_gradients": True, "features": {"attention": True, "dead_units": True}},
    },
    "black box": {"level": "off", "black_box": {"steps": 2}, "monitor": True},
}


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 8)
        self.down = torch.nn.Linear(8, 8)
        self.drop = torch.nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.down(torch.relu(self.up(x))))


class Net(torch.nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.head = torch.nn.Linear(8, 4)
        self.recompute = recompute

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def loss_of(out):
    return out.float().log_softmax(-1)[:, 0].mean()


def compiled(kind: str, backend: Any) -> tuple[torch.nn.Module, Any]:
    """Return a model and a function from a batch to the loss; kind says what of it is compiled."""
    model = Net(recompute=kind == "blocks, recomputed")
    if kind == "model":
        fast = torch.compile(model, backend=backend)
        return model, lambda x: loss_of(fast(x))
    if kind == "loss":
        fast = torch.compile(loss_of, backend=backend)
        return model, lambda x: fast(model(x))
    if kind == "model and loss":
        return model, torch.compile(lambda x: loss_of(model(x)), backend=backend)
    for module in [model] if kind == "model in place" else model.blocks:
        module.compile(backend=backend)
    return model, lambda x: loss_of(model(x))


def trained(kind: str, plan: dict[str, Any] | None, output: Any) -> tuple[int, list[float], list[torch.Tensor], dict[str, int]]:
    """Return how many graphs were compiled, the losses, the weights, and what broke a graph."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    model, loss_from = compiled(kind, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []

    def step() -> torch.Tensor:
        loss = loss_from(torch.randn(4, 8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        return loss

    if plan is None:
        for _ in range(STEPS):
            step()
    else:
        with trainprobe.watch(model, optimizer, output=output, on_error="raise", **plan) as probe:
            for _ in range(STEPS):
                with probe.step():
                    probe.note("loss", step())
    return (
        len(graphs),
        losses,
        [p.detach().clone() for p in model.parameters()],
        dict(torch._dynamo.utils.counters["graph_break"]),
    )


@functools.cache
def alone(kind: str) -> tuple[int, list[float], list[torch.Tensor], dict[str, int]]:
    return trained(kind, None, None)


@pytest.mark.parametrize(("kind", "plan"), matrix(KINDS, PLANS))
def test_compiled_code_does_not_notice_the_probe(kind, plan, tmp_path):
    if kind == "blocks, recomputed" and torch.__version__ < (2, 5):
        pytest.skip("torch 2.4 itself cannot compile this: it traces the recomputation through a compiled block")
    graphs, losses, weights, breaks = alone(kind)
    seen = trained(kind, PLANS[plan], tmp_path / "out")
    assert (seen[0], seen[3]) == (graphs, breaks)
    assert seen[1] == losses
    assert all(torch.equal(a, b) for a, b in zip(seen[2], weights, strict=True))
    left = [name for name, function in vars(torch._dynamo.eval_frame).items() if hasattr(function, "below")]
    assert left == []  # nothing is left on Dynamo


@pytest.mark.parametrize("level", ["L1", "mix"])
def test_a_compiled_loss_hides_only_itself(level, tmp_path):
    torch.compiler.reset()
    model = Net(recompute=False)
    fast = torch.compile(loss_of, backend="eager")
    with trainprobe.watch(model, output=tmp_path, level=level, sinks=["memory"], on_error="raise") as probe:
        for _ in range(2):
            probe.begin_step()
            fast(model(torch.ones(2, 8))).backward()
            torch.tanh(model.head.weight)
            step_data = probe.end_step()
            names = [call.name for call in step_data.calls if call.kind == "op" and call.phase == "forward"]
            assert names.count("Functional.linear") == 7
            assert "Torch.tanh" in names
            assert not any("log_softmax" in name for name in names)


def test_a_compiled_module_is_seen_from_outside(tmp_path):
    torch.compiler.reset()
    model = Net(recompute=False)
    for i in range(3):
        model.blocks[i] = torch.compile(model.blocks[i], backend="aot_eager")
    with trainprobe.watch(model, output=tmp_path, level="L0", sinks=["memory"], on_error="raise") as probe:
        probe.begin_step()
        x = torch.randn(2, 8)
        loss_of(model(x)).backward()
        step_data = probe.end_step()
    norms = step_data.numbers()["norm"]
    calls = {(call.name, call.phase): call for call in step_data.calls if call.kind == "module"}
    assert norms[calls["blocks.0", "forward"].args[0].row] == pytest.approx(float(x.double().norm()), rel=1e-6)
    assert ("blocks.1", "backward") in calls
    assert not any(name.startswith("blocks.0.") for name, _ in calls)
