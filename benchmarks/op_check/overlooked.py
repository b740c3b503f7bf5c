"""Faults that the judge once passed and right calls that it once accused, each fault with a healthy twin.

`python -m benchmarks.op_check.overlooked` prints what the judge says of each. Each case has
the outcomes that are right for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks.op_check.planted import randn, whole
from trainprobe.op_check.cases import Case, Tensor, flat
from trainprobe.op_check.check import Checked, check

BF, HALF = torch.bfloat16, torch.float16
FAULTS: dict[str, tuple[Case, frozenset[str]]] = {}
TWINS: dict[str, tuple[Case, frozenset[str]]] = {}
_WRONG = frozenset({"bug"})
_RIGHT = frozenset({"exact", "rounding", "unspecified"})


def judged(case: Case) -> Checked:
    """Return what op_check says of a call."""
    return check(case)


def _case(entry: str, args: Any, kernel: Callable[..., Any], **named: Any) -> Case:
    kept = [a.clone() if isinstance(a, Tensor) else a for a in args]
    return Case(entry, tuple(kept), named, [*flat([kernel(*args, **named)])])


def _add(
    name: str, entry: str, args: Any, broken: Any, right: Any, wants: Any = _WRONG, fine: Any = _RIGHT, **named: Any
) -> None:
    FAULTS[name] = _case(entry, args, broken, **named), frozenset(wants)
    TWINS[name] = _case(entry, args, right, **named), frozenset(fine)


# ---- scatters with repeated indices: which of the values stays is free, another value is not --------------------------------

PLACES = whole(6, 40, seed=3)
VALUES = randn(40, seed=4)


def _backwards(base: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return base.scatter(dim, index.flip(0), source.flip(0))


def _sums(base: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return base.scatter_add(dim, index, source)


_add("a scatter adds where it should write", "Torch.scatter", (torch.zeros(8), 0, PLACES, VALUES), _sums, _backwards)
_add(
    "an index_copy writes another row",
    "Torch.index_copy",
    (torch.zeros(8, 3), 0, PLACES, randn(40, 3, seed=5)),
    lambda base, dim, index, source: base.index_copy(dim, index, source).roll(1, 0),
    lambda base, dim, index, source: base.index_copy(dim, index.flip(0), source.flip(0)),
)
_add(
    "an index_put leaves a place unwritten",
    "Torch.index_put",
    (torch.zeros(8), (PLACES,), VALUES),
    lambda base, index, source: base.index_put((index[0].clamp_max(4),), source),
    lambda base, index, source: base.index_put((index[0].flip(0),), source.flip(0)),
)


# ---- order, signs of zeros --------------------------------------------------------------------------------------------------

TIED = whole(4, 64, seed=6).float()


def _unstable(x: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    order = torch.sort(x.flip(0), stable=True).indices
    order = len(x) - 1 - order
    return x[order], order


_add("a stable sort turns ties round", "Torch.sort", (TIED,), _unstable, torch.sort, stable=True)
_add("a stable argsort turns ties round", "Torch.argsort", (TIED,), lambda x, **_: _unstable(x)[1], torch.argsort, stable=True)
ZEROS = torch.tensor([0.0, -0.0, 1.0, -2.0, -0.0])
_add("neg loses the sign of zero", "Torch.neg", (ZEROS,), lambda x: -x + 0.0, torch.neg)
_add("cat loses the sign of zero", "Torch.cat", ([ZEROS, ZEROS],), lambda x: torch.cat(x) + 0.0, torch.cat)
_add("mul loses the sign of zero", "Torch.mul", (ZEROS, -randn(5).abs()), lambda x, y: x * y + 0.0, torch.mul)
_add("a cast loses the sign of zero", "Tensor.to", (ZEROS, BF), lambda x, d: (x + 0.0).to(d), lambda x, d: x.to(d))
_add(
    "sqrt loses the sign of zero",
    "Torch.sqrt",
    (ZEROS.clamp_min(-0.0).abs() * torch.tensor([1.0, -1, 1, 1, -1]),),
    lambda x: x.sqrt() + 0.0,
    torch.sqrt,
)

# ---- steps inside that are rounded to 16 bits -------------------------------------------------------------------------------

WIDE = randn(64, 256, seed=7, scale=3.0)
_INSIDE = frozenset({"mode", "suspicious", "bug"})


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x.float()).to(x.dtype)


def _gelu(x: Tensor) -> Tensor:
    half = ((1 + torch.erf(x.float() * 0.5**0.5)) * 0.5).to(x.dtype)
    return x * half


def _softmax(x: Tensor, dim: int) -> Tensor:
    powers = torch.exp(x.float() - x.float().amax(dim, True)).to(x.dtype)
    return (powers.float() / powers.float().sum(dim, True)).to(x.dtype)


for low, short in ((BF, "bfloat16"), (HALF, "float16")):
    _add(f"silu rounds its sigmoid to {short}", "Functional.silu", (WIDE.to(low),), _silu, F.silu, _INSIDE)
    _add(f"gelu rounds its distribution to {short}", "Functional.gelu", (WIDE.to(low),), _gelu, F.gelu, _INSIDE)
    _add(f"softmax rounds its powers to {short}", "Functional.softmax", (WIDE.to(low), -1), _softmax, F.softmax, _INSIDE)

# ---- a result that is off as a whole ----------------------------------------------------------------------------------------

GAINS = (1.01, 1.03, 1.108, 0.9)
WEIGHT, BIAS = randn(256, seed=8), randn(256, seed=9)
for low, short in ((BF, "bfloat16"), (HALF, "float16")):
    for gain in GAINS:
        _add(
            f"layer_norm in {short} is {gain} times as large",
            "Functional.layer_norm",
            (WIDE.to(low), [256], WEIGHT.to(low), BIAS.to(low)),
            lambda *a, gain=gain: (F.layer_norm(*a).float() * gain).to(a[0].dtype),
            F.layer_norm,
        )
        _add(
            f"a linear layer in {short} is {gain} times as large",
            "Functional.linear",
            (WIDE.to(low), randn(48, 256, seed=1).to(low)),
            lambda *a, gain=gain: (F.linear(*a).float() * gain).to(a[0].dtype),
            F.linear,
        )


def _kept_in_16_bits(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
    for k in range(a.shape[1]):
        total = total + a[:, k : k + 1] * b[k : k + 1]
    return total


for low, short in ((BF, "bfloat16"), (HALF, "float16")):
    for sign, positive in (("any sign", False), ("positive", True)):
        left, right_ = randn(8, 4096, seed=10), randn(4096, 12, seed=11, scale=1 / 64)
        left, right_ = (left.abs(), right_.abs()) if positive else (left, right_)
        _add(
            f"a sum of 4,096 products of {sign} is kept in {short}",
            "Torch.matmul",
            (left.to(low), right_.to(low)),
            _kept_in_16_bits,
            torch.matmul,
            _WRONG if positive or low is BF else frozenset({"mode"}),  # of float16, 0.9 % off: within what a mode may be
        )


def main() -> None:
    """Print what is said of each, and the counts."""
    for title, cases in (("faults", FAULTS), ("twins", TWINS)):
        right = 0
        for name, (case, wants) in cases.items():
            found = judged(case).worst
            right += found.outcome in wants
            y, r = case.outputs[0], TWINS[name][0].outputs[0]
            assert y is not None and r is not None
            off = float((y.double() - r.double()).norm() / r.double().norm()) if y.is_floating_point() else 0.0
            print(f"{'  ' if found.outcome in wants else '! '}{name}: {found.outcome}, {off:.2%} off: {found.reason[:170]}")
        print(f"{title}: {right} of {len(cases)} as they should be")


if __name__ == "__main__":
    main()
