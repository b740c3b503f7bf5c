"""Calls in 16 bits that are given the same are held to the rounding of their own result, and healthy kernels stay within it."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trainprobe
from benchmarks.dump_compare.kernels import HEALTHY, Replaced
from benchmarks.dump_compare.runs import Way, train
from benchmarks.dump_compare.sixteen_bits import PLANS, PLANTS, REGIMES
from tests.matrices import matrix
from trainprobe.cli import main
from trainprobe.dump_compare.own_rounding import (
    Counted,
    OwnRounding,
    arriving,
    by_counts,
    by_elements,
    by_statistics,
    in_its_format,
    statistics_of,
)
from trainprobe.engine.core.records import Call, Value

BFLOAT16 = OwnRounding(2.0**-7, 0.0, 1e-6)
NAMED = ("linear: gain 1.05", "linear: a column zero", "linear: a column doubled", "loss: gain 1.05", "weights: all 3 % off")


def rounded(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).bfloat16().double().numpy()


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """The right training for each plan, in bfloat16, one step."""
    made = {}

    def dump(plan: str):
        if plan not in made:
            made[plan] = train(
                tmp_path_factory.mktemp(plan) / "right", "gpt", Way(dtype=torch.bfloat16), step=[0], **PLANS[plan]
            )
        return made[plan]

    return dump


@pytest.mark.parametrize(("name", "plan"), matrix(NAMED, PLANS))
def test_a_wrong_kernel_or_weight_is_named(tmp_path, capsys, right, name, plan):
    """Case c01."""
    plant = next(each for each in PLANTS if each.name == name)
    way = Way(**REGIMES["bfloat16"], kernels=Replaced(fault=plant.fault), weights=plant.weights)
    b = train(tmp_path / "b", "gpt", way, step=[0], **PLANS[plan])
    capsys.readouterr()
    code = main(["dump-compare", str(right(plan)), str(b), "-q"])
    said = capsys.readouterr().out
    assert code == 2 and re.search(plant.first, said), said


@pytest.mark.parametrize(("name", "plan"), [("linear: gain 1.02", "statistics"), ("norm: gain 1.02", "tensors")])
def test_a_difference_may_grow_and_does_not_restart(tmp_path, capsys, right, name, plan):
    """All kernels before the wrong one compute in float64, so that it is given other numbers."""
    plant = next(each for each in PLANTS if each.name == name)
    way = Way(**REGIMES["bfloat16"], kernels=Replaced(HEALTHY["float64"], plant.fault))
    b = train(tmp_path / "b", "gpt", way, step=[0], **PLANS[plan])
    capsys.readouterr()
    code = main(["dump-compare", str(right(plan)), str(b), "-q"])
    said = capsys.readouterr().out
    assert code == 2 and re.search(plant.first, said), said


@pytest.mark.parametrize("shape", [(64, 32), (8, 24, 48)])
def test_what_arrives_moves_a_norm_as_much_as_it_has_a_direction(shape):
    rng = np.random.default_rng(3)
    x, weight = rng.normal(size=shape), rng.normal(size=(shape[-1], shape[-1])) / np.sqrt(shape[-1])
    for gain, apart in ((1.0, 0.003), (1.0, 0.1), (1.02, 0.003)):
        y = x * gain * (1 + apart * rng.normal(size=shape))
        a, b = (rounded(each @ weight) for each in (x, y))
        moved = abs(np.linalg.norm(x) - np.linalg.norm(y)) / np.linalg.norm(x)
        how = BFLOAT16._replace(arrives=arriving(moved, np.linalg.norm(x - y) / np.linalg.norm(x), shape))
        assert by_statistics(statistics_of(a), statistics_of(b), a.size, how).times <= 1
    how = BFLOAT16._replace(arrives=arriving(0.0, 0.003, shape))
    assert by_statistics(statistics_of(a), statistics_of(rounded(a * 1.02)), a.size, how).times > 1
    assert arriving(0.0, 0.003, (shape[-1],)) == 0


def test_a_gradient_that_is_added_up_in_its_format_is_held_to_the_norm_of_independent_roundings():
    rng = np.random.default_rng(1)
    rows, size = 192, 1024
    terms = rng.normal(size=(rows, size))
    a, b = np.zeros(size), np.zeros(size)
    for i in range(rows):
        a = rounded(a + terms[i])
        b = rounded(b + terms[rows - 1 - i])
    call = Call("op", "Functional.layer_norm", 3, "backward")
    how = BFLOAT16._replace(times=np.sqrt(in_its_format(call, Value(0, "torch.bfloat16", (size,)), rows * size)))
    assert how.times == pytest.approx(np.sqrt(rows))
    assert by_statistics(statistics_of(a), statistics_of(b), size, how).times <= 1
    wrong = by_statistics(statistics_of(a), statistics_of(rounded(b * 1.06)), size, how)
    assert wrong.times > 1 and wrong.what == "norm"  # ten units of the format are 7.8 %


OTHER_WAYS = {
    "other order": {"kernels": Replaced(HEALTHY["other order"])},
    "float64": {"kernels": Replaced(HEALTHY["float64"])},
    "bias apart": {"apart": True},
    "attention in parts": {"math": True},
    "eager attention": {"model": {"eager": True}},
    "threads": {"threads": 2},
}


@pytest.mark.parametrize(("how", "plan"), matrix(OTHER_WAYS, ["statistics", "tensors"]))
def test_healthy_kernels_are_within_rounding(tmp_path, capsys, right, how, plan):
    b = train(tmp_path / "b", "gpt", replace(Way(dtype=torch.bfloat16), **OTHER_WAYS[how]), step=[0], **PLANS[plan])
    capsys.readouterr()
    code = main(["dump-compare", str(right(plan)), str(b)])
    said = capsys.readouterr().out
    assert code in (0, 1, 3) and "within rounding" in said + "all calls agree", said
    assert " bug" not in said and " suspicious" not in said, said


@pytest.mark.parametrize(("moved", "code"), [(2.5e-3, 1), (3e-2, 2)])
def test_statistics_that_hide_what_arrives_accuse_no_call_in_float32_behind_16_bits(tmp_path, capsys, moved, code):
    """The elements of what a norm's backward is given are 4e-3 apart, and by chance no number of the dump tells it.

    The gradient of its weight is then apart by what other results are, which is no fault, and by ten times as much, which is.
    """
    way = Way(autocast=torch.bfloat16)
    ways = (way, replace(way, kernels=Replaced(HEALTHY["halves"])))
    a, b = (train(tmp_path / side, "gpt", each, **PLANS["statistics"]) for side, each in zip("ab", ways, strict=True))
    held, other = (json.loads((folder / "step1/rank0/dump.json").read_text())["data"] for folder in (a, b))
    path = b / "step1/rank0/dump.json"
    whole = json.loads(path.read_text())
    name = "Functional.layer_norm.1.backward"
    whole["data"][name] = json.loads(json.dumps(held[name]))
    whole["data"][name]["input"][0]["Mean"] = other[name]["input"][0]["Mean"]
    whole["data"][name]["output"][1]["Norm"] *= 1 + moved
    path.write_text(json.dumps(whole))
    capsys.readouterr()
    assert main(["dump-compare", str(a), str(b)]) == code, capsys.readouterr().out


def test_a_floor_does_not_hide_a_wrong_kernel(tmp_path, capsys, right):
    plant = next(each for each in PLANTS if each.name == "linear: gain 1.05")
    way = Way(**REGIMES["bfloat16"], kernels=Replaced(fault=plant.fault))
    b = train(tmp_path / "b", "gpt", way, step=[0], **PLANS["statistics"])
    c = train(tmp_path / "c", "gpt", Way(dtype=torch.bfloat16, noise=2.0**-8), step=[0], **PLANS["statistics"])
    capsys.readouterr()
    assert main(["dump-compare", str(right("statistics")), str(b), "--floor", str(c), "-q"]) == 2
    assert "Functional.linear.10.forward" in capsys.readouterr().out


@pytest.mark.parametrize("tail", [1.0, 3.0], ids=["normal", "heavy tails"])
@pytest.mark.parametrize("n", [1, 7, 1000, 200_000])
def test_two_roundings_of_equal_numbers_are_within_and_a_gain_is_beyond(n, tail):
    rng = np.random.default_rng(n)
    x = np.sign(rng.normal(size=n)) * np.abs(rng.normal(size=n)) ** tail
    scale = np.linalg.norm(x) / np.sqrt(n)
    a, b = (rounded(x * (1 + 2.0**-8 * rng.uniform(-0.5, 0.5, n)) + 1e-7 * scale * rng.normal(size=n)) for _ in "ab")
    assert by_statistics(statistics_of(a), statistics_of(b), n, BFLOAT16).times <= 1
    assert by_elements(a, b, BFLOAT16, within=False).times <= 1
    wrong = rounded(b * 1.05)
    assert by_statistics(statistics_of(a), statistics_of(wrong), n, BFLOAT16).times > 2
    assert by_elements(a, wrong, BFLOAT16, within=False).times > 2


def test_counts_of_zeros_and_histograms_tell_what_norms_do_not():
    rng = np.random.default_rng(0)
    x = rng.normal(size=100_000)
    a, b = (rounded(x * (1 + 1e-6 * rng.normal(size=x.size))) for _ in "ab")
    edges = np.linspace(-4, 4, 33)
    wrong = b.copy()
    wrong[np.argsort(np.abs(x))[5000:5060]] = 0

    def counted(x: np.ndarray) -> Counted:
        return Counted(float((x == 0).sum()), (edges, np.histogram(x.clip(-4, 4), edges)[0].astype(float)))

    norm = float(np.linalg.norm(a))
    assert by_counts(counted(a), counted(b), norm, x.size, BFLOAT16).times <= 1
    found = by_counts(counted(a), counted(wrong), norm, x.size, BFLOAT16)
    assert found.times > 1 and found.what == "count of zeros"
    spread = rounded(b + 0.05 * rng.choice([-1, 1], x.size))
    found = by_counts(counted(a), counted(spread)._replace(zeros=None), norm, x.size, BFLOAT16)
    assert found.times > 1 and found.what == "histogram"


class Part(nn.Module):
    """A small model whose middle may be of another format."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.mlp, self.head = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        return self.head(x + self.mlp(x.to(self.mlp[0].weight.dtype)).float()).square().mean()  # pyright: ignore


_SCALES = {"twice": 2.0, "scaled": 2.0**16, "unscaled": 2.0**32, "overflow": float("inf")}
_TAKEN = "; where the optimizer takes them, none is"


def part(folder, how: str = "", **plan) -> str:
    torch.manual_seed(0)
    model = Part()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if how == "half":
        model.mlp.half()
    if how == "last bit":
        with torch.no_grad():
            model.head.weight[0, 0] = torch.nextafter(model.head.weight[0, 0], torch.tensor(9.0))
    if how == "frozen":
        model.head.bias.requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    scale = _SCALES.get(how, 1.0)
    with trainprobe.watch(model, optimizer, output=folder, console=False, **plan) as probe:
        for _ in range(2):
            x = torch.randn(8, 16, generator=generator)
            with probe.step():
                optimizer.zero_grad()
                loss = model(x)
                (loss * scale if scale != 1 else loss).backward()
                for each in model.parameters() if how == "unscaled" else ():
                    each.grad /= scale  # pyright: ignore[reportOperatorIssue]
                optimizer.step()
    return str(folder)


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("twice", 2, "grad_output.0 is twice as large in B"),
        ("scaled", 2, "grad_output.0 is 65536 times as large in B, as by a loss scale of 2^16"),
        ("unscaled", 2, "grad_output.0 is 4294967296 times as large in B, as by a loss scale of 2^32"),
        ("overflow", 2, "grad_output.0: NaN or infinities in B alone"),
        ("frozen", 2, "head.bias has no gradient in B"),
        ("half", 1, "mlp is float32 in A and float16 in B"),
        ("last bit", 2, "Module.head.Linear.forward.0 (step 0, micro-batch 0, rank 0): the weights differ"),
    ],
)
def test_a_cause_is_said_in_the_first_line(tmp_path, capsys, how, code, said):
    plan = {"level": "L0", "summary": "both", "step": [0], "monitor": {"parameters": True, "gradients": True}}
    plan = {name: of for name, of in plan.items() if name != "monitor" or how == "frozen" or how in _SCALES}
    a, b = part(tmp_path / "a", **plan), part(tmp_path / "b", how, **plan)
    capsys.readouterr()
    assert main(["dump-compare", a, b]) == code
    lines = capsys.readouterr().out.splitlines()
    assert said in lines[0], lines[0]
    every = {"twice": "twice as large in B", "scaled": "loss scale of 2^16", "unscaled": f"loss scale of 2^32{_TAKEN}"}
    assert how not in every or re.search(f"all 8 gradients of parameters are .*{re.escape(every[how])}", lines[1]), lines[1]


def test_scaled_gradients_are_told_where_the_scaling_has_no_partner(tmp_path, capsys):
    plan = {"level": "mix", "summary": "both", "step": [0]}
    a, b = part(tmp_path / "a", **plan), part(tmp_path / "b", "scaled", **plan)
    capsys.readouterr()
    code, first = main(["dump-compare", a, b]), capsys.readouterr().out.splitlines()[0]
    assert code != 0 and "65536 times as large in B, as by a loss scale of 2^16" in first, (code, first)


def test_weights_that_a_step_before_has_rounded_are_no_other_weights(tmp_path, capsys):
    plan = {"level": "L0", "summary": "both", "step": [1]}
    a, b = part(tmp_path / "a", **plan), part(tmp_path / "b", "last bit", **plan)
    capsys.readouterr()
    assert main(["dump-compare", a, b]) == 1, capsys.readouterr().out
