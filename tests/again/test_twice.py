"""The same step twice: what differs is named, and the training is what it would have been."""

from __future__ import annotations

import copy
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trainprobe
from trainprobe.engine.state_guard import StateGuard
from trainprobe.engine.storage.dumps.findings_file import read_findings
from trainprobe.errors import PlanError, StopTraining
from trainprobe.monitor.audit.facts.calls import TrainingCalls


class Stateful(nn.Module):
    """Draws random numbers of four kinds, counts its calls, writes buffers and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 16)
        self.register_buffer("seen", torch.zeros(()))
        self.generator = torch.Generator().manual_seed(3)
        self.calls = 0
        self.odd: Any = lambda x: x

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        self.last = tokens.sum()
        self.seen += 1
        x = torch.dropout(self.embed(tokens), 0.1, True) + torch.rand(8, generator=self.generator)
        x = self.odd(self.norm(x)) * (1 + random.random() + float(np.random.rand()))
        return {"logits": self.head(x * (1 + 0.1 * self.calls) * self.seen), "aux": x.mean()}


def train(folder: Path, plan: dict[str, Any] | None, steps: int = 4, odd: Any = None, strike: Any = None) -> Any:
    """Train a model; return it with all states, and the findings."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Stateful()
    model.odd = odd or model.odd
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    made = {"output": folder, "console": False, "on_error": "raise", **(plan or {})}
    with trainprobe.watch(model, optimizer, made if plan is not None else {**made, "record": "nothing"}) as probe:
        for step in range(steps):
            with probe.step():
                optimizer.zero_grad()
                for _ in range(2):
                    if strike is not None:
                        strike(model, step)
                    out = model(torch.randint(0, 16, (6,)))
                    (out["logits"].square().mean() + out["aux"]).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = {
        "tensors": {name: t.detach().clone() for name, t in tensors.items()},
        "versions": {name: t._version for name, t in tensors.items()},
        "grads": {name: p.grad for name, p in model.named_parameters()},
        "moments": [s["momentum_buffer"] for s in optimizer.state.values()],
        "random": [torch.get_rng_state(), model.generator.get_state(), random.getstate(), np.random.get_state()[1].tolist()],
        "attributes": (model.calls, sorted(vars(model))),
    }
    return state, [f for f in probe.findings if f.rule == "repeat"], probe


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def flip(t: Tensor, place: int, bit: int) -> None:
    t.data.view(torch.int32).view(-1)[place] ^= 1 << bit


@pytest.mark.parametrize(
    "more", [{}, {"monitor": True}, {"record": "mix", "summary": "both"}, {"op_check": {"step": "all"}, "black_box": True}]
)
def test_the_training_is_what_it_would_have_been(tmp_path: Path, more: dict[str, Any]) -> None:
    plain, _, _ = train(tmp_path / "plain", None)
    twice, found, probe = train(tmp_path / "twice", {"audit": {"repeat": 1}, **more})
    assert probe.program("repeat").repeated == 4
    assert [f.message for f in found] == []
    assert {key: same(plain[key], twice[key]) for key in plain} == dict.fromkeys(plain, True)


def test_other_programs_take_no_notice_of_the_second_run(tmp_path: Path) -> None:
    seen = []
    for name, repeat in (("once", {}), ("twice", {"repeat": 1})):
        plan = {"audit": {"every": 1, **repeat}, "monitor": {"batches": True, "activations": True}, "sinks": ["jsonl"]}
        _, _, probe = train(tmp_path / name, plan)
        lines = [line for file in sorted((tmp_path / name).rglob("*.jsonl")) for line in file.read_text().splitlines()]
        seen.append((lines, probe.audit.last.facts.of(TrainingCalls), [(f.rule, f.message) for f in probe.findings]))
    assert len(seen[0][0]) >= 4
    assert seen[0] == seen[1]


def test_a_flipped_bit_of_an_output_is_named(tmp_path: Path) -> None:
    def odd(x: Tensor) -> Tensor:
        calls.append(0)
        y = x * 2
        if len(calls) == 5:  # the own run of step 1, as both micro-batches of step 0 ran twice
            flip(y, 11, 21)
        return y

    calls: list[int] = []
    _, found, _ = train(tmp_path, {"audit": {"repeat": 1}}, odd=odd, steps=2)
    (finding,) = found
    assert finding.severity == "error"
    assert finding.message.startswith("hardware: on rank 0 one bit of ")
    assert finding.step == 1
    assert "[1][3]: bit 21 (mantissa)" in finding.message


@pytest.mark.parametrize("bit", [0, 30])
def test_a_flipped_bit_of_a_weight_is_named(tmp_path: Path, bit: int) -> None:
    def strike(model: Stateful, step: int) -> None:
        if step == 2 and not struck:
            struck.append(step)
            flip(model.head.weight, 9, bit)

    struck: list[int] = []
    _, found, _ = train(tmp_path, {"audit": {"repeat": 2}}, strike=strike)
    assert [(f.severity, f.step, f.site and f.site.name) for f in found] == [("error", 2, "head.weight")]
    assert f"[1][1]: bit {bit} " in found[0].message


@pytest.mark.parametrize("stop", [False, True])
def test_an_update_of_hardware_that_errs_is_refused(tmp_path: Path, stop: bool) -> None:
    """The plan says whether; what the optimizer would have moved has the bits of before the step."""
    torch.manual_seed(0)
    model, calls = nn.Linear(4, 4), list[int]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def odd(module: Any, args: Any, y: Tensor) -> None:
        calls.append(0)
        if len(calls) == 3:  # the own run of step 1
            flip(y, 5, 21)

    model.register_forward_hook(odd)
    weights, states, refused = list[Any](), list[Any](), None
    plan = {"output": tmp_path, "console": False, "on_error": "raise", "audit": {"repeat": 1, "stop": stop}}
    try:
        with trainprobe.watch(model, optimizer, plan) as probe:
            for _ in range(2):
                with probe.step():
                    optimizer.zero_grad()
                    model(torch.randn(3, 4)).square().mean().backward()
                    weights.append([p.detach().clone() for p in model.parameters()])
                    states.append(copy.deepcopy(optimizer.state_dict()["state"]))
                    optimizer.step()
    except StopTraining as fault:
        refused = str(fault)
    assert (refused is not None) is stop
    kept = same(weights[-1], list(model.parameters())) and same(states[-1], optimizer.state_dict()["state"])
    assert kept is stop
    if refused is not None:
        assert refused.startswith("the update of step 1 is not made: hardware: on rank 0 one bit of ")
    (found,) = [f for f in read_findings(tmp_path) if f.rule == "repeat"]
    assert (found.severity, found.step) == ("error", 1)


def test_a_stop_without_a_repeat_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="stop: true refuses updates that a repeat finds wrong"):
        train(tmp_path, {"audit": {"stop": True}})


def test_a_weight_that_the_loop_writes_is_no_fault_of_hardware(tmp_path: Path) -> None:
    def strike(model: Stateful, step: int) -> None:
        model.head.weight.data.clamp_(-0.2, 0.2)
        with torch.no_grad():
            model.head.bias[0] = model.head.bias[0] * 2  # one bit or more, by a write that torch knows of

    _, found, _ = train(tmp_path, {"audit": {"repeat": 1}}, strike=strike)
    assert [f.severity for f in found] == ["info"]
    assert "were not judged: head.weight was written since" in found[0].message


def test_an_op_that_is_not_deterministic_is_named_once_and_counted(tmp_path: Path) -> None:
    def odd(x: Tensor) -> Tensor:
        return x + torch.tensor(list(os.urandom(8))) / 1e3

    _, found, _ = train(tmp_path, {"audit": {"repeat": 1}}, odd=odd)
    (finding,) = found
    assert (finding.severity, finding.count) == ("warning", 4)
    assert finding.message.startswith("not deterministic: ")


def test_state_outside_of_the_model_is_no_fault_of_hardware(tmp_path: Path) -> None:
    calls: list[int] = []

    def odd(x: Tensor) -> Tensor:
        calls.append(0)
        return x * 3 if len(calls) <= 2 else x  # the first step's own run alone

    _, found, _ = train(tmp_path, {"audit": {"repeat": 1}}, odd=odd, steps=1)
    (finding,) = found
    assert finding.severity == "warning"
    assert "more than one flipped bit" in finding.message
    assert "state outside of the model" in (finding.next or "")


def test_a_second_run_that_fails_leaves_the_training_as_it_is(tmp_path: Path) -> None:
    def odd(x: Tensor) -> Tensor:
        calls.append(0)
        if len(calls) == 4:  # in the second micro-batch of the second run
            raise ValueError("only once")
        return x

    calls: list[int] = []
    plain, _, _ = train(tmp_path / "plain", None, odd=lambda x: x)
    twice, found, probe = train(tmp_path / "twice", {"audit": {"repeat": 1}, "on_error": "continue"}, odd=odd)
    plain.pop("attributes"), twice.pop("attributes")
    assert {key: same(plain[key], twice[key]) for key in plain} == dict.fromkeys(plain, True)
    assert found == []
    assert any("the repeated step" in f.message for f in probe.findings)


def test_the_outputs_of_a_compiled_model_are_compared(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    compiled: Any = torch.compile(net, backend="eager")
    plan = {"output": tmp_path, "console": False, "audit": {"repeat": 1}, "on_error": "raise"}
    with trainprobe.watch(compiled, optimizer, plan) as probe:
        for _ in range(2):
            with probe.step():
                compiled(torch.ones(2, 4)).sum().backward()
                optimizer.step()
    assert [f.message for f in probe.findings if f.rule == "repeat"] == []
    assert probe.program("repeat").repeated == 2


def test_what_cannot_run_again_is_said(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.weight.main_grad = torch.zeros(2, 2)  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        trainprobe.watch(model, optimizer, {"output": tmp_path, "console": False, "audit": {"repeat": 1}}) as probe,
        probe.step(),
    ):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    said = [f.message for f in probe.findings if f.rule == "repeat"]
    why = "weight: its gradient is added to main_grad by kernels of the backward pass"
    assert said == [f"step 0 and others like it were not run again: {why}"]


@pytest.mark.parametrize("repeat", ["every 0", 0, "often", -1])
def test_an_interval_that_is_none_is_refused(repeat: Any, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="audit: repeat: "):
        trainprobe.Probe({"output": tmp_path, "audit": {"repeat": repeat}})


def test_the_guard_gives_everything_back_whatever_happens() -> None:
    model = Stateful()
    model(torch.arange(6))["logits"].sum().backward()
    model.plain, model.listed = torch.ones(3), [1, 2]  # type: ignore[assignment]
    graph = (model.plain * model.embed.weight.sum() * model.seen).sum()  # needs `seen` and `plain` as they are
    before = {name: t.clone() for name, t in model.state_dict().items()}
    grads, weight, last = (
        {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
        model.head.weight,
        model.last,
    )
    versions = [t._version for t in model.state_dict(keep_vars=True).values()]
    states = torch.get_rng_state(), model.generator.get_state(), random.getstate()
    with pytest.raises(ZeroDivisionError), StateGuard([model]):
        model(torch.arange(6))["logits"].sum().backward()
        model.plain.fill_(float("nan"))
        model.register_forward_hook(lambda *args: None)
        model.listed.append(3)
        model.seen.resize_(2)
        model.embed.weight.data = torch.zeros(2, 2)
        model.head.weight = nn.Parameter(torch.zeros(16, 8))
        model.head.bias.grad = None
        model.extra, model.training = 1, False
        del model.last
        model.register_buffer("more", torch.zeros(1))
        random.random()
        raise ZeroDivisionError
    assert same(before, dict(model.state_dict()))
    assert same(grads, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert [t._version for t in model.state_dict(keep_vars=True).values()] == versions
    assert (model.head.weight is weight, model.last is last, model.training, hasattr(model, "extra")) == (
        True,
        True,
        True,
        False,
    )
    assert (model.listed, len(model._forward_hooks)) == ([1, 2], 0)
    assert same(list(states), [torch.get_rng_state(), model.generator.get_state(), random.getstate()])
    graph.backward()
