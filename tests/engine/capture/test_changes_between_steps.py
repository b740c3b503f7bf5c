"""What is kept from step to step (hooks with their entries, shapes) is true of each step: one probe over all steps records what
a new probe for each step does, whatever changes in between."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import trainprobe
from tests.engine.capture.recorded_step import told
from tests.matrices import matrix

STEPS = 6


class Model(torch.nn.Module):
    """Two consumers of one input, a residual sum, a module that is called twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.dropped = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)

    def forward(self, x):
        y = self.first(x)
        return self.first(self.dropped(self.second(y)) + y * y)


class Loop:
    """A training. losses: of all steps, kept where `retained`; each step then runs the three before it backward once more."""

    def __init__(self):
        torch.manual_seed(0)
        self.model, self.rows, self.retained, self.losses, self.handles, self.heard = Model(), 3, False, [], [], []
        self.hooking = False
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self):
        self.optimizer.zero_grad()
        out = self.model(torch.randn(self.rows, 4))
        loss = out.square().mean()
        if self.hooking:  # beside the probe's own, which stand there already
            node = out.grad_fn
            self.handles.append(node.register_hook(lambda sent, received: self.heard.append("behind")))
            self.handles.append(node.register_prehook(lambda received: self.heard.append("before")))
        for old in self.losses[-3:]:
            old.backward(retain_graph=True)  # a hook that was taken from its node would bring this into the new step
        loss.backward(retain_graph=self.retained)
        if self.retained:
            self.losses.append(loss)
        else:
            self.optimizer.step()


def nothing(loop, step):
    pass


def parameter_replaced(loop, step):
    if step % 2:
        loop.model.second.weight = torch.nn.Parameter(torch.randn(4, 4))


def requires_grad_toggled(loop, step):
    loop.model.first.requires_grad_(step % 2 == 0)


def training_flag_toggled(loop, step):
    loop.model.train(step % 2 == 0)


def other_shapes(loop, step):
    loop.rows = 2 + step % 3


def submodule_replaced(loop, step):
    loop.model.second = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()) if step % 2 else torch.nn.Linear(4, 4)


def graphs_stay_alive_and_run_again(loop, step):
    loop.retained = True


def hooks_of_the_program(loop, step):
    loop.hooking = step % 2 == 0


CHANGES = [
    nothing,
    parameter_replaced,
    requires_grad_toggled,
    training_flag_toggled,
    other_shapes,
    submodule_replaced,
    graphs_stay_alive_and_run_again,
    hooks_of_the_program,
]


def run(change, folder, *, afresh):
    """Return what is recorded of each step, by one probe or by one a step, what the program heard, and its parameters."""
    loop = Loop()
    collected_steps = []

    def watching(step):
        plan = {"output": folder / f"{step}", "level": "L0", "sinks": ["memory"], "on_error": "raise"}
        return trainprobe.watch(loop.model, loop.optimizer, **plan)

    with nullcontext() if afresh else watching("all") as whole:
        for step in range(STEPS):
            change(loop, step)
            with watching(step) if afresh else nullcontext(whole) as probe:
                probe.begin_step()
                loop.step()
                collected_steps.append(told(probe.end_step()))
    return collected_steps, loop.heard, [p.tolist() for p in loop.model.parameters()]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_each_step_is_recorded_as_by_a_probe_that_begins_with_it(change, tmp_path):
    ours, theirs = (run(change, tmp_path / str(afresh), afresh=afresh) for afresh in (False, True))
    assert len(ours[0]) == STEPS and all(len(step_data["calls"]) > 5 for step_data in ours[0])
    assert ours == theirs


def clipped(model):
    for p in model.parameters():
        p.data.clamp_(-0.1, 0.1)


def updated_by_hand(model):
    for p in model.parameters():
        p.data.add_(p.grad.data, alpha=-0.5)


def written_through_numpy(model):
    with torch.no_grad():
        model.second.weight.numpy()[...] *= 2


@pytest.mark.parametrize(
    ("write", "level", "compiled"),
    matrix([clipped, updated_by_hand, written_through_numpy], ["L0", "L1", "mix"], [True, False]),
)
def test_a_parameter_written_without_a_trace_between_two_forwards_of_a_step_is_shown_as_it_is(write, level, compiled, tmp_path):
    model = Loop().model
    expected = []
    with trainprobe.watch(model, output=tmp_path, level=level, sinks=["memory"], native=compiled, on_error="raise") as probe:
        probe.begin_step()
        for _ in range(3):
            expected.append(float(model.second.weight.detach().double().norm()))
            model(torch.randn(2, 4)).square().mean().backward()
            write(model)
        step_data = probe.end_step()
    norms = step_data.numbers()["norm"]
    modules = [call.params["weight"] for call in step_data.calls if (call.name, call.phase) == ("second", "forward")]
    ops = [call.args[1] for call in step_data.calls if (call.name, call.phase) == ("Functional.linear", "forward")][1::3]
    for weights in (modules,) * (level != "L1") + (ops,) * (level != "L0"):
        assert [norms[weight.row] for weight in weights] == pytest.approx(expected)


def by_data(p):
    alias = p.data
    return lambda: alias.mul_(2)


def by_numpy(p):
    alias = p.detach().numpy()
    return lambda: alias.__imul__(2)


@pytest.mark.parametrize(("hand_out", "task", "compiled"), matrix([by_data, by_numpy], ["statistics", "tensor"], [True, False]))
def test_memory_that_was_handed_out_may_be_written_to_at_any_later_call(hand_out, task, compiled, tmp_path):
    p = torch.nn.Parameter(torch.ones(4))
    model = torch.nn.Identity()
    with trainprobe.watch(
        model, output=tmp_path, level="L1", task=task, sinks=["memory"], native=compiled, on_error="raise"
    ) as probe:
        probe.begin_step()
        write = hand_out(p)
        for _ in range(3):
            torch.mul(p, 3)
            write()
        step_data = probe.end_step()
    inputs = [call.args[0].row for call in step_data.calls if call.name == "Torch.mul"]
    assert step_data.numbers()["max"][inputs].tolist() == [1, 2, 4]
