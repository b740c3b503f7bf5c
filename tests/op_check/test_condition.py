"""Operators run again with perturbed inputs: how much they make of it, and whether they are deterministic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import trainprobe
from trainprobe.cli import main
from trainprobe.op_check.cases import Case
from trainprobe.op_check.condition import condition
from trainprobe.op_check.improve import HigherPrecision


def test_a_condition_is_what_calculus_says() -> None:
    x = torch.linspace(1.0, 2.0, 100)
    for power in (1.0, 7.0):  # the relative condition of x^p is p
        response, size = condition(Case("Torch.pow", (x.double(), power)), False, "noise")
        assert size == pytest.approx(2.0**-52)
        assert response[0] / size == pytest.approx(power, rel=0.5)
    near = torch.full((50,), 1.0) + torch.linspace(0, 1e-6, 50)
    response, size = condition(Case("Torch.sub", (near, torch.ones(50))), False, "last-bit")
    assert response[0] / size > 1e5, "a difference that cancels"


def test_the_kinds_of_perturbation() -> None:
    x = torch.tensor([1.0, 2.0, 0.0, -4.0])
    assert condition(Case("Torch.neg", (x,)), False, "swap")[0][0] > 0.5
    assert condition(Case("Torch.sum", (x,)), False, "swap")[0] == [0.0]
    half = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    response, size = condition(Case("Torch.exp", (half,)), False, "precision")
    assert 0 < response[0] < 2.0**-8
    assert size == 2.0**-8
    given = Case("Torch.exp", (x,), {}, [x.exp()], [torch.ones(4)], [x.exp()], [True])
    response, size = condition(given, True, "last-bit")
    assert 0 < response[0] < 1e-5, "the gradient of exp changes with its input"


def test_an_operator_that_is_not_deterministic_is_found() -> None:
    drawn = iter(range(10))
    case = Case("Torch.add", (torch.ones(4),), function=lambda x: x + next(drawn) * 1e-7)
    assert condition(case, False, "nothing")[0][0] > 0
    assert condition(Case("Torch.exp", (torch.ones(4),)), False, "nothing")[0] == [0.0]


def test_random_states_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("Functional.dropout", (torch.ones(64), 0.5), function=F.dropout)
    before = torch.get_rng_state()
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("it seeds all devices, which the training goes on with"))
    assert condition(case, False, "nothing")[0] == [0.0], "both runs draw the same"
    assert torch.equal(before, torch.get_rng_state())


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.wide(x))
        return self.head(h - h.mean(-1, keepdim=True))


def recorded(folder: Path, **plan: Any) -> tuple[Path, torch.Tensor]:
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
    with trainprobe.watch(model, optimizer, output=str(folder), console=False, **plan) as probe, probe.step():
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return folder, model.head.weight.detach().clone()


def test_the_file_is_a_floor_of_dump_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump, _ = recorded(tmp_path / "a", level="mix", task="tensor", step=[0])
    other = tmp_path / "b"
    file = tmp_path / "condition.json"
    assert main(["op-check", str(dump), "--condition", "last-bit", "--json", str(file)]) == 0
    assert "calls run again with perturbed inputs (last-bit)" in capsys.readouterr().out
    calls = {call["entry"]: call for call in json.loads(file.read_text())["calls"]}
    assert calls["Functional.linear.0.forward"]["response"][0] < 1e-6
    assert calls["Functional.linear.0.forward"]["perturbed_by"] > 0
    gelu = calls["Functional.gelu.0.forward"]
    gelu["response"] = [0.5]
    file.write_text(json.dumps({**json.loads(file.read_text()), "calls": [*calls.values()]}))
    torch.manual_seed(0)
    model = Small()
    with torch.no_grad():
        model.wide.weight += 1e-3
    x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
    plan: dict[str, Any] = {"level": "mix", "task": "tensor", "step": [0], "output": str(other), "console": False}
    with trainprobe.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), **plan) as probe, probe.step():
        F.cross_entropy(model(x), y).backward()
    result = tmp_path / "compared.json"
    main(["dump-compare", str(dump), str(other), "--floor", str(file), "--json", str(result)])
    assert '"floor":0.5' in result.read_text().replace(" ", "")
    file.write_text("{}")
    assert main(["dump-compare", str(dump), str(other), "--floor", str(file)]) == 3
    assert "op-check --condition" in capsys.readouterr().err


def test_nothing_at_all_and_a_wrong_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump, _ = recorded(tmp_path / "a", level="L1", task="tensor", step=[0])
    assert main(["op-check", str(dump), "--condition", "nothing"]) == 0
    assert "all gave the same bits" in capsys.readouterr().out
    assert main(["op-check", str(dump), "--condition", "nothin"]) == 3
    assert "did you mean" in capsys.readouterr().err


def test_in_a_training_conditions_are_written_and_no_bit_changes(tmp_path: Path) -> None:
    _, bare = recorded(tmp_path / "a", level="off")
    folder, watched = recorded(tmp_path / "b", level="off", op_check={"condition": "last-bit", "ops": ["linear", "gelu"]})
    assert torch.equal(bare, watched)
    written = json.loads((folder / "op_check" / "condition_step0_rank0.json").read_text())
    assert {call["entry"].split(".")[1] for call in written["calls"]} == {"linear", "gelu"}
    assert "condition" in (folder / "rank0" / "op_check.txt").read_text()


def test_higher_precision_changes_the_chosen_operators_alone() -> None:
    x = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    with HigherPrecision(["softmax"]) as improved:
        better, same = torch.softmax(x, -1), torch.exp(x)
    assert improved.calls == 1
    assert better.dtype == torch.bfloat16
    assert torch.equal(better, torch.softmax(x.float(), -1).to(torch.bfloat16))
    assert torch.equal(same, torch.exp(x))
