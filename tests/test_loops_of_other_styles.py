"""Loops in styles of their own, watched with all that there is: bits stay, and what is wrong is found and nothing else."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import trainprobe
from tests.integrations.records import recorded, steps_of
from tests.lockstep import bits_of
from trainprobe.engine.plan.defaults import default_plan
from trainprobe.integrations.torch_loop import attach_to_script

EVERY_STEP = {**default_plan(), "console": False, "audit": {"every": 1}}
EVERYTHING = {
    **EVERY_STEP,
    "monitor": {
        **{"optimizer_state": True, "update": True, "batches": True, "activations": True, "activation_gradients": True},
        "gradients": {"unreduced": True, "unclipped": True, "per_micro": True},
    },
}
STEPS = 12
_TARGET = torch.randn(4, 2, generator=torch.Generator().manual_seed(777))
Loop = Callable[[Any, Any], Any]  # of what `trainprobe.watch` is, and what `step` and `note` are of


class Bare:
    """Stands where nobody watches."""

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def step(self) -> Any:
        return nullcontext()

    def note(self, name: str, value: Any) -> None:
        pass

    def moment(self, name: str, number: int) -> None:
        pass


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(number))
    return x, (x @ _TARGET).tanh()


def net(out: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, out))


def weights(*models: nn.Module) -> list[bytes]:
    return [bits_of(p) for model in models for p in model.parameters()] + [bits_of(torch.get_rng_state())]


def alarms(findings: Any) -> list[str]:
    return [f"{f.rule} at {f.step}: {f.message}" for f in findings if f.severity != "info"]


def with_and_without(loop: Loop, tmp_path: Any, **plan: Any) -> list[Any]:
    """Run a loop bare and watched, require equal bits, and return the findings."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    bare = loop(lambda *given: Bare())
    torch._dynamo.reset()
    torch.manual_seed(0)
    probes: list[Any] = []

    def watch(model: Any, optimizer: Any) -> Any:
        probes.append(trainprobe.Probe({**(plan or EVERYTHING), "output": tmp_path / f"out{len(probes)}"}))
        probes[-1].open(model, optimizer)
        return probes[-1]

    assert loop(watch) == bare
    assert [probe.guard.tripped for probe in probes if probe.guard.tripped] == []
    return [finding for probe in probes for finding in probe.findings]


def one_step(probe: Any, model: nn.Module, optimizer: Any, number: int) -> None:
    with probe.step():
        x, y = batch(number)
        loss = F.mse_loss(model(x), y)
        probe.note("loss", loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def with_a_compiled_call(watch: Any, whole: bool, micros: int = 2) -> list[bytes]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    called = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss_of = torch.compile(lambda x, y: F.mse_loss(model(x), y), fullgraph=True, backend="aot_eager")
    with watch(model, optimizer) as probe:
        for step in range(3):
            with probe.step():
                for micro in range(micros):
                    x, y = batch(step * micros + micro)
                    (loss_of(x, y) if whole else F.mse_loss(called(x), y)).div(micros).backward()
                optimizer.step()
                optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("whole", [False, True], ids=["the model", "the loss"])
def test_a_call_that_is_compiled_as_one_graph_trains_and_its_micro_batches_are_told_apart(tmp_path, whole):
    found = with_and_without(partial(with_a_compiled_call, whole=whole), tmp_path)
    assert alarms(found) == []
    unreduced = [call for call in list(steps_of(tmp_path / "out0"))[1].calls if "grad_unreduced" in (call.params or {})]
    assert [call.call for call in unreduced if call.name == "0.weight"] == [0, 1]


def with_a_compiled_update(watch: Any, graphs: list[int]) -> list[bytes]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    counter = CompileCounter()
    update = torch.compile(optimizer.step, backend=counter)
    with watch(model, optimizer) as probe:
        for number in range(4):
            with probe.step():
                x, y = batch(number)
                F.mse_loss(model(x), y).backward()
                update()
                optimizer.zero_grad()
    graphs.append(counter.frame_count)
    return weights(model)


def test_a_compiled_update_is_compiled_as_often_as_without_and_the_tool_is_not_compiled(tmp_path):
    graphs: list[int] = []
    found = with_and_without(partial(with_a_compiled_update, graphs=graphs), tmp_path)
    assert alarms(found) == []
    assert graphs[0] == graphs[1] > 0
    gradients = recorded(tmp_path / "out0")
    assert all(f"{name} grad" in gradients[3] for name in ("0.weight", "2.bias"))


class ScheduleFree(torch.optim.Optimizer):
    """SGD of Defazio's "The road less scheduled": `eval` turns the weights into their average, `train` turns them back."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "train_mode": True, "k": 0})

    @torch.no_grad()
    def _turn(self, share: float, train: bool) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.lerp_(self.state[p]["z"], share)
            group["train_mode"] = train

    def eval(self) -> None:
        self._turn(1 - 1 / 0.9, train=False)

    def train(self) -> None:
        self._turn(1 - 0.9, train=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            part, lr = 1 / group["k"], group["lr"]
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, part).add_(p.grad, alpha=lr * (0.9 * (1 - part) - 1))
                z.sub_(p.grad, alpha=lr)


def schedule_free(watch: Any, forgets: bool = False) -> list[bytes]:
    model = net()
    optimizer = ScheduleFree(model.parameters())
    with watch(model, optimizer) as probe:
        for number in range(STEPS):
            one_step(probe, model, optimizer, number)
            if number % 3 == 2:
                model.eval()
                optimizer.eval()
                with torch.no_grad():
                    model(batch(999)[0])
                model.train()
                if not (forgets and number == 5):
                    optimizer.train()
    return weights(model)


def ascent(watch: Any, flips: bool = False) -> list[bytes]:
    """Sharpness-aware minimization that takes its step back by subtracting it, which rounds."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    with watch(model, optimizer) as probe:
        for number in range(STEPS):
            with probe.step():
                x, y = batch(number)
                loss = F.mse_loss(model(x), y)
                probe.note("loss", loss.detach())
                loss.backward()
                with torch.no_grad():
                    climbed = [0.02 * p.grad for p in model.parameters()]
                    for p, way in zip(model.parameters(), climbed, strict=True):
                        p.add_(way)
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                with torch.no_grad():
                    for p, way in zip(model.parameters(), climbed, strict=True):
                        p.sub_(way)
                optimizer.step()
                optimizer.zero_grad()
            if flips and number == 5:
                with torch.no_grad():
                    next(model.parameters()).neg_()
    return weights(model)


def sparse_embedding(watch: Any) -> list[bytes]:
    table, head = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 5)
    model = nn.ModuleDict({"table": table, "head": head})
    optimizers = [torch.optim.SparseAdam(list(table.parameters()), lr=1e-2), torch.optim.AdamW(head.parameters(), lr=1e-2)]
    with watch(model, optimizers) as probe:
        for number in range(STEPS):
            with probe.step():
                t = torch.randint(50, (16,), generator=torch.Generator().manual_seed(number))
                loss = F.cross_entropy(head(table(t)), t % 5)
                probe.note("loss", loss.detach())
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
    return weights(model)


def observers_switched_off(watch: Any) -> list[bytes]:
    """Training for quantisation, whose ranges are settled half way."""
    from torch.ao import quantization

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(
            quantization.QuantStub(), nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2), quantization.DeQuantStub()
        )
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        model = quantization.prepare_qat(model.train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with watch(model, optimizer) as probe:
        for number in range(STEPS):
            one_step(probe, model, optimizer, number)
            if number == 7:
                model.apply(quantization.disable_observer)
    return weights(model)


@pytest.mark.parametrize("loop", [schedule_free, ascent, sparse_embedding, observers_switched_off])
def test_a_healthy_loop_raises_no_alarm(tmp_path, loop):
    assert alarms(with_and_without(loop, tmp_path)) == []


def test_a_schedule_free_optimizer_that_is_not_turned_back_is_found(tmp_path):
    found = with_and_without(partial(schedule_free, forgets=True), tmp_path)
    assert next((f.rule, f.step, f.site.slot) for f in found if f.severity == "error") == (
        "untouched_between_steps",
        6,
        "value",
    )


def test_weights_of_another_sign_are_found_where_an_ascent_is_taken_back(tmp_path):
    found = with_and_without(partial(ascent, flips=True), tmp_path)
    assert ("untouched_between_steps", 6, "value") in [(f.rule, f.step, f.site.slot) for f in found if f.severity == "error"]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.body, self.last, self.reentrant = nn.Linear(4, 16), net(16), nn.Linear(16, 2), reentrant
        self.body[0] = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.body, self.first(x), use_reentrant=self.reentrant))


def accumulated(watch: Any, reentrant: bool, last_alone: bool) -> list[bytes]:
    model = Checkpointed(reentrant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with watch(model, optimizer) as probe:
        for number in range(3):
            with probe.step():
                losses = []
                for micro in range(2):
                    probe.moment("micro", micro)
                    x, y = batch(2 * number + micro)
                    loss = F.mse_loss(model(x), y)
                    (loss / 2).backward()
                    losses.append(loss.detach())
                probe.note("loss", losses[-1] if last_alone else sum(losses) / 2)
                optimizer.step()
                optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("last_alone", [False, True], ids=["healthy", "the last alone"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_wrong_report_of_the_loss_is_found_under_either_checkpointing(tmp_path, reentrant, last_alone):
    found = with_and_without(partial(accumulated, reentrant=reentrant, last_alone=last_alone), tmp_path)
    assert [f.rule for f in found if f.severity != "info"] == ["reported_loss"] * last_alone


# ---- loops that know nothing of the tool -----------------------------------------------------------------------------------


def adversaries() -> list[bytes]:
    maker, judge = net(), nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizers = [torch.optim.Adam(m.parameters(), lr=2e-3, betas=(0.5, 0.999)) for m in (maker, judge)]
    for number in range(STEPS):
        noise, real = batch(number)
        optimizers[1].zero_grad()
        (F.softplus(-judge(real)).mean() + F.softplus(judge(maker(noise).detach())).mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        F.softplus(-judge(maker(noise))).mean().backward()
        optimizers[0].step()
    return weights(maker, judge)


def gradients_of_a_function(first: nn.Module | None = None) -> list[bytes]:
    """`torch.func`: while the model is called, other tensors stand in the place of its parameters."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def loss_of(held: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(torch.func.functional_call(model, held, (x,)), y)

    for number in range(STEPS):
        gradients = torch.func.grad(loss_of)({name: p.detach() for name, p in model.named_parameters()}, *batch(number))
        for name, p in model.named_parameters():
            p.grad = gradients[name]
        optimizer.step()
    return weights(model)


def gradients_of_copies() -> list[bytes]:
    """The optimizer holds tensors that are handed to `functional_call`; the model is only what is called."""
    model = net()
    held = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(held.values(), lr=3e-3)
    for number in range(STEPS):
        x, y = batch(number)
        optimizer.zero_grad()
        F.mse_loss(torch.func.functional_call(model, held, (x,)), y).backward()
        optimizer.step()
    return [bits_of(p) for p in held.values()]


@pytest.mark.parametrize("loop", [adversaries, gradients_of_a_function, gradients_of_copies])
def test_a_healthy_script_raises_no_alarm(tmp_path, loop, caplog):
    torch.manual_seed(0)
    bare = loop()
    torch.manual_seed(0)
    watcher = attach_to_script({**EVERY_STEP, "console": True, "output": tmp_path / "out"})
    try:
        assert loop() == bare
    finally:
        watcher.close()
    assert alarms(watcher.findings) == []
    said = [record.getMessage() for record in caplog.records if record.name == "trainprobe"]
    assert not [line for line in said if "failed" in line], said
    if loop is gradients_of_a_function:
        assert sorted(recorded(tmp_path / "out")) == list(range(STEPS))


# ---- operators judged in such trainings --------------------------------------------------------------------------------------


def test_operators_are_not_accused_where_a_module_is_differentiated_twice(tmp_path):
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(4, 16), "one": nn.Linear(16, 2), "two": nn.Linear(16, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = trainprobe.watch(model, optimizer, output=tmp_path / "out", level="off", op_check=True, console=False)
    with watched as probe, probe.step():
        hidden = model["body"](batch(0)[0])
        model["one"](hidden).square().mean().backward(retain_graph=True)
        model["two"](hidden).square().mean().backward()
        optimizer.step()
    assert alarms(probe.findings) == []


def test_operators_on_sparse_tensors_are_not_called_undeterministic(tmp_path):
    found = with_and_without(sparse_embedding, tmp_path, level="off", op_check={"step": [1]}, console=False)
    assert alarms(found) == []


def adapter(watch: Any) -> list[bytes]:
    """Two matrices of which the second begins with zeros, and a warm-up from a rate of 0: the first waits for two steps."""
    base = nn.Linear(4, 2).requires_grad_(False)
    down, up = nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)
    down_2, up_2 = nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)
    nn.init.zeros_(up.weight)
    nn.init.zeros_(up_2.weight)
    model = nn.ModuleList([base, down, up, down_2, up_2])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))
    with watch(model, optimizer) as probe:
        for number in range(STEPS):
            with probe.step():
                x, y = batch(number)
                loss = F.mse_loss(base(x) + up(down(x)) + up_2(down_2(x)), y)
                probe.note("loss", loss.detach())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    return weights(model)


def test_the_first_matrix_of_an_adapter_has_not_lost_its_moments(tmp_path):
    assert alarms(with_and_without(adapter, tmp_path)) == []
