"""A golden record of a small run: what is the same, what is rounding, and where a change is first seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainprobe
from trainprobe.again.conditions import golden as golden_command
from trainprobe.again.conditions.golden import judge
from trainprobe.again.golden_record import MOST, GoldenRow, read_golden, rows_of_dump, with_floors, within_reach, write_golden
from trainprobe.cli import main
from trainprobe.errors import FormatError
from trainprobe.integrations import perturbed_start

PLAN: dict[str, Any] = {"level": "L0", "summary": "both", "sinks": ["dump"], "stacks": False, "console": False}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.act: Callable[[Tensor], Tensor] = torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.norm(self.first(x))))


def rows(
    folder: Path, change: Callable[[Net], Any] = lambda net: None, rate: float = 0.01, scale: float = 1.0, draw: int = 1
) -> list[GoldenRow]:
    """Train three steps and return what they showed."""
    torch.manual_seed(0)
    net = Net()
    change(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=rate)
    data = torch.Generator().manual_seed(draw)
    with trainprobe.watch(net, optimizer, {**PLAN, "output": folder}) as probe:
        for _ in range(3):
            with probe.step():
                optimizer.zero_grad()
                (scale * net(torch.randn(6, 8, generator=data)).square().mean()).backward()
                optimizer.step()
    return rows_of_dump(folder)


def perturbed(net: Net) -> None:
    for p in net.parameters():
        perturbed_start.move(p)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> list[GoldenRow]:
    folder = tmp_path_factory.mktemp("golden")
    made = with_floors(rows(folder / "run"), [rows(folder / "floor", perturbed)])
    write_golden(folder / "golden.txt", made, ["train.py"])
    return read_golden(folder / "golden.txt")


def in_two_halves(net: Net) -> None:
    net.first.forward = lambda x: x[:, :4] @ net.first.weight[:, :4].T + x[:, 4:] @ net.first.weight[:, 4:].T + net.first.bias  # type: ignore


def test_the_same_training_has_the_same_bits(golden: list[GoldenRow], tmp_path: Path) -> None:
    verdict = judge(golden, rows(tmp_path))
    assert (verdict.code, verdict.sentence) == (0, f"identical: all {len(golden)} values have the same bits")


def test_another_order_of_a_sum_is_rounding(golden: list[GoldenRow], tmp_path: Path) -> None:
    verdict = judge(golden, rows(tmp_path, in_two_halves))
    assert verdict.code == 1, verdict.sentence


def set_eps(net: Net) -> None:
    net.norm.eps = 1e-3


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"change": set_eps}, "module norm, output, step 0, rank 0"),
        ({"change": lambda net: setattr(net, "act", torch.relu)}, "what module last is given, input.0, step 0"),
        ({"change": lambda net: net.last.weight.data.mul_(2)}, "the weights that the run begins with, last.weight"),
        ({"rate": 0.011}, "the update of first.weight, step 1"),
        ({"scale": 2.0}, "the loss or its scale"),
        ({"draw": 2}, "the data, input.0 of the model"),
    ],
)
def test_a_change_is_named_where_it_is_first_seen(
    golden: list[GoldenRow], tmp_path: Path, more: dict[str, Any], words: str
) -> None:
    verdict = judge(golden, rows(tmp_path, **more), ["torch is another"])
    assert verdict.code == 2
    assert verdict.sentence.startswith("not the same: ")
    assert words in verdict.sentence
    assert verdict.details[-1] == "otherwise than then: torch is another"


def test_values_that_are_gone_are_no_success(golden: list[GoldenRow], tmp_path: Path) -> None:
    now = rows(tmp_path)
    assert judge(golden, [row for row in now if row.step < 2]).code == 3
    assert judge(golden, []).code == 3


def test_numbers_that_are_not_finite_are_another_answer(golden: list[GoldenRow], tmp_path: Path) -> None:
    verdict = judge(golden, rows(tmp_path, lambda net: setattr(net, "act", lambda x: x / 0)))
    assert verdict.code == 2
    assert "step 0" in verdict.sentence


def test_a_record_is_text_that_is_bounded_and_checked(golden: list[GoldenRow], tmp_path: Path) -> None:
    path = tmp_path / "golden.txt"
    write_golden(path, golden, ["train.py"])
    assert read_golden(path) == golden
    kept, note = within_reach(golden, 2000)
    assert sum(len(row.line()) + 1 for row in kept) <= 3 * 2000
    assert "are left out" in note
    assert within_reach(golden, MOST) == (golden, "")
    text = path.read_text()
    path.write_bytes(text.replace("\n", "\r\n").encode())  # as git may check it out
    assert read_golden(path) == golden
    lines = text.splitlines(keepends=True)
    for edited in ("".join(lines[:9]), "".join([*lines[:9], *lines[10:]]), text.replace("\t0.", "\t1.", 1), text[:-20]):
        path.write_text(edited)
        with pytest.raises(FormatError, match="cut short or edited"):
            read_golden(path)
    path.write_text("hello")
    with pytest.raises(FormatError, match="is no golden record"):
        read_golden(path)


def test_the_command_records_and_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\ntorch.manual_seed(0)\nnet = torch.nn.Linear(4, 2)\n"
        "o = torch.optim.SGD(net.parameters(), lr=float(sys.argv[1]))\n"
        "for _ in range(3):\n    net(torch.randn(3, 4)).square().mean().backward()\n    o.step()\n    o.zero_grad()\n"
    )
    monkeypatch.setattr(golden_command, "FLOORS", ())
    golden = str(tmp_path / "golden.txt")
    assert main(["golden", "record", "--steps", "2", golden, "--", str(script), "0.1"]) == 0
    answer = tmp_path / "answer.json"
    code = main(["golden", "check", "--json", str(answer), golden, "--", str(script), "0.2"])
    said = capsys.readouterr().out
    assert code == 2
    assert "not the same: the update of weight, step 1, rank 0" in said
    assert "otherwise than then: learning rate differs: 0.1 and 0.2" in said
    assert '"code": 2' in answer.read_text()


def test_what_no_rounding_reaches_is_not_rounding(tmp_path: Path) -> None:
    """The rows of a batch, and token numbers, in another order leave all statistics the same."""

    def run(name: str, turned: bool = False, ids: bool = False, change: Callable[[nn.Module], Any] = lambda net: None):
        torch.manual_seed(0)
        net = nn.Sequential(*([nn.Embedding(9, 8)] if ids else []), nn.Linear(8, 4))
        change(net)
        x = torch.tensor([[3, 5, 1, 8]]) if ids else torch.linspace(-1, 1, 16).reshape(2, 8)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with trainprobe.watch(net, optimizer, {**PLAN, "output": tmp_path / name}) as probe, probe.step():
            net(x.flip(-1 if ids else 0) if turned else x).square().mean().backward()
        return rows_of_dump(tmp_path / name)

    for ids in (False, True):
        golden = with_floors(run(f"run{ids}", ids=ids), [run(f"floor{ids}", ids=ids, change=perturbed)])
        verdict = judge(golden, run(f"other{ids}", True, ids))
        assert verdict.code == 2, verdict.sentence
        assert verdict.sentence.startswith("not the same: the data, input.0"), verdict.sentence
        assert "no rounding changed it" in verdict.sentence
        assert judge(golden, run(f"moved{ids}", ids=ids, change=perturbed)).code == 1


def test_two_values_without_a_finite_number_are_no_rounding(golden: list[GoldenRow]) -> None:
    """One value is NaN then and now, and other elements of it are."""
    row = next(row for row in golden if row.floor)
    others = [other for other in golden if other is not row]
    nothing = replace(row, numbers=(float("nan"),) * 4)
    then, now = [nothing, *others], [replace(nothing, fingerprint=row.fingerprint ^ 1), *others]
    verdict = judge(then, now)
    assert verdict.code == 3
    assert "1 of " in verdict.sentence and "NaN or infinite then and now, and their bits differ" in verdict.sentence
    assert judge(then, then).code == 0
    masked = replace(row, numbers=(0.0, -float("inf"), -float("inf"), float("inf")))
    other = replace(masked, fingerprint=masked.fingerprint ^ 1)
    assert judge([masked], [other]).code == 1
    assert judge([masked], [replace(other, numbers=(0.5, *masked.numbers[1:]))]).code == 2


def test_a_name_that_holds_line_ends_stays_one_row(tmp_path: Path) -> None:
    net = nn.Sequential()
    net.add_module("a\nb\tc", nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with trainprobe.watch(net, optimizer, {**PLAN, "output": tmp_path / "run"}) as probe, probe.step():
        net(torch.ones(2, 2)).sum().backward()
    made = rows_of_dump(tmp_path / "run")
    assert any("\\n" in row.key.name for row in made)
    write_golden(tmp_path / "golden.txt", made, ["train.py", "two\nlines"])
    assert [row.place for row in read_golden(tmp_path / "golden.txt")] == [row.place for row in made]
