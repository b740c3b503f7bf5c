"""A step eager and compiled: healthy ones are rounding, spoilt ones are named, and the model keeps every bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import trainprobe
from benchmarks.again.compiled_cases import PLANTED, Asks, Case, Net, net
from trainprobe.errors import UsageError


def state(model: nn.Module) -> list[Tensor]:
    """Return copies of all weights and buffers, and the state of the generator."""
    return [*(x.detach().clone() for x in model.state_dict().values()), torch.get_rng_state()]


def checked(case: Case):
    loss, model, batch = case.step()
    model(batch[0]).sum().backward()  # gradients that must still be there
    before, gradients = state(model), [(p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
    attributes = [dict(vars(m)) for m in model.modules()]
    with case.spoilt():
        verdict = trainprobe.compile_check(loss, model, batch)
    assert all(torch.equal(a, b) for a, b in zip(before, state(model), strict=True))
    assert all(torch.equal(g, kept) for g, kept in gradients)
    assert [p.grad is g for p, (g, _) in zip(model.parameters(), gradients, strict=True)].count(False) == 0
    assert all(a.keys() == vars(m).keys() for a, m in zip(attributes, model.modules(), strict=True))
    return verdict


def test_dropout_attention_and_norms_are_rounding_and_the_model_is_as_before():
    verdict = checked(Case(net))
    assert verdict.code in (0, 1), verdict.sentence
    assert "1 graph of" in verdict.sentence


@pytest.mark.parametrize(
    ("name", "layer", "operator"),
    [
        ("module: another path under a compiler", "Dynamo", ""),
        ("operator: a write that is not declared", "AOTAutograd", "centre_"),
        ("decomposition: layer norm without eps", "a decomposition", "layer_norm"),
    ],
)
def test_layer_module_operator_and_line_are_named(name: str, layer: str, operator: str):
    case = PLANTED[name]
    verdict = checked(case)
    assert verdict.code == 2
    assert (verdict.module, verdict.tensor) == (case.module, case.tensor), verdict.sentence
    assert layer in verdict.layer and operator in verdict.operator
    assert layer == "Dynamo" or ".py:" in verdict.line


def test_what_rounding_alone_moves_is_said_to_be_not_judged():
    verdict = checked(PLANTED["real: hinge loss in bfloat16 (pytorch#185517)"])  # its values lie on the edge of the hinge
    assert verdict.code == 1 and "not judged" in verdict.sentence and "embed.weight" in verdict.details[0]


class Broken(nn.Module):
    """A model whose graph breaks inside its second layer, before that layer's fault."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), Breaks(inner)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Breaks(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(4, 6), inner, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        torch._dynamo.graph_break()
        return self.down(self.inner(x))


class Unsaid(nn.Module):
    """Writes what it was given, by an operator that declares nothing."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1.0
        torch.ops.trainprobe_bench.centre_(y.detach())
        return y.tanh()


def test_a_module_in_a_graph_that_begins_in_a_layer_has_its_full_name():
    torch.manual_seed(0)
    model = Broken(Unsaid())
    verdict = trainprobe.compile_check(lambda m, x: m(x).square().mean(), model, torch.randn(5, 4))
    assert (verdict.code, verdict.module) == (2, "layers.1.inner"), verdict.sentence


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_of_a_model_that_is_compiled_in_part_that_part_is_checked(how: str):
    torch.manual_seed(0)
    model = nn.Sequential(Asks(), nn.Linear(4, 4), nn.Linear(4, 3))  # the wrong part is not compiled by the program
    if how == "in place":
        model[1].compile(backend="eager")
    else:
        model.register_module("1", cast(nn.Module, torch.compile(model[1], backend="eager")))
    verdict = trainprobe.compile_check(lambda m, x: m(x).square().mean(), model, torch.randn(5, 4))
    assert verdict.code in (0, 1) and "1 graph of 1 operator" in verdict.sentence, verdict.sentence


class Unseen(nn.Module):
    """A layer that the program keeps from the compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        keep_out: Any = torch.compiler.disable
        return keep_out(self.inner)(x)


def test_what_cannot_be_compared_is_no_answer_and_wrong_arguments_are_told():
    torch.manual_seed(0)
    hidden = Unseen()
    assert trainprobe.compile_check(lambda m, x: m(x).sum(), hidden, torch.randn(5, 4)).code == 3
    unsteady = trainprobe.compile_check(lambda m, x: m(x).sum() * time_of_day(), nn.Linear(4, 3), torch.randn(5, 4))
    assert unsteady.code == 3 and "two eager runs" in unsteady.sentence
    with pytest.raises(UsageError, match="without trained parameters"):
        trainprobe.compile_check(lambda m, x: m(x).sum(), nn.ReLU(), torch.randn(5, 4))


_CALLS = iter(range(1, 100))


def time_of_day() -> float:
    """Another number at each call."""
    return float(next(_CALLS))


SCRIPT = """
import torch
from benchmarks.again.compiled_cases import Asks, Net
torch.manual_seed(0)
model = torch.compile(Net(Asks() if {wrong} else None))
optimizer = torch.optim.AdamW(model.parameters())
for i in range(3):
    logits = model(torch.randn(4, 8, 16))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(5, (32,)))
    loss.backward()
    optimizer.step()
    print("trained")
"""


@pytest.mark.parametrize("wrong", [False, True])
def test_a_script_is_checked_at_its_first_update(tmp_path: Path, wrong: bool):
    (tmp_path / "train.py").write_text(SCRIPT.format(wrong=wrong))
    command = [sys.executable, "-m", "trainprobe", "compile-check", "--json", "answer.json", "--", "train.py"]
    found = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}  # the script imports the bench's cases
    done = subprocess.run(command, cwd=tmp_path, env=found, capture_output=True, text=True, timeout=300)
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert done.returncode == answer["code"] and "trained" not in done.stdout
    assert (answer["code"] == 2 and answer["module"] == "layers.1.act") if wrong else answer["code"] in (0, 1), done.stdout


def test_the_bench_names_modules_that_its_models_have():
    names = {name for name, _ in Net().named_modules()}
    assert {case.module for case in PLANTED.values()} <= names | {"norm2", "hinge"}
