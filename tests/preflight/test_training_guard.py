"""A preflight gives back every bit: of a training that goes on, whatever the step does and wherever it fails."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import trainprobe


class Net(nn.Module):
    """Has what a step may change: running statistics, a counter, a memory, a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.calls, self.last = 0, None
        self.generator = torch.Generator().manual_seed(5)
        self.body[0].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        self.last = x.detach() + torch.rand(x.shape, generator=self.generator)
        return self.body(x * (1 + 0.01 * random.random() + 0.01 * np.random.rand()))


def made() -> tuple[Net, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]:
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    model = Net()
    model.body[2].eval()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return model, optimizer, (torch.randn(8, 6), torch.randint(0, 3, (8,)))


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def trained(between) -> list:
    """Return all state after two steps between which something is done, while gradients lie in the model."""
    model, optimizer, batch = made()
    for number in range(2):
        loss(model, batch).backward()
        optimizer.step()
        if number == 0:
            between(model, optimizer, batch)
    states = [t.clone() for t in (*model.state_dict().values(), *(p.grad for p in model.parameters() if p.grad is not None))]
    states += [value.clone() for held in optimizer.state.values() for value in held.values()]
    states += [batch[0], torch.get_rng_state(), model.generator.get_state(), model.last]
    flags = [module.training for module in model.modules()] + [p.requires_grad for p in model.parameters()]
    modes = [torch.is_autocast_enabled("cpu"), torch.get_default_dtype(), torch.is_grad_enabled(), model.calls]
    return [*states, flags, modes, random.getstate(), np.random.get_state()[1].tolist(), optimizer.param_groups[0]["lr"]]


def same(a: list, b: list) -> bool:
    assert len(a) == len(b) > 20
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True))


def test_the_oracle_sees_a_step_too_many():
    bare = trained(lambda *_: None)
    assert same(bare, trained(lambda *_: None))
    assert not same(bare, trained(lambda model, optimizer, batch: loss(model, batch)))


def test_a_training_goes_on_with_the_same_bits():
    def check(model, optimizer, batch):
        report = trainprobe.preflight(loss, model, batch, optimizer=optimizer, seconds=600)
        assert report.passes > 10

    assert same(trained(lambda *_: None), trained(check))


def test_what_the_loss_keeps_outside_of_the_model_stays_too():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0
            self.register_buffer("centre", torch.zeros(3))
            self.register_buffer("queue", torch.zeros(3))

        def forward(self, out, target):
            self.calls += 1
            self.queue += out.detach().mean(0)
            self.centre = 0.9 * self.centre + 0.1 * out.detach().mean(0)
            return nn.functional.cross_entropy(out - self.centre, target)

    model, optimizer, (x, target) = made()
    criterion = Centred()
    criterion(model(x), target).backward()
    before = [criterion.centre.clone(), criterion.queue.clone(), criterion.calls]
    report = trainprobe.preflight(lambda m, b: criterion(m(b[0]), b[1]), model, (x, target), optimizer=optimizer, seconds=600)
    assert report.passes > 10
    assert torch.equal(criterion.centre, before[0])
    assert torch.equal(criterion.queue, before[1])
    assert criterion.calls == before[2]


def test_a_loss_that_calls_the_model_through_a_wrapper_leaves_its_modes():
    """As DDP's: dropout is off while the step is tested, and that is not how the model was."""
    model, optimizer, batch = made()
    model.body[2].train()
    wrapped, modes = nn.Sequential(model), [module.training for module in model.modules()]
    trainprobe.preflight(lambda m, b: loss(wrapped, b), model, batch, optimizer=optimizer, seconds=600)
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [1, 2, 5, 9])
def test_the_same_where_the_step_fails(call, fault):
    def check(model, optimizer, batch):
        calls = 0

        def failing(m, b):
            nonlocal calls
            calls += 1
            m.train(False)
            torch.set_autocast_enabled("cpu", True)
            next(m.parameters()).data.zero_()
            value = loss(m, b)
            if calls >= call:
                raise fault("planted")
            torch.set_autocast_enabled("cpu", False)
            return value

        try:
            trainprobe.preflight(failing, model, batch, optimizer=optimizer, seconds=600)
        except fault as planted:
            assert str(planted) == "planted"

    assert same(trained(lambda *_: None), trained(check))


def test_parameters_and_buffers_are_the_same_objects():
    model, optimizer, batch = made()
    before = [(id(t), t.data_ptr(), t.dtype) for t in (*model.parameters(), *model.buffers())]
    trainprobe.preflight(loss, model, batch, optimizer=optimizer, seconds=600)
    assert before == [(id(t), t.data_ptr(), t.dtype) for t in (*model.parameters(), *model.buffers())]


def test_a_loss_that_writes_into_its_batch_writes_into_a_copy():
    model, _, batch = made()
    kept = batch[0].clone()

    def writing(m, b):
        value = loss(m, b)
        b[0].zero_()
        return value

    trainprobe.preflight(writing, model, batch, only=["rows"])
    assert torch.equal(batch[0], kept)


def test_sparse_gradients_stay_as_they_are():
    def run(check):
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(50, 8, mode="sum", sparse=True), nn.Linear(8, 3))
        optimizers = [torch.optim.SparseAdam(model[0].parameters()), torch.optim.Adam(model[1].parameters())]
        batch = torch.randint(0, 50, (8, 4)), torch.randint(0, 3, (8,))
        loss(model, batch).backward()  # a first micro-batch
        if check:
            report = trainprobe.preflight(loss, model, batch, optimizer=optimizers, seconds=600)
            assert report.verdict.code == 0
            assert {line.name for line in report.lines if line.status == "holds"} >= {"split", "rows", "gradient", "update"}
        loss(model, batch).backward()
        sparse = model[0].weight.grad
        states = [sparse._indices().clone(), sparse._values().clone(), torch.tensor(sparse.is_coalesced())]
        for optimizer in optimizers:
            optimizer.step()
        return [*states, *(p.detach().clone() for p in model.parameters())]

    assert all(map(torch.equal, run(False), run(True)))


def test_what_an_optimizer_gathers_by_hooks_is_given_back():
    """As K-FAC gathers the statistics of layers, which its step needs in the dtype of the weights."""

    class Natural(torch.optim.SGD):
        def __init__(self, model: nn.Linear) -> None:
            super().__init__(model.parameters(), lr=0.01)
            self.squares: dict[nn.Module, torch.Tensor] = {}
            model.register_forward_pre_hook(self._gather)

        def _gather(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if module in self.squares and self.squares[module].dtype == args[0].dtype:
                self.squares[module] += args[0].detach().T @ args[0].detach()
            else:
                self.squares[module] = args[0].detach().T @ args[0].detach()

        def step(self, closure=None):
            for group in self.param_groups:
                group["params"][0].grad @= torch.linalg.pinv(next(iter(self.squares.values())) + torch.eye(4))
            return super().step()

    model = nn.Linear(4, 3)
    optimizer, batch = Natural(model), (torch.randn(6, 4), torch.randint(0, 3, (6,)))
    loss(model, batch)
    before = optimizer.squares[model]
    bits = before.clone()
    report = trainprobe.preflight(loss, model, batch, optimizer=optimizer, only=["gradient", "update"], seconds=600)
    assert [line.status for line in report.lines] == ["holds", "holds"], report
    assert optimizer.squares == {model: before} and torch.equal(before, bits)
