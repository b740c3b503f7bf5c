"""What the program has switched on around its training does not see the tool's own work on tensors, and does not change it."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import trainprobe
from tests.lockstep import bits_of


class Model(torch.nn.Module):
    """Two consumers of one input, so that gradients are summed."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.twice = Twice()

    def forward(self, x):
        return self.twice(self.first(x)) + self.second(x)


class Twice(torch.nn.Module):
    def forward(self, x):
        return x * x.tanh()


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def counted(model, x):
    with Counting() as mode:
        x = x.clone().requires_grad_()
        model(x).square().mean().backward()
    return mode.seen


class Heard(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def heard(model, x):
    with Heard() as mode:
        model(x).square().mean().backward()
    return mode.seen


def in_inference_mode(model, x):
    with torch.inference_mode():
        y = model(x).mean()
    model(x).square().mean().backward()
    return [bits_of(y.clone())]


def faked(model, x):
    with FakeTensorMode(allow_non_fake_inputs=True):
        y = model(torch.empty(7, 4))
    model(x).square().mean().backward()
    return [str(tuple(y.shape))]


def traced(model, x):
    part = torch.nn.Sequential(copy.deepcopy(model.first), torch.nn.Tanh())
    graph = torch.jit.trace(part, (x,)).inlined_graph
    model(x).square().mean().backward()
    return [node.kind() for node in graph.nodes()]


def run(train, watch=None):
    torch.manual_seed(0)
    model = Model()
    result = []
    with watch(model) if watch else nullcontext() as probe:
        for step in range(2):
            with probe.step() if probe else nullcontext():
                result += train(model, torch.randn(3, 4, generator=torch.Generator().manual_seed(step)))
            result += [bits_of(p.grad) for p in model.parameters()]
    return result


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
@pytest.mark.parametrize("task", ["statistics", "tensor"])
@pytest.mark.parametrize("train", [counted, heard, in_inference_mode, faked, traced], ids=lambda train: train.__name__)
def test_the_program_sees_and_computes_what_it_does_without_the_probe(train, task, level, native, tmp_path):
    def watch(model):
        return trainprobe.watch(model, output=tmp_path / "out", level=level, task=task, native=native, on_error="raise")

    alone = run(train)
    assert len(alone) >= 10
    assert run(train, watch) == alone


@pytest.mark.parametrize("native", [True, False])
def test_a_probe_records_nothing_of_what_another_one_does(native, tmp_path):
    def ops(other):
        torch.manual_seed(0)
        model = Model()
        with (
            trainprobe.watch(Model(), output=tmp_path / f"first{other}", level="L1", native=native, on_error="raise") as first,
            trainprobe.watch(model, output=tmp_path / f"second{other}", level="L1", native=native, on_error="raise") as second,
        ):
            if other:
                first.begin_step()
            second.begin_step()
            model(torch.ones(2, 4)).sum().backward()
            if other:
                first.end_step()
            return [(call.name, call.phase) for call in second.end_step().calls]

    alone = ops(False)
    assert ("Functional.linear", "forward") in alone
    assert ops(True) == alone
