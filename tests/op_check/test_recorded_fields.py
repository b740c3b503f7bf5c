"""What a dump of tensors holds for op-check beside inputs and results: layouts, arguments that were written, random states."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import trainprobe
from trainprobe.cli import main
from trainprobe.engine.core.records import Value
from trainprobe.engine.core.step_data import slots
from trainprobe.engine.storage.dumps import read
from trainprobe.op_check.cases import Case, flat, laid, strides_of
from trainprobe.op_check.check import check
from trainprobe.op_check.dump import check_dump, rank_folders
from trainprobe.op_check.execution import random_input, run_here
from trainprobe.op_check.functions import function
from trainprobe.op_check.recorded import RecordedRank

RIGHT = ("exact", "rounding")
SGD = "_fused_sgd_"


class Mixed(nn.Module):
    """Has a strided input, running statistics, writes without results, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(F.relu(self.norm(self.conv(x.contiguous(memory_format=torch.channels_last)))), 0.3)
        z = y.mean((2, 3)).clone()
        z[:, 1] = 0.5
        out = torch.zeros(z.shape)
        with torch.no_grad():
            torch.mul(z.detach(), 3, out=out)
        drawn = torch.randn(4) + torch.bernoulli(torch.full((4,), 0.3)) + torch.rand(4, generator=torch.Generator())
        attended = F.scaled_dot_product_attention(z.view(1, 4, 8), z.view(1, 4, 8), z.view(1, 4, 8), dropout_p=0.2)
        return self.last(z + attended[0]) + drawn + out.t()[:4].sum()


def recorded(folder: Path, **adam: Any) -> tuple[Mixed, Path]:
    torch.manual_seed(0)
    model = Mixed()
    optimizer = torch.optim.AdamW(model.parameters(), **adam)
    plan: Any = {"level": "mix", "task": "tensor", "output": folder, "console": False, "sinks": ["dump"]}
    with trainprobe.watch(model, optimizer, **plan) as probe, probe.step():
        model(torch.randn(4, 3, 9, 9)).square().mean().backward()
        optimizer.step()
    return model, folder


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> tuple[Mixed, Path]:
    return recorded(tmp_path_factory.mktemp("dump"), foreach=False)


def case(folder: Path, entry: str) -> Case:
    rank = RecordedRank.read(folder / "step0/rank0")
    return rank.case(next(unit for unit in rank.units() if unit.entry == entry))


def outcome(one: Case, backward: bool = False) -> str:
    return check(one, backward).worst.outcome


def test_inputs_have_the_layout_that_they_had(dump: tuple[Mixed, Path]) -> None:
    x, weight = case(dump[1], "Torch.conv2d.0.forward").args[:2]
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert not x.is_contiguous()
    assert weight.is_contiguous()
    turned = case(dump[1], "Tensor.__getitem__.1.forward").args[0]
    assert turned.stride() == (1, 8)


@pytest.mark.parametrize("strides", [(1, 4), (0, 1), (12, 3), (1, 2)])
def test_a_layout_is_rebuilt_as_torch_strides_it(strides: tuple[int, int]) -> None:
    whole = torch.arange(60.0)
    t = whole.as_strided((4, 3), strides)
    again = laid(t.contiguous(), t.stride())
    assert torch.equal(again, t)
    assert again.stride() == t.stride()


def test_running_statistics_are_judged(dump: tuple[Mixed, Path]) -> None:
    model, folder = dump
    found = case(folder, "Functional.batch_norm.0.forward")
    statistics = dict(model.norm.named_buffers())
    assert torch.equal(found.written["1"][0], statistics["running_mean"])
    assert torch.equal(found.written["2"][0], statistics["running_var"])
    assert outcome(found) in RIGHT
    biased = found.written["2"][0] - 0.1 * found.args[0].var((0, 2, 3)) / (4 * 7 * 7)
    assert outcome(replace(found, written={**found.written, "2": [biased]})) == "bug", "it is the variance over n"
    assert outcome(replace(found, written={**found.written, "1": [found.args[1]]})) == "bug", "it was not written at all"


def test_what_is_written_without_a_result_is_judged(dump: tuple[Mixed, Path]) -> None:
    found = case(dump[1], "Tensor.__setitem__.0.forward")
    assert outcome(found) == "exact"
    (after,) = found.written["0"]
    assert bool((after[:, 1] == 0.5).all())
    wrong = after.clone()
    wrong[2, 1] = found.args[0][2, 1]
    assert outcome(replace(found, written={"0": [wrong]})) == "bug"


def test_out_is_judged(dump: tuple[Mixed, Path]) -> None:
    found = case(dump[1], "Torch.mul.0.forward")
    assert "out" in found.kwargs
    assert outcome(found) == "exact"
    assert outcome(replace(found, outputs=[found.kwargs["out"]])) == "bug", "it was not written"


def test_random_operators_are_run_again_from_their_state(dump: tuple[Mixed, Path]) -> None:
    entries = ("Functional.dropout.0", "Torch.randn.1", "Torch.bernoulli.0", "Torch.rand.0")
    for entry in (*entries, "Functional.scaled_dot_product_attention.0"):
        found = check(case(dump[1], f"{entry}.forward"))
        assert found.worst.outcome == "exact", entry
        assert found.source == "run again"
    drop = case(dump[1], "Functional.dropout.0.backward")
    assert outcome(drop, True) == "exact"
    assert outcome(replace(drop, results=[drop.results[0].roll(1)]), True) == "bug"  # pyright: ignore[reportOptionalMemberAccess]
    attention = case(dump[1], "Functional.scaled_dot_product_attention.0.backward")
    assert outcome(attention, True) in (*RIGHT, "not checked")
    other = case(dump[1], "Functional.dropout.0.forward")
    assert other.generator is not None
    assert outcome(replace(other, generator=torch.Generator().get_state())) == "unspecified", "judged by its properties"
    wrong = replace(other, outputs=[other.outputs[0] * 0.7])  # pyright: ignore[reportOptionalOperand]
    assert outcome(wrong) == "bug"


@pytest.mark.parametrize("optimizer", [{"fused": True}, {"fused": True, "amsgrad": True, "weight_decay": 0.1}])
def test_fused_optimizers_are_judged_for_what_they_write(optimizer: dict[str, Any], tmp_path: Path) -> None:
    model, folder = recorded(tmp_path, **optimizer)
    found = case(folder, "Torch._fused_adamw_.0.forward")
    assert all(torch.equal(a, b) for a, b in zip(found.written["0"], model.parameters(), strict=True))
    assert outcome(found) in RIGHT
    for place in found.written:
        if found.written[place]:
            wrong = [t.clone() for t in found.written[place]]
            wrong[0].view(-1)[3] *= 1.001
            assert outcome(replace(found, written={**found.written, place: wrong})) in ("bug", "suspicious"), place


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("_fused_adam_", {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False}),
        ("_fused_sgd_", {"momentum": 0.9, "dampening": 0.1, "nesterov": True, "is_first_step": False}),
    ],
)
def test_formulas_of_fused_optimizers_agree_with_torch(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    lists = [[torch.randn(7, 5).abs(), torch.randn(3)] for _ in range(4)]
    given = [*lists, [], [torch.tensor(3.0)] * 2] if "adam" in name else lists[:3]
    before = [[t.clone() for t in each] for each in given]
    named = {"lr": 0.1, "weight_decay": 0.01, "maximize": True, **options}
    getattr(torch, name)(*given, **named)
    places = (0, 2, 3, 4) if "adam" in name else (0, 2)
    one = Case(f"Torch.{name}", tuple(before), named, written={str(i): given[i] for i in places})
    assert outcome(one) in RIGHT
    one.written = {str(i): before[i] for i in places}
    assert outcome(one) == "bug"


def test_lists_of_tensors_that_are_written_are_judged(tmp_path: Path) -> None:
    _, folder = recorded(tmp_path, foreach=True)
    rows = {row.entry: row.worst for row in check_dump(rank_folders(folder)).rows if "_foreach_" in row.name}
    assert len(rows) >= 6
    assert {judged.outcome for judged in rows.values()} <= {*RIGHT}
    found = case(folder, "Torch._foreach_addcdiv_.0.forward")
    assert outcome(replace(found, outputs=list(found.args[0]))) == "bug", "nothing was written"


def test_other_readers_pass_over_what_is_new(dump: tuple[Mixed, Path], capsys: pytest.CaptureFixture[str]) -> None:
    step = read(dump[1] / "step0/rank0")
    calls = {f"{call.name}.{call.call}.{call.phase}": [slot for slot, _ in slots(call)] for call in step.calls}
    assert calls["Functional.dropout.0.forward"] == ["input.0", "output"], "a state is no value of the training"
    assert [s for s in calls["Functional.batch_norm.0.forward"] if "written" in s] == ["written.1", "written.2"]
    assert main(["dump-compare", "-q", str(dump[1]), str(dump[1])]) == 0
    capsys.readouterr()
    norm = next(c for c in step.calls if c.name == "Functional.batch_norm" and c.phase == "forward")
    assert norm.params is not None
    assert set(norm.params) == {"written"}


class Turned(nn.Module):
    """Gives operators inputs that are turned, cut, spread, interleaved or in another memory format."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.view(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        seen = torch.matmul(q, k.transpose(-2, -1)) + x[:, None, :, ::4].expand(2, 2, 6, 6)
        last = torch.matmul(seen, v)[..., ::2, 1:]
        image = x.view(2, 6, 4, 6).contiguous(memory_format=torch.channels_last)
        own = torch.exp(x[..., ::3].as_subclass(OwnClass)).as_subclass(torch.Tensor)
        return F.relu(last).sum() + F.avg_pool2d(image, 2).sum() + x.unfold(1, 3, 1).mul(2.0).sum() + own.sum()


class OwnClass(torch.Tensor):
    """A class of the program's own."""


class LayoutsAtCalls(torch.overrides.TorchFunctionMode):
    """What torch itself says of the arguments of each call, in order: shapes and, where a tensor is not contiguous, strides."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[list[tuple[int, ...] | None]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [None if t.is_contiguous() else t.stride() for t in flat((args, kwargs or {}))]
        self.calls.setdefault(getattr(func, "__name__", ""), []).append(given)
        return func(*args, **(kwargs or {}))


def statistics(folder: Path, model: nn.Module, x: torch.Tensor) -> Path:
    plan: Any = {"level": "mix", "output": folder, "console": False, "sinks": ["dump"]}
    with trainprobe.watch(model, **plan) as probe, probe.step():
        model(x).sum().backward()
    return folder / "step0/rank0"


def test_statistics_alone_hold_layouts_and_nothing_else_of_it(tmp_path: Path) -> None:
    text = (statistics(tmp_path, Mixed(), torch.randn(4, 3, 9, 9)) / "dump.json").read_text(encoding="utf-8")
    entries = json.loads(text)["data"]
    assert {"Functional.dropout.0.forward", "Functional.batch_norm.0.forward"} <= {*entries}
    assert not any({"written", "generator"} & {*entry} for entry in entries.values())
    x, weight, _ = entries["Torch.conv2d.0.forward"]["input_args"][:3]
    assert x["stride"] == [243, 1, 27, 3]
    assert "stride" not in weight


@pytest.fixture(scope="module")
def turned(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[list[tuple[int, ...] | None]]], RecordedRank]:
    torch.manual_seed(0)
    x = torch.randn(2, 6, 24, requires_grad=True)
    with LayoutsAtCalls() as told:
        Turned()(x).sum()
    return told.calls, RecordedRank.read(statistics(tmp_path_factory.mktemp("turned"), Turned(), x))


def test_statistics_alone_hold_the_layout_that_each_call_was_given(turned: Any) -> None:
    told, rank = turned
    units = {unit.entry: unit for unit in rank.units() if unit.direction == "forward"}
    compared = 0
    for entry, unit in units.items():
        name, number = entry.split(".")[1:3]
        if name in told:
            given = [strides_of(value) for value in values_in([unit.call.args, unit.call.kwargs])]
            assert given == told[name][int(number)], entry
            compared += sum(strides is not None for strides in given)
    assert compared >= 9


def values_in(tree: Any) -> list[Value]:
    if isinstance(tree, Value):
        return [tree]
    items = tree if isinstance(tree, list) else [*tree.values()] if isinstance(tree, dict) else []
    return [value for item in items for value in values_in(item)]


@pytest.mark.parametrize("backward", [False, True])
def test_made_inputs_reach_the_operator_in_the_layout_that_it_was_given(turned: Any, backward: bool) -> None:
    told, rank = turned
    seen: dict[str, list[tuple[int, ...] | None]] = {}
    for unit in rank.units():
        if unit.direction == "forward" and unit.call.name.rpartition(".")[2] in ("matmul", "relu", "avg_pool2d", "mul"):
            one = rank.made_case(unit)
            original, name = function(one.name), f"{one.name.rpartition('.')[2]}.{unit.call.call}"

            def told_by_torch(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
                seen[name] = [None if t.is_contiguous() else t.stride() for t in flat((args, kwargs))]
                return original(*args, **kwargs)

            run_here(replace(one, function=told_by_torch), backward)
    assert seen == {name: told[name.split(".")[0]][int(name.split(".")[1])] for name in seen}
    assert {"matmul.0", "relu.0", "avg_pool2d.0", "mul.0"} <= {*seen}


def test_made_inputs_that_share_memory_keep_both_limits() -> None:
    for strides in ([0, 1], [1, 0], [1, 4], [1, 1], [40, 2]):
        value = Value(0, "torch.float32", (4, 9), extra={"stride": strides})
        t = laid(random_input(value, (-3.0, 5.0)), strides)
        assert (t.stride(), t.min(), t.max()) == (tuple(strides), -3.0, 5.0)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("name", ["_fused_adam_", "_fused_adamw_"])
def test_an_average_that_cancels_in_a_fused_update_is_rounding_and_a_wrong_element_of_it_is_not(
    name: str, as_tensor: bool
) -> None:
    """Of 65,536 elements whose gradient nearly undoes what is left of the average, none is further off than its rounding."""
    torch.manual_seed(0)
    average = torch.randn(256, 256) * 1e-5
    gradient = average * -9 * (1 + 1e-2 * torch.randn(256, 256))
    given = [[torch.randn(256, 256) * 0.02], [gradient], [average], [torch.rand(256, 256) * 1e-9], [], [torch.tensor(3.0)]]
    before = [[t.clone() for t in each] for each in given]
    rate = torch.tensor(1e-3) if as_tensor else 1e-3
    named = {"lr": rate, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8, "amsgrad": False, "maximize": False}
    getattr(torch, name)(*given, **named)
    one = Case(f"Torch.{name}", tuple(before), named, written={str(i): given[i] for i in (0, 2, 3)})
    assert outcome(one) in RIGHT
    average[7, 7] += 1e-3 * abs(gradient[7, 7])
    assert outcome(one) == "bug"


@pytest.mark.parametrize(
    ("left", "scaled", "options"),
    [
        (0.0, False, {}),
        (0.1, False, {}),  # was called one-sided
        (0.0, True, {}),  # each of the scaled was called a bug
        (0.0, True, {"dampening": 0.1}),
        (0.0, True, {"weight_decay": 1e-6}),
        (0.0, True, {"maximize": True, "nesterov": True}),
    ],
)
def test_an_average_that_cancels_in_a_fused_sgd_is_rounding_and_a_wrong_element_of_it_is_not(
    left: float, scaled: bool, options: dict[str, Any]
) -> None:
    """Of 65,536 elements whose gradient nearly undoes what momentum 0.9 keeps of the average, leaving `left` of it."""
    torch.manual_seed(0)
    named = {"weight_decay": 0.0, "momentum": 0.9, "dampening": 0.0, "nesterov": False, "maximize": False, **options}
    weight, average = torch.randn(256, 256) * 0.02, torch.randn(256, 256) * 1e-5
    change = average * -(0.9 + left) / (1 - named["dampening"]) * (1 + 1e-2 * torch.randn(256, 256))
    change -= named["weight_decay"] * weight
    scale = {"grad_scale": torch.tensor(3.0)} if scaled else {}
    gradient = change * (3.0 if scaled else 1.0) * (-1 if named["maximize"] else 1)
    given = [[weight], [gradient], [average]]
    before = [[t.clone() for t in each] for each in given]
    named = {**named, **scale, "lr": 1e-3, "is_first_step": False}
    getattr(torch, SGD)(*given, **named)
    one = Case(f"Torch.{SGD}", tuple(before), named, written={str(i): given[i] for i in (0, 2)})
    assert outcome(one) in RIGHT
    average[7, 7] += 1e-3 * abs(before[1][0][7, 7])
    assert outcome(one) == "bug"


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("first", [False, True])
def test_a_fused_sgd_that_is_skipped_or_begins_is_judged(found: float, momentum: float, first: bool) -> None:
    torch.manual_seed(0)
    given = (
        [[torch.randn(7, 5), torch.randn(3)] for _ in range(3)] if momentum else [[torch.randn(7, 5)], [torch.randn(7, 5)], []]
    )
    before = [[t.clone() for t in each] for each in given]
    named = {"weight_decay": 0.1, "momentum": momentum, "lr": torch.tensor(0.1), "dampening": 0.0, "nesterov": False}
    named |= {"maximize": False, "is_first_step": first, "grad_scale": torch.tensor(2.0), "found_inf": torch.tensor(found)}
    getattr(torch, SGD)(*given, **named)
    one = Case(f"Torch.{SGD}", tuple(before), named, written={str(i): given[i] for i in (0, 2) if given[i]})
    assert outcome(one) in RIGHT
    given[0][0][1, 1] += 1e-3
    assert outcome(one) == "bug"


def test_memory_that_a_call_is_to_write_is_no_value_that_is_missing(tmp_path, capsys):
    with trainprobe.watch(torch.nn.Identity(), output=tmp_path, level="L1", task="tensor", step=[0]) as probe, probe.step():
        x = torch.arange(12.0).view(3, 4)
        into = torch.empty(12).view(3, 4)
        torch.mul(x, 3, out=into)
        torch.empty(3, 4).copy_(into)
    assert main(["op-check", str(tmp_path)]) == 0
    assert "7 calls judged (6 exact, 1 unspecified)" in capsys.readouterr().out
