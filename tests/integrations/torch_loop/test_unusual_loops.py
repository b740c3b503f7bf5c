"""Loops that no optimizer of torch.optim drives alone, or whose model is called in its own way: steps, bits, what is said."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from tests.integrations.records import recorded
from tests.lockstep import bits_of
from trainprobe.integrations import torch_loop
from trainprobe.integrations.torch_loop import attach, attach_to_script

PLAN = {"level": "L0", "monitor": True, "audit": {"every": 1}}
Loop = Callable[[], Iterator[torch.Tensor]]  # yields after each update


class CallsItself(nn.Linear):
    """A module whose calls do not pass through torch's, as gpytorch's and Keras's."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


class Parts(nn.Module):
    """A policy of which only the parts are ever called."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.value, self.action = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 1)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return model(torch.randn(8, 4)).square().mean()


def by_hand(micros: int = 1) -> Iterator[torch.Tensor]:
    model = net()
    for _ in range(4):
        model.zero_grad()
        for _ in range(micros):
            loss = loss_of(model) / micros
            loss.backward()
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)
        yield loss
    model.eval()
    loss_of(model)


def accumulated_by_hand() -> Iterator[torch.Tensor]:
    yield from by_hand(micros=3)


def no_grad_by_hand() -> Iterator[torch.Tensor]:
    model = net()
    for _ in range(4):
        loss = loss_of(model)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        yield loss


def one_optimizer_each() -> Iterator[torch.Tensor]:
    model = net()
    optimizers = [torch.optim.Adam([p], lr=0.1) for p in model.parameters()]
    for _ in range(4):
        loss = loss_of(model)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield loss


def closure() -> Iterator[torch.Tensor]:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(8, 4)).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        yield optimizer.step(evaluate).detach()


def in_evaluation_mode() -> Iterator[torch.Tensor]:
    model = net().eval()
    yield from plain(model, model)


def calls_itself() -> Iterator[torch.Tensor]:
    model = CallsItself(4, 1)
    yield from plain(model, model)


def only_parts_are_called() -> Iterator[torch.Tensor]:
    policy = Parts()
    yield from plain(policy, lambda x: policy.value(policy.body(x)) + policy.action(policy.body(x)))


def plain(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], steps: int = 4) -> Iterator[torch.Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(call)
        loss.backward()
        optimizer.step()
        yield loss


def in_backward() -> Iterator[torch.Tensor]:
    model = net()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(4):
        loss = loss_of(model)
        loss.backward()
        yield loss


# kind → losses that are seen of its four steps: the first is not where only its update shows the model
KINDS: dict[Loop, int] = {
    by_hand: 4,
    no_grad_by_hand: 4,
    one_optimizer_each: 4,
    closure: 4,
    only_parts_are_called: 4,
    in_backward: 4,
    accumulated_by_hand: 4,
    in_evaluation_mode: 3,
    calls_itself: 3,
}


@pytest.fixture(autouse=True)
def _logs_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trainprobe")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "trainprobe"]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_steps_of_an_unusual_loop_are_seen_one_by_one_and_its_bits_stay(tmp_path, caplog, kind):
    found = []
    for watches in (False, True):
        torch.manual_seed(3)
        loop = attach_to_script({**PLAN, "output": tmp_path / "out"}) if watches else None
        losses = [loss.detach() for loss in kind()]
        if loop is not None:
            loop.close()
        found.append([*map(bits_of, losses), bits_of(torch.get_rng_state())])
    assert found[0] == found[1]
    seen = recorded(tmp_path / "out")
    assert list(seen) == [0, 1, 2, 3], lines(caplog)
    with_loss = [numbers["loss"] for numbers in seen.values() if "loss" in numbers]
    assert len(with_loss) == KINDS[kind]
    if kind not in (closure, accumulated_by_hand):
        assert with_loss == [float(loss) for loss in losses[4 - KINDS[kind] :]]
    assert said(caplog, "4 steps watched, no findings") == 1, lines(caplog)
    assert loop is not None
    assert [f for f in loop.findings if f.severity == "error"] == []


def said(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(line.count(words) for line in lines(caplog))


@pytest.mark.proves("PyTorch", "updates without torch.optim")
def test_updates_by_other_means_are_said_once_and_at_the_end(tmp_path, caplog):
    loop = attach_to_script({**PLAN, "output": tmp_path / "out"})
    list(by_hand())
    loop.close()
    assert said(caplog, "no optimizer of torch.optim makes the update") == 1
    assert said(caplog, "No update of Sequential by an optimizer of torch.optim was seen, 4 by other means") == 1


def test_a_loop_that_was_given_one_model_says_nothing_of_a_second_that_trains(tmp_path, caplog):
    first, second = net(), CallsItself(4, 1)
    loop = attach(first, plan={"level": "L0", "output": tmp_path / "out"})
    list(zip(plain(first, first), plain(second, second), strict=True))
    loop.close()
    assert said(caplog, "No update of") == said(caplog, "Also trained here") == 0
    assert list(recorded(tmp_path / "out")) == [0, 1, 2, 3]


def test_a_model_that_is_only_called_is_named_at_the_end(tmp_path, caplog):
    loop = attach_to_script({"level": "L0", "output": tmp_path / "out"})
    model, teacher = net(), nn.Sequential(net(), nn.Softplus()).requires_grad_(False)
    list(plain(model, lambda x: model(x) - teacher(x)))
    loop.close()
    assert (
        said(caplog, "Called in the first step and not watched, as no optimizer updates it: Sequential (4 parameter tensors).")
        == 1
    )
    assert list(recorded(tmp_path / "out")) == [0, 1, 2, 3]


class LateParent(nn.Module):
    """Knows its parts only once it was called, and has calls of its own, as a model of Keras."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [nn.Linear(4, 8), nn.Linear(8, 1)]
        self.known: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        self.known = self.known or nn.ModuleList(self.parts)
        return x


def test_a_model_that_learns_of_its_parts_late_is_watched_whole(tmp_path, caplog):
    loop = attach_to_script({**PLAN, "output": tmp_path / "out"})
    model = LateParent()
    loss_of(model)  # to build it
    for _ in range(4):
        loss_of(model).backward()
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)
            p.grad = None
    loop.close()
    assert list(recorded(tmp_path / "out")) == [0, 1, 2, 3]
    assert said(caplog, "No update of LateParent by an optimizer of torch.optim was seen, 4 by other means.") == 1
    assert said(caplog, "the audit (4 parameters on this rank)") == 1
    assert said(caplog, "Called in the first step") == 0


class Sized(nn.Module):
    """Calls one of its layers to learn the size of the next, and has another parametrized."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.head = weight_norm(nn.Linear(self.body(torch.zeros(1, 4)).shape[1], 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


@pytest.mark.parametrize("kind", [Sized, lambda: nn.Sequential(weight_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 1))])
def test_a_model_whose_layer_was_called_before_it_was_whole_is_watched_whole(tmp_path, caplog, kind):
    loop = attach_to_script({**PLAN, "output": tmp_path / "out"})
    model = kind()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    loop.close()
    assert list(recorded(tmp_path / "out")) == [0, 1, 2, 3]
    assert said(caplog, "the audit (5 parameters on this rank)") == 1
    assert said(caplog, "4 steps watched, no findings") == 1
    assert said(caplog, "Called in the first step") == 0


def test_a_training_that_follows_is_watched_in_a_folder_of_its_own(tmp_path, caplog):
    def trainings() -> Iterator[torch.Tensor]:
        for model in (net(), net(), CallsItself(4, 1), net()):
            yield from plain(model, model, steps=8)

    found = []
    for watches in (False, True):
        torch.manual_seed(3)
        loop = attach_to_script({**PLAN, "output": tmp_path / "out"}) if watches else None
        losses = [loss.detach() for loss in trainings()]
        if loop is not None:
            loop.close()
            assert [f for f in loop.findings if f.severity == "error"] == []
        found.append([*map(bits_of, losses), bits_of(torch.get_rng_state())])
    assert found[0] == found[1]
    assert list(recorded(tmp_path / "out")) == [*range(8)]
    for name, first in (("training2", 8), ("training4", 24)):
        seen = recorded(tmp_path / "out" / name)
        assert {step: n["loss"] for step, n in seen.items()} == {n: float(losses[first + n]) for n in (4, 5, 6, 7)}
    assert list(recorded(tmp_path / "out" / "training3")) == [4, 5, 6]  # one more update shows that its calls pass torch by
    assert said(caplog, "8 steps watched") == 1
    assert said(caplog, "4 steps watched") == 2
    assert said(caplog, "3 steps watched") == 1
    assert said(caplog, "not watched") == 0


def test_a_model_that_nothing_updates_is_left_for_one_that_trains(tmp_path, caplog):
    loop = attach_to_script({"level": "L0", "output": tmp_path / "out"})
    probed, model = net(), net()
    loss_of(probed).backward()
    losses = [float(loss.detach()) for loss in plain(model, model)]
    loop.close()
    seen = recorded(tmp_path / "out" / "training2")
    assert {step: n["loss"] for step, n in seen.items()} == {n: losses[n] for n in (1, 2, 3)}
    assert said(caplog, "No update of Sequential by an optimizer of torch.optim was seen.") == 1
    assert said(caplog, "3 steps watched") == 1


def test_models_that_are_updated_in_turn_are_one_training(tmp_path, caplog):
    loop = attach_to_script({"level": "L0", "output": tmp_path / "out"})
    first, second = net(), net()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    for times in (2, 6, 6):  # of the second for one of the first
        loss_of(first).backward()
        optimizers[0].step()
        for _ in range(times):
            loss_of(second).backward()
            optimizers[1].step()
    loop.close()
    assert list(recorded(tmp_path / "out")) == [0, 1, 2]
    assert list(recorded(tmp_path / "out" / "training2")) == [*range(14)]
    assert said(caplog, "not watched") == 0


def test_a_trial_before_the_first_update_is_no_step(tmp_path, caplog):
    torch.manual_seed(0)
    loop = attach_to_script({**PLAN, "output": tmp_path / "out"})
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):  # how much fits into memory?
        loss_of(model).backward()
        with torch.no_grad():
            model[0].weight.div_(model[0].weight.norm())
        optimizer.zero_grad()
    losses = []
    for _ in range(4):
        losses.append(loss_of(model))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    loop.close()
    assert [numbers["loss"] for numbers in recorded(tmp_path / "out").values()] == [float(loss.detach()) for loss in losses]
    assert said(caplog, "4 steps watched, no findings") == 1


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_the_loss_of_a_trial_that_changes_no_weight_is_none_of_the_first_step(tmp_path, late, to_none, clips):
    torch.manual_seed(1)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loop = attach(model, **PLAN, output=tmp_path / "out")
    losses = []
    for n in range(5):
        if not late:
            optimizer.zero_grad(to_none)
        losses.append(loss_of(model))
        if late:
            optimizer.zero_grad(to_none)
        losses[-1].backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if n > 1:
            optimizer.step()
    loop.close()
    seen = [numbers["loss"] for numbers in recorded(tmp_path / "out").values()]
    assert seen == [float(loss.detach()) for loss in losses[2:]]


@pytest.mark.parametrize("equal", [False, True])
def test_gradients_that_a_program_clears_and_adds_up_itself_are_all_used(tmp_path, equal):
    torch.manual_seed(2)
    model, x = net(), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = attach(model, **PLAN, output=tmp_path / "out")
    sums = []
    for _ in range(3):
        held = [torch.zeros_like(p) for p in model.parameters()]
        losses = []
        for _ in range(3):
            losses.append(model(x if equal else torch.randn(8, 4)).square().mean())
            losses[-1].backward()
            for p, total in zip(model.parameters(), held, strict=True):
                total += p.grad
            optimizer.zero_grad()
        for p, total in zip(model.parameters(), held, strict=True):
            p.grad = total
        optimizer.step()
        optimizer.zero_grad()
        sums.append(float(losses[0].detach() + losses[1].detach() + losses[2].detach()))
    loop.close()
    assert [numbers["loss"] for numbers in recorded(tmp_path / "out").values()] == sums


def test_a_model_that_does_not_train_is_said_with_the_one_that_does(tmp_path, caplog):
    model, copy = net(), CallsItself(4, 1)
    loop = attach(model, output=tmp_path / "out")
    list(plain(copy, copy))
    loop.close()
    assert said(caplog, "No update of Sequential by an optimizer of torch.optim was seen") == 1
    assert said(caplog, "Also trained here and not watched: CallsItself") == 1


def test_forwards_without_an_update_are_collected_to_a_limit_and_training_after_them_is_seen(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(torch_loop, "LIMIT", 5)
    model = net()
    loop = attach(model, level="L0", output=tmp_path / "out")
    for _ in range(20):
        loss_of(model)
    list(plain(model, model))
    loop.close()
    assert said(caplog, "forwards of the model in training mode and no update") == 1
    seen = recorded(tmp_path / "out")
    assert [step for step, numbers in seen.items() if "loss" in numbers] == [1, 2, 3]


def test_backward_passes_of_no_module_are_said(tmp_path, caplog):
    loop = attach_to_script({"output": tmp_path / "out"})
    x = torch.ones(3, requires_grad=True)
    x.square().sum().backward()
    loop.close()
    assert said(caplog, "1 backward pass and no model") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("skips", [True, False])
def test_a_loop_that_skips_all_steps_at_its_end_is_told_that_they_were_not_judged(skips, tmp_path, capfd):
    torch.manual_seed(0)
    loop = attach_to_script({**PLAN, "level": "off", "output": tmp_path / "out"})
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(20):
        loss = loss_of(model)
        if step > 3 and skips:
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if not skips:
        with torch.no_grad():
            loss_of(model)
    loop.close()
    said = (
        "forward passes at the end with gradients enabled, which no backward pass and no update followed"
        in capfd.readouterr().err
    )
    assert said is skips


def losses(kind: str, model: nn.Module, step: int) -> Iterator[torch.Tensor]:
    """Yield the losses of a step, each for a backward pass."""
    batch = torch.randn(8, 4)
    if kind == "two forwards, one loss":
        yield (model(batch) - model(batch + 1)).square().mean()
    elif kind == "both losses at once":
        first, second = loss_of(model), loss_of(model)
        yield first
        yield second
    else:
        for micro in range(2 if "accumulates" in kind else 1):
            bad = step in (3, 6) and micro == 0 and kind.startswith("skips")
            bad |= step == 6 and micro == 1 and kind.startswith("skips")
            loss = model(batch * math.nan if bad else batch).square().mean()
            if not bad:
                yield loss


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("skips", ["3", "5"]),
        ("skips and accumulates", ["3", "6"]),
        ("accumulates", []),
        ("two forwards, one loss", []),
        ("both losses at once", []),
    ],
)
def test_a_forward_that_a_loop_skips_in_mid_run_is_told_of_the_step_that_holds_it(kind, said, tmp_path, capfd):
    torch.manual_seed(0)
    loop = attach_to_script({**PLAN, "output": tmp_path / "out"})
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(9):
        made = [loss.backward() for loss in losses(kind, model, step)]
        if made:
            optimizer.step()
            optimizer.zero_grad()
    loop.close()
    printed = capfd.readouterr().err
    told = re.findall(r"step (\d+) holds a forward pass that no backward pass used", printed)
    every = re.findall(r"forward passes that no backward pass used, of steps (.*?)\.", printed)
    assert (told, every) == (said[:1], [", ".join(said)] if said else []), printed


class CallsInItsConstructor(nn.Module):
    """Learns something from a pass over its own layers before it is finished, as YOLOv5 learns its strides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.forward(torch.zeros(1, 4))
        self.layers[2].bias = nn.Parameter(self.layers[2].bias.detach() + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class MeasuresItself(nn.Module):
    """Calls itself to learn the width of its head, which it has not yet."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.head = nn.Linear(self(torch.zeros(1, 4)).shape[1], 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return self.head(x) if hasattr(self, "head") else x


class GrowsInItsConstructor(nn.Sequential):
    """Learns the shape that its next layer is given by a call of itself, as speechbrain's Sequential does."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.Tanh())
        self.append(nn.Linear(self(torch.zeros(1, 4)).shape[1], 1))


@pytest.mark.parametrize("kind", [CallsInItsConstructor, MeasuresItself, GrowsInItsConstructor])
def test_a_model_that_its_constructor_calls_is_watched_as_it_is_when_it_trains(tmp_path, capsys, kind):
    torch.manual_seed(0)
    watcher = attach_to_script({**PLAN, "output": tmp_path / "out", "console": True})
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for _ in range(4):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    finally:
        watcher.close()
    assert [finding.message for finding in watcher.findings] == []
    assert len(recorded(tmp_path / "out")) == 4
    assert capsys.readouterr().err.count("trainprobe: watching ") == 1


def test_what_the_compiler_traces_is_no_forward_pass_that_was_left_out(tmp_path, capsys):
    torch.manual_seed(0)
    torch._dynamo.reset()
    watcher = attach_to_script({**PLAN, "output": tmp_path / "out"})
    model = net()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for _ in range(3):
            for _ in range(2):
                (loss_of(compiled) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        watcher.close()
    assert "no backward pass used" not in capsys.readouterr().err
    assert len(recorded(tmp_path / "out")) == 3
