"""Tensors that are not plain ones: of the program's own class, sparse, jagged."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import trainprobe
from trainprobe.engine.core.records import StepData
from trainprobe.engine.storage.dumps.read import read


class Counting(torch.Tensor):
    """Counts how often torch asks its class, as a class that draws or writes there would do so."""

    asked = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.asked += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Counted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.identity = torch.nn.Linear(4, 4), torch.nn.Identity()

    def forward(self, x):
        return self.identity(self.linear(x.as_subclass(Counting))).square().mean().as_subclass(torch.Tensor)


class Odd(torch.nn.Module):
    """A sparse parameter, and rows of several lengths."""

    def __init__(self):
        super().__init__()
        self.sparse = torch.nn.Parameter(torch.eye(4).to_sparse())
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        ragged = torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged)
        return (torch.sparse.mm(self.sparse, self.linear(ragged).values().T)).square().mean()


def train(model, watch=None, steps=2) -> list[StepData]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    collected_steps: list[StepData] = []
    for step in range(steps):
        if watch is not None:
            watch.begin_step()
        loss = model(torch.randn(3, 4, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if watch is not None:
            collected_steps.append(watch.end_step())
    return collected_steps


def watched(model, folder, **plan):
    with trainprobe.watch(model, output=folder, on_error="raise", **plan) as probe:
        return train(model, probe)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_the_code_of_the_programs_own_class_runs_as_often_as_without_the_probe(level, native, task, tmp_path):
    def asked(run):
        Counting.asked = 0
        run(Counted())
        return Counting.asked

    alone = asked(train)
    assert alone > 0
    assert asked(lambda model: watched(model, tmp_path / "out", level=level, native=native, task=task)) == alone


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_a_model_with_a_sparse_parameter_and_jagged_inputs_is_recorded(level, native, task, tmp_path):
    torch.manual_seed(0)
    expected = Odd()
    torch.manual_seed(0)
    model = Odd()
    train(expected)
    collected_steps = watched(model, tmp_path / "out", level=level, native=native, task=task)
    assert [p.to_dense().tolist() for p in model.parameters()] == [p.to_dense().tolist() for p in expected.parameters()]
    for step, step_data in enumerate(collected_steps):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).double().numpy()
        jagged, stored = (called(calls).args[0] for calls in (step_data.calls, read(tmp_path / "out" / f"step{step}").calls))
        assert jagged.shape == stored.shape == (2, -1, 4)
        assert step_data.numbers()["mean"][jagged.row] == pytest.approx(x.mean(), abs=1e-12)
        assert step_data.numbers()["norm"][jagged.row] == pytest.approx(np.linalg.norm(x))


def called(calls):
    return next(call for call in calls if call.name in ("linear", "Functional.linear"))


class Wrapped(torch.Tensor):
    """Wraps a tensor and has no data of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called on a tensor that was only to be looked at")


@pytest.mark.parametrize("native", [True, False])
def test_a_tensor_without_data_of_its_own_is_told_by_class_dtype_and_shape(native, tmp_path):
    class Passed(torch.nn.Module):
        def forward(self, x):
            return x

    model = Passed()
    with trainprobe.watch(model, output=tmp_path / "out", level="L0", native=native, on_error="raise") as probe:
        probe.begin_step()
        model(Wrapped(torch.zeros(2, 3, dtype=torch.float16)))
        step_data = probe.end_step()
    assert step_data is not None
    seen = step_data.calls[0].args[0]
    assert (seen.row, seen.dtype, seen.shape) == (-1, "torch.float16", (2, 3))
    assert seen.type.endswith("Wrapped") and "no data" in seen.note
