"""Averages over windows, adaptive ones too, and the gradients of interpolation: one matrix for each dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainprobe.op_check.double_double import arithmetic
from trainprobe.op_check.double_double.arithmetic import Pair, constant, exactly
from trainprobe.op_check.double_double.products import product
from trainprobe.op_check.double_double.rules import Numbers, added_at_places, pair_of, rule, whole_below


def _along(x: Pair, matrices: Sequence[Pair]) -> Pair:
    """Return x with its last dimensions multiplied by a matrix each, [in, out]."""
    for dim, matrix in enumerate(matrices, start=x[0].ndim - len(matrices)):
        moved = tuple(t.movedim(dim, -1) for t in x)
        rows = product((moved[0].flatten(0, -2), moved[1].flatten(0, -2)), matrix)
        x = tuple(t.reshape(*moved[0].shape[:-1], -1).movedim(-1, dim) for t in rows)  # pyright: ignore[reportAssignmentType]
    return x


def _transposed(matrices: Sequence[Pair]) -> list[Pair]:
    return [(high.mT, low.mT) for high, low in matrices]


def _each(x: Any, n: int) -> list[int]:
    return [x] * n if isinstance(x, int) else [*x] * (n if len(x) == 1 else 1)


class _Average:
    """An average over windows: which numbers each window sees, and by how much their sum is divided."""

    def __init__(
        self, shape: Sequence[int], n: int, kernel: Any, stride: Any, padding: Any, ceil: bool, all_count: bool
    ) -> None:
        self.matrices: list[Pair] = []
        divisor = torch.ones((), dtype=torch.float64)
        kernels = _each(kernel, n)
        strides = kernels if stride is None or stride == [] else _each(stride, n)
        for size, k, s, p in zip(shape[-n:], kernels, strides, _each(padding, n), strict=True):
            out = (size + 2 * p - k + (s - 1 if ceil else 0)) // s + 1
            out -= ceil and (out - 1) * s >= size + p
            begin = torch.arange(out) * s - p
            end = (begin + k).clamp_max(size + p)
            first, last = begin.clamp_min(0), end.clamp_max(size)
            place = torch.arange(size).unsqueeze(1)
            self.matrices.append(exactly(((place >= first) & (place < last)).to(torch.float64)))
            divisor = divisor.unsqueeze(-1) * ((end - begin) if all_count else (last - first)).to(torch.float64)
        self.divisor = divisor


def _averaged(n: int) -> tuple[Callable[..., Numbers], Callable[..., Numbers]]:
    def forward(
        func: Any, x: Any, kernel: Any, stride: Any = None, padding: Any = 0, ceil: Any = False, all: Any = True, by: Any = None
    ) -> Numbers:
        average = _Average(x[0].shape, n, kernel, stride, padding, ceil, all)
        divisor = exactly(average.divisor) if by is None else constant(float(by))
        return Numbers(arithmetic.divide(_along(x, average.matrices), divisor))

    def backward(func: Any, g: Any, x: Any, kernel: Any, stride: Any, padding: Any, ceil: bool, all: bool, by: Any) -> Numbers:
        average = _Average(pair_of(x)[0].shape, n, kernel, stride, padding, ceil, all)
        divisor = exactly(average.divisor) if by is None else constant(float(by))
        return Numbers(_along(arithmetic.divide(pair_of(g), divisor), _transposed(average.matrices)))

    return forward, backward


for _n in (2, 3):
    _forward, _backward = _averaged(_n)
    rule(f"avg_pool{_n}d")(_forward)
    rule(f"avg_pool{_n}d_backward")(_backward)


def _adaptive(shape: Sequence[int], out: Sequence[int]) -> list[Pair]:
    found: list[Pair] = []
    for size, count in zip(shape[-len(out) :], out, strict=True):
        number = torch.arange(count)
        first, last = number * size // count, -((-(number + 1) * size) // count)
        place = torch.arange(size).unsqueeze(1)
        seen = ((place >= first) & (place < last)).to(torch.float64)
        found.append(arithmetic.divide(exactly(seen), exactly((last - first).to(torch.float64))))
    return found


@rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def _adaptive_average(func: Any, x: Any, out: Sequence[int]) -> Numbers:
    return Numbers(_along(x, _adaptive(x[0].shape, out)))


@rule("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward")
def _of_adaptive_average(func: Any, g: Any, x: Any) -> Numbers:
    n = 2 if "2d" in func.overloadpacket.__name__ else 3
    g = pair_of(g)
    return Numbers(_along(g, _transposed(_adaptive(pair_of(x)[0].shape, g[0].shape[-n:]))))


_CUBIC = -0.75
_BY_MODE = {"linear1d": 1, "bilinear2d": 2, "trilinear3d": 3, "bicubic2d": 2}


def _interpolating(mode: str, size: int, out: int, align: bool, factor: float | None) -> Pair:
    """Return the matrix [in, out] of linear or cubic interpolation along one dimension."""
    number = torch.arange(out, dtype=torch.float64)
    if align:
        step = arithmetic.divide(constant(float(size - 1)), constant(float(out - 1))) if out > 1 else constant(0.0)
        source = arithmetic.multiply(exactly(number), step)
    else:
        given = factor is not None and factor > 0
        step = arithmetic.divide(constant(1.0 if given else float(size)), constant(float(factor) if given else float(out)))  # pyright: ignore[reportArgumentType]
        source = arithmetic.subtract(arithmetic.multiply(exactly(number + 0.5), step), constant(0.5))
    if mode != "bicubic2d":
        source = arithmetic.chosen(source[0] < 0, exactly(torch.zeros_like(number)), source)
    below = whole_below(source)
    rest = arithmetic.subtract(source, exactly(below))
    parts = _cubic(rest) if mode == "bicubic2d" else [arithmetic.subtract(constant(1.0), rest), rest]
    total = exactly(torch.zeros(size, out, dtype=torch.float64))
    for i, part in enumerate(parts):
        place = (below.to(torch.int64) + i - (1 if mode == "bicubic2d" else 0)).clamp(0, size - 1)
        here = torch.nn.functional.one_hot(place, size).mT.to(torch.float64)
        total = arithmetic.add(total, (here * part[0], here * part[1]))
    return total


def _cubic(t: Pair) -> list[Pair]:
    """Return the weights of the four neighbours by the distance from the second: Keys' kernel with a = −0.75."""

    def of(*coefficients: float) -> Pair:
        found = constant(coefficients[0])
        for c in coefficients[1:]:
            found = arithmetic.add(arithmetic.multiply(found, t), constant(c))
        return found

    a = _CUBIC
    return [of(a, -2 * a, a, 0), of(a + 2, -(a + 3), 0, 1), of(-(a + 2), 2 * a + 3, -a, 0), of(-a, a, 0, 0)]


@rule(*(f"upsample_{mode}_backward" for mode in _BY_MODE))
def _of_interpolation(func: Any, g: Any, out: Sequence[int], size: Sequence[int], align: bool, *factors: Any) -> Numbers:
    mode = func.overloadpacket.__name__.removeprefix("upsample_").removesuffix("_backward")
    n = _BY_MODE[mode]
    given = [*factors, *[None] * n][:n]
    each = zip(size[-n:], out[-n:], given, strict=True)
    return Numbers(_along(g, [(h.mT, low.mT) for h, low in (_interpolating(mode, s, o, align, f) for s, o, f in each)]))


@rule(*(f"{kind}{n}d_backward" for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)))
def _of_nearest(func: Any, g: Any, out: Sequence[int], size: Sequence[int], *factors: Any) -> Numbers:
    forward = getattr(torch.ops.aten, func.overloadpacket.__name__.removesuffix("_backward"))
    numbered = torch.arange(math.prod(size), dtype=torch.float64).view(*size)
    places = forward(numbered, out, *factors).to(torch.int64)
    return added_at_places(exactly(torch.zeros(*size, dtype=torch.float64)), places, g)


@rule("replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward")
def _of_replication(func: Any, g: Any, x: Any, padding: Sequence[int]) -> Numbers:
    forward = getattr(torch.ops.aten, func.overloadpacket.__name__.removesuffix("_backward"))
    zeros = torch.zeros_like(pair_of(x)[0])
    numbered = torch.arange(zeros.numel(), dtype=torch.float64).view(zeros.shape)
    return added_at_places(exactly(zeros), forward(numbered, padding).to(torch.int64), g)


def _chosen_by(func: Any, x: Any, *given: Any) -> Any:
    if bool((x[1] != 0).any()):
        raise NotImplementedError(f"{func.overloadpacket.__name__} of rounded numbers")
    found, places = func(x[0], *given)
    return Numbers(exactly(found)), places


rule("adaptive_max_pool2d", "adaptive_max_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices")(_chosen_by)


@rule(
    *("adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward", "max_pool2d_with_indices_backward"),
    "max_pool3d_with_indices_backward",
)
def _of_largest(func: Any, g: Any, x: Any, *given: Any) -> Numbers:
    zeros, places = torch.zeros_like(pair_of(x)[0]), given[-1]
    n = 2 if "2d" in func.overloadpacket.__name__ else 3
    image = math.prod(zeros.shape[-n:])
    first = (torch.arange(zeros.numel() // max(1, image)) * image).view(*zeros.shape[:-n], *[1] * n)
    return added_at_places(exactly(zeros), places + first, pair_of(g))
