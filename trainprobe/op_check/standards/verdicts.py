"""The verdict of a standard, and the first verdict of mindstudio-probe's accuracy check, from the metrics of a result."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from trainprobe.op_check.standards.limits import (
    EIGHT_BITS,
    LIMITS,
    RATIOS,
    SMALL_SHARE_RATIO,
    THOUSANDTH,
    ULP_MEAN,
    ULP_SHARE,
    ULP_SHARE_ELSE,
    level,
)
from trainprobe.op_check.standards.metrics import Metrics

PASS, WARNING, ERROR, SKIP = "pass", "warning", "error", "SKIP"


@dataclass(frozen=True, slots=True)
class StandardVerdict:
    """status: pass, warning, error or SKIP. reason: what is not met, or why there is no verdict. standard: that judged."""

    status: str
    reason: str = ""
    standard: str = ""


def ratios(a: Metrics, b: Metrics, dtype: torch.dtype) -> dict[str, float]:
    """Return the errors of a result over those of a second one, by the names of the metrics."""
    floor = LIMITS[dtype].ratio_floor
    names = ("small_wrong", "rmse", "largest_relative", "mean_relative", "balance", "ulp_share")
    return {name: (getattr(a, name) or 0.0) / max(getattr(b, name) or 0.0, floor) for name in names}


def by_standard(standard: str, name: str, dtype: torch.dtype, a: Metrics, b: Metrics | None) -> StandardVerdict:
    """Judge a result by one of the six. name: of the operator. b: a second result of the same inputs, None without one."""
    if not dtype.is_floating_point:
        standard = "binary"
    if standard == "binary":
        return _verdict(standard, [("share of unequal elements", a.unequal or 0.0, 0.0)])
    if dtype in EIGHT_BITS and standard == "ulp":
        return _verdict(standard, [("share of errors above 1 ULP", a.ulp_share or 0.0, _below(ULP_SHARE_ELSE))])
    if dtype not in LIMITS:
        return StandardVerdict(SKIP, f"the {standard} standard has no limits for {dtype}", standard)
    if standard == "benchmark" and b is None:
        return StandardVerdict(SKIP, "there is no second result of the same inputs", standard)
    return _JUDGES[standard](name, dtype, a, b)


def _absolute(name: str, dtype: torch.dtype, a: Metrics, b: Metrics | None) -> StandardVerdict:
    return _verdict("absolute", _three(a.not_finite, a.relative_wrong, a.small_wrong))


def _accumulative(name: str, dtype: torch.dtype, a: Metrics, b: Metrics | None) -> StandardVerdict:
    checks = _three(a.not_finite, a.accumulated_relative, a.accumulated_small)
    return _verdict("accumulative", [*checks, ("error balance", a.balance or 0.0, LIMITS[dtype].balance)])


def _three(not_finite: float | None, relative: float | None, small: float | None) -> list[tuple[str, float, float]]:
    names = ("share of NaN and infinities that do not belong", "share of relative errors", "share of errors of small values")
    return [(name, value or 0.0, 0.0) for name, value in zip(names, (not_finite, relative, small), strict=True)]


def _thousandth(name: str, dtype: torch.dtype, a: Metrics, b: Metrics | None) -> StandardVerdict:
    share = 1.0 if a.thousandth is None else a.thousandth
    if share >= THOUSANDTH:
        return StandardVerdict(PASS, "", "thousandth")
    return StandardVerdict(ERROR, f"share of elements within a thousandth is {share:.6g}, below {THOUSANDTH}", "thousandth")


def _ulp(name: str, dtype: torch.dtype, a: Metrics, b: Metrics | None) -> StandardVerdict:
    """Pass if one of the conditions holds, and NaN and infinities are where they belong."""
    share, limit = a.ulp_share or 0.0, ULP_SHARE.get(dtype, ULP_SHARE_ELSE)
    if a.not_finite:
        return _verdict("ulp", _three(a.not_finite, 0.0, 0.0)[:1])
    if share < limit or (dtype == torch.float32 and (a.ulp_mean or 0.0) < ULP_MEAN):
        return StandardVerdict(PASS, "", "ulp")
    if b is None:
        return StandardVerdict(SKIP, "above the limits of one result, and there is no second one", "ulp")
    if ratios(a, b, dtype)["ulp_share"] < 1.0:
        return StandardVerdict(PASS, "", "ulp")
    return StandardVerdict(
        ERROR, f"share of errors above {LIMITS[dtype].ulps:g} ULP is {share:.6g}, and not below the second's", "ulp"
    )


def _benchmark(name: str, dtype: torch.dtype, a: Metrics, b: Metrics | None) -> StandardVerdict:
    assert b is not None  # by_standard has said so
    found = ratios(a, b, dtype)
    rmse, largest, mean = RATIOS[level(name)]
    return _verdict(
        "benchmark",
        [
            ("share of NaN and infinities that do not belong", a.not_finite or 0.0, b.not_finite or 0.0),
            ("small values, over the second's", found["small_wrong"], SMALL_SHARE_RATIO),
            ("RMSE, over the second's", found["rmse"], rmse),
            ("largest relative error, over the second's", found["largest_relative"], largest),
            ("mean relative error, over the second's", found["mean_relative"], mean),
        ],
    )


_JUDGES = {
    "absolute": _absolute,
    "accumulative": _accumulative,
    "thousandth": _thousandth,
    "ulp": _ulp,
    "benchmark": _benchmark,
}


def _verdict(standard: str, checks: list[tuple[str, float, float]]) -> StandardVerdict:
    """Return pass, or an error with each number that is above its limit."""
    above = [f"{name} is {value:.6g}, above {limit:.6g}" for name, value, limit in checks if value > limit]
    return StandardVerdict(ERROR if above else PASS, "; ".join(above), standard)


def _below(limit: float) -> float:
    """Return the largest number that is smaller than a limit which has to be undercut."""
    return math.nextafter(limit, 0.0)


def first_verdict(dtype: torch.dtype, a: Metrics, elements: int) -> StandardVerdict:
    """Return the Status of the details file: by cosine, largest error, and shares of relative errors, in this order."""
    if elements == 0:
        return StandardVerdict(SKIP, "the result has no elements")
    if not dtype.is_floating_point:
        return by_standard("binary", "", dtype, a, None)
    if a.cosine is not None and a.cosine <= 0.99:
        return StandardVerdict(ERROR, f"cosine is {a.cosine:.6g}, not above 0.99")
    if a.not_finite:
        return StandardVerdict(ERROR, f"{a.not_finite:.6g} of the NaN and infinities do not belong there")
    if a.largest is not None and a.largest < 1e-3:
        return StandardVerdict(PASS, "largest error below 0.001")
    half = dtype in (torch.float16, torch.bfloat16)
    shares = (a.hundredth, a.thousandth) if half else (a.thousandth, a.ten_thousandth)
    if None in shares:
        return StandardVerdict(SKIP, f"there are no limits for {dtype}")
    for limit, share, status in zip((1e-2, 1e-3) if half else (1e-3, 1e-4), shares, (ERROR, WARNING), strict=True):
        if share is not None and not share > 1 - limit:
            return StandardVerdict(status, f"share of relative errors below {limit} is {share:.6g}")
    return StandardVerdict(PASS)
