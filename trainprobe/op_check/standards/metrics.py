"""The numbers that the six standards judge by: one result of a device against its float64 reference."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from trainprobe.op_check.cases import Tensor
from trainprobe.op_check.standards.limits import EIGHT_BITS, LIMITS, SMALL_WHEN_ACCUMULATED


@dataclass(frozen=True, slots=True)
class Metrics:
    """Errors of one result. A number is None where the format has no such metric, or there is no element to tell it from.

    A NaN or an infinity that the reference, rounded to the format of the result, has too is no error. All others count in
    `unequal`, `not_finite` and the shares, and no mean takes them in.
    """

    cosine: float | None = None
    largest: float | None = None  # |error|
    hundredth: float | None = None  # share of elements with a smaller relative error
    thousandth: float | None = None
    ten_thousandth: float | None = None
    unequal: float | None = None  # share of elements that are not the rounded reference
    balance: float | None = None  # |elements above − elements below| / elements
    rmse: float | None = None  # of what is not small
    small_wrong: float | None = None  # share of the small elements that are off by more than atol
    largest_relative: float | None = None  # of what is not small
    mean_relative: float | None = None
    not_finite: float | None = None  # share of the NaN and infinite elements that do not belong there
    relative_wrong: float | None = None  # share of what is not small that is off by more than rtol
    ulp_largest: float | None = None
    ulp_mean: float | None = None
    ulp_share: float | None = None  # off by more ULPs than the limit
    accumulated_relative: float | None = None  # as relative_wrong and small_wrong, by the accumulative standard
    accumulated_small: float | None = None


def measure(y: Tensor, reference: Tensor) -> Metrics:
    """Return the metrics of a result. reference: of the same shape, float64, or whole numbers where the result is one."""
    if not y.is_floating_point():
        return Metrics(unequal=_share(y != reference.to(y.dtype)))
    y, reference = y.reshape(-1), reference.reshape(-1).to(torch.float64)
    rounded, got = reference.to(y.dtype).to(torch.float64), y.to(torch.float64)
    same = (got == rounded) | (got.isnan() & rounded.isnan())
    finite = got.isfinite() & rounded.isfinite()
    unequal = _share(~same)
    error = torch.where(finite, (got - reference).abs(), torch.where(same, 0.0, math.inf))
    ulps = _ulps(error, reference, y.dtype)
    if y.dtype in EIGHT_BITS:
        return Metrics(unequal=unequal, ulp_share=_share(ulps > 1.0), ulp_largest=_most(ulps), ulp_mean=_mean(ulps[finite]))
    relative = torch.where(error == 0, 0.0, error / reference.abs())
    known = Metrics(
        cosine=_cosine(got[finite], rounded[finite]),
        largest=_most(error),
        hundredth=_share(relative < 1e-2, empty=1.0),
        thousandth=_share(relative < 1e-3, empty=1.0),
        ten_thousandth=_share(relative < 1e-4, empty=1.0),
        unequal=unequal,
        balance=abs(_share(got > rounded) - _share(got < rounded)),
        not_finite=_share(~_same_beyond(got, rounded, y.dtype)[~finite]),
        ulp_largest=_most(ulps),
        ulp_mean=_mean(ulps[finite]),
    )
    limits = LIMITS.get(y.dtype)
    if limits is None:
        return known
    size = reference.abs()
    small, far = finite & (size <= limits.small), finite & (size > limits.small)
    summed_small, summed_far = finite & (size <= SMALL_WHEN_ACCUMULATED), finite & (size > SMALL_WHEN_ACCUMULATED)
    return replace(
        known,
        rmse=math.sqrt(_mean(error[far].square())),
        small_wrong=_share(error[small] > limits.atol),
        largest_relative=_most(relative[far]),
        mean_relative=_mean(relative[far]),
        relative_wrong=_share(relative[far] > limits.rtol),
        ulp_share=_share(ulps > limits.ulps),
        accumulated_relative=_share(relative[summed_far] > limits.bound),
        accumulated_small=_share(error[summed_small] > limits.bound),
    )


def _same_beyond(got: Tensor, rounded: Tensor, dtype: torch.dtype) -> Tensor:
    """Return where two numbers agree when infinities count as the largest finite number."""
    most = torch.finfo(dtype).max
    a, b = got.clamp(-most, most), rounded.clamp(-most, most)
    rtol = LIMITS[dtype].rtol if dtype in LIMITS else torch.finfo(dtype).eps
    return ((a - b).abs() <= rtol * b.abs()) | (a.isnan() & b.isnan())


def _ulps(error: Tensor, reference: Tensor, dtype: torch.dtype) -> Tensor:
    """Return errors in units of the last place that the format has at the reference."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(reference)[1].to(torch.float64) - 1
    least = math.log2(info.smallest_normal)
    exponent = torch.where(reference == 0, least, exponent.clamp(least, math.log2(info.max)))
    return torch.where(error == 0, 0.0, error * torch.exp2(-exponent) / info.eps)


def _cosine(got: Tensor, reference: Tensor) -> float | None:
    """Return the cosine of two vectors, 0 where one of them is zero; None of less than two numbers, or where both are zero."""
    if got.numel() < 2:
        return None
    sizes = [float(t.abs().max()) for t in (got, reference)]
    if not all(sizes):
        return 0.0 if any(sizes) else None
    a, b = got / sizes[0], reference / sizes[1]
    return max(-1.0, min(1.0, float(torch.dot(a, b) / (a.norm() * b.norm()))))


def _share(chosen: Tensor, empty: float = 0.0) -> float:
    return int(chosen.sum()) / chosen.numel() if chosen.numel() else empty


def _most(numbers: Tensor) -> float:
    return float(numbers.max()) if numbers.numel() else 0.0


def _mean(numbers: Tensor) -> float:
    return float(numbers.mean()) if numbers.numel() else 0.0
