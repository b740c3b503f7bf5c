"""What calls are given on one side alone, in another format or in a later step is the reason that is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import trainprobe
from trainprobe.cli import main

Middle = Callable[[Tensor], Any]


class Two(nn.Module):
    """Two layers with something between them."""

    def __init__(self, middle: Middle) -> None:
        super().__init__()
        self.a, self.middle, self.b = nn.Linear(8, 8), middle, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.middle(self.a(x)))


class Passing(nn.Module):
    """Gives what it is given, in a tuple of `count`."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Any:
        return (x * 1.0, *([x] * (self.count - 1)))


def batch_of(step: int, micro: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + micro))


def trained(
    folder: Path,
    middle: Middle = lambda x: x,
    *,
    batch: Callable[[int, int], Tensor] = batch_of,
    micros: Callable[[int], int] = lambda step: 1,
    frozen: bool = False,
    **plan: Any,
) -> str:
    torch.manual_seed(0)
    model = Two(middle)
    model.b.bias.requires_grad_(not frozen)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with trainprobe.watch(model, optimizer, output=folder, **plan) as probe:
        for step in range(2):
            batches = [batch(step, micro) for micro in range(micros(step))]
            with probe.step():
                optimizer.zero_grad()
                for x in batches:
                    model(x).square().sum().backward()
                optimizer.step()
    return str(folder)


@pytest.fixture
def compared(tmp_path, capsys):
    def run(a: dict[str, Any], b: dict[str, Any], **plan: Any) -> tuple[int, str]:
        folders = [trained(tmp_path / side, **how, **plan) for side, how in (("a", a), ("b", b))]
        capsys.readouterr()
        return main(["dump-compare", *folders]), capsys.readouterr().out

    return run


class Larger(torch.autograd.Function):
    """Gives what it is given, and a gradient that is half as large again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 1.5


@pytest.mark.parametrize("rounding", [0.0, 1e-6])
def test_a_gradient_that_no_module_shows_is_named_where_it_is_given_to_one(compared, rounding):
    """Also where the forwards before are apart by rounding. A module that shows its own gradient speaks for those within it."""
    middles = lambda x: x.clone(), lambda x: Larger.apply(x * (1 + rounding))
    code, said = compared({"middle": middles[0]}, {"middle": middles[1]}, level="L0")
    assert code == 2, said
    assert "difference is at Module.a.Linear.backward.0 (step 0, micro-batch 0, rank 0): it is given something else" in said


def attention(x: Tensor, **how: Any) -> Tensor:
    return functional.scaled_dot_product_attention(x[None], x[None], x[None], **how)[0]


def masked(x: Tensor) -> Tensor:
    return attention(x, attn_mask=torch.ones(4, 4, dtype=torch.bool).tril())


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (masked, "attn_mask is given in B alone"),
        (lambda x: attention(x, is_causal=True), "is_causal is True in B and not given in A"),
    ],
)
def test_what_only_one_side_gives_is_the_reason(compared, other, reason):
    code, said = compared({"middle": attention}, {"middle": other}, level="mix", summary="both")
    assert code == 2
    assert f"Functional.scaled_dot_product_attention.0.forward (step 0, micro-batch 0, rank 0): {reason}, output is" in said


def test_an_argument_that_is_given_by_place_and_by_keyword_is_told_once_it_differs(compared):
    positional, keyword = ({"middle": m} for m in (lambda x: x.clamp(-1.0), lambda x: x.clamp(min=0.1)))
    code, said = compared(positional, keyword, level="L1")
    assert code == 2 and "argument 1 is -1.0 in A, min is 0.1 in B" in said


@pytest.mark.parametrize("plan", [{"level": "mix", "summary": "both"}, {"level": "mix", "task": "tensor"}])
def test_equal_numbers_in_another_format_are_no_full_agreement(compared, plan):
    wide, narrow = ({"middle": lambda x, t=t: x + torch.arange(4, dtype=t)[:, None]} for t in (torch.int64, torch.int32))
    code, said = compared(wide, narrow, **plan)
    assert code == 1
    assert "the first is output of Torch.arange.0.forward (step 0, micro-batch 0, rank 0): int64 in A and int32 in B" in said


def test_a_result_that_one_side_lacks_is_no_pass(compared):
    one, two = ({"middle": nn.Sequential(Passing(n), First())} for n in (1, 2))
    code, said = compared(one, two, level="L0")
    assert code == 3, said
    assert "2 results have no partner; the first is output.1 of Module.middle.0.Passing.forward.0" in said


class First(nn.Module):
    def forward(self, x: Any) -> Tensor:
        return x[0] if isinstance(x, tuple) else x


def test_a_gradient_that_one_side_lacks_is_no_pass(compared):
    code, said = compared({}, {"frozen": True}, level="L0", step=[0])
    assert code == 3, said
    assert "bias of Module.b.Linear.parameters_grad.0 (step 0, micro-batch 0, rank 0), in A alone" in said


@pytest.mark.parametrize("plan", [{"level": "L0"}, {"level": "mix"}, {"level": "mix", "summary": "both"}])
def test_tensors_without_elements_agree(compared, plan):
    nothing = {"batch": lambda step, micro: torch.ones(0, 8)}
    code, said = compared(nothing, nothing, **plan)
    assert code == 0, said


def test_a_micro_batch_more_is_followed_by_other_weights(compared):
    code, said = compared({}, {"micros": lambda step: 2 - step}, level="L0")
    assert code == 2
    assert "Module.a.Linear.forward.0 (step 1, micro-batch 0, rank 0): the weights differ, parameters.weight is" in said


@pytest.mark.parametrize("plan", [{"level": "L0"}, {"level": "mix"}, {"level": "mix", "task": "tensor"}])
def test_rounding_in_one_step_explains_no_other_batch_in_the_next(compared, plan):
    def rounded(x: Tensor) -> Tensor:
        return x * (1 + 2.0**-22)

    later = {"middle": rounded, "batch": lambda step, micro: batch_of(step, micro) + step}
    code, said = compared({"middle": lambda x: x * 1.0}, later, **plan)
    assert code == 2
    assert "Module.root.Two.forward.0 (step 1, micro-batch 0, rank 0): it is given something else, input.0 is" in said


def test_weights_that_rounding_moved_apart_are_no_bug_of_the_model_that_holds_them(compared):
    def rounded(x: Tensor) -> Tensor:
        return x * (1 + 2.0**-20)

    def growing(step: int, micro: int) -> Tensor:
        return 3 * batch_of(step, micro)

    code, said = compared({"middle": lambda x: x * 1.0, "batch": growing}, {"middle": rounded, "batch": growing}, level="L0")
    assert code == 1, said


class Attending(nn.Module):
    """Its attention uses the weights of a projection without calling it as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x)[0]


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_gradients_of_a_module_that_is_never_called_are_carried_by_the_one_that_uses_it(compared, level):
    torch.manual_seed(1)
    middle = Attending()
    same, other = {"middle": middle}, {"middle": deepcopy(middle), "batch": lambda *at: batch_of(*at) * 1.001}
    _, said = compared(same, other, level=level)
    assert "carried" in said and " bug" not in said.partition("calls:")[2].splitlines()[0]


@pytest.mark.parametrize(
    ("noise", "bits", "code"), [(1e-6, "", 1), (0.0, "", 2), (1e-6, "00ff00ff00ff00ff", 2)], ids=["noise", "none", "bits"]
)
def test_whole_numbers_of_which_only_statistics_are_known_may_be_another_choice(tmp_path, capsys, noise, bits, code):
    """Where nothing was apart before, or their bits are the same, they are the same and the result is a bug."""

    def leaf(dtype: str, mean: float, bits: str = "") -> dict[str, Any]:
        numbers = {"Max": 1.0, "Min": 0.0, "Mean": mean, "Norm": 2.0}
        about = {"type": "torch.Tensor", "dtype": dtype, "shape": [4, 4], "requires_grad": False}
        return {**about, **numbers, **({"checksum": bits} if bits else {})}

    for side, more in (("a", 0.0), ("b", 1.0)):
        chosen = leaf("torch.int64", 0.25, bits)
        far = leaf("torch.float32", 0.5 * (1 + noise * more))
        data = {
            "Functional.linear.0.forward": {"input_args": [leaf("torch.float32", 0.5)], "input_kwargs": {}, "output": [far]},
            "Tensor.sum.0.forward": {
                "input_args": [chosen],
                "input_kwargs": {},
                "output": [leaf("torch.int64", 0.25 + 0.1 * more)],
            },
        }
        (tmp_path / side).mkdir()
        (tmp_path / side / "dump.json").write_text(json.dumps({"framework": "pytorch", "level": "L1", "data": data}))
    assert main(["dump-compare", "-q", str(tmp_path / "a"), str(tmp_path / "b")]) == code, capsys.readouterr().out
