"""One recorded result against what it should have been: in one word, with the evidence.

With r the float64 result, u the rounding of the output's format and N the noise of a correct kernel at these inputs (noise.py),
an element y is q = |y − r| / (u |r| + least subnormal + N) bounds away.

    exact       the bits of the correctly rounded r; the only pass of an operator that makes no rounding
    rounding    q ≤ 4, and no bias; of 100,000 elements one may reach 8, as N is an estimate of its own
    suspicious  a bias within that bound: roundings to one side alone, or a gain that rounding does not explain; or
                4 < q ≤ 64 in at most one element of a thousand, or only in elements far below the tensor's scale
    bug         more, or a NaN, an infinity, a shape, a dtype, an integer or a bool that is not the expected one

docs/op_check.md shows how these limits were calibrated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from trainprobe.op_check.error_locations import Element, pattern, place_of
from trainprobe.op_check.evaluate import Expected
from trainprobe.op_check.measure import NEAR, Allowance, Sums, bounds, lost, measured
from trainprobe.op_check.noise import UNIT

Tensor = torch.Tensor
Outcome = Literal["exact", "rounding", "mode", "unspecified", "not checked", "suspicious", "bug"]
OUTCOMES: tuple[Outcome, ...] = ("exact", "rounding", "mode", "unspecified", "not checked", "suspicious", "bug")

FAR = 64.0  # bounds
FEW = 1e-3  # share of elements
EIGHT_BITS = {  # format → u
    getattr(torch, name): unit
    for name, unit in (
        *(("float8_e4m3fn", 2.0**-4), ("float8_e4m3fnuz", 2.0**-4), ("float8_e5m2", 2.0**-3), ("float8_e5m2fnuz", 2.0**-3)),
        ("float8_e8m0fnu", 0.5),
    )
    if hasattr(torch, name)
}
RARE = 1e-5  # share of elements for which the noise may be estimated at half of what it is
ONE_SIDED = 8.0  # standard deviations
MANY = 0.25  # share of elements
GROSS = 2.0**-7  # a gain that no format of 16 bits explains
FLIPPED = 0.05  # share of elements
_CONSTANT = 2.0**-24  # a kernel rounds plain numbers that it is given to float32, and with them all of its result
SMALL = 1e-3  # of the tensor's largest element


@dataclass(frozen=True, slots=True)
class Judgement:
    """What became of one output.

    reason: a sentence's end. worst: largest q. at: its place. got, want: the numbers there. share: of the elements beyond NEAR
    bounds, or for exact operators of those that differ. gain: ⟨y − r, r⟩ / ⟨r, r⟩. flips: share of elements that are not the
    correctly rounded value. one_sided: how unevenly they lie above and below it, in standard deviations. furthest: of a bug,
    the elements that are furthest off.
    """

    outcome: Outcome
    reason: str = ""
    worst: float = 0.0
    at: tuple[int, ...] | None = None
    got: float | None = None
    want: float | None = None
    share: float = 0.0
    gain: float = 0.0
    flips: float = 0.0
    one_sided: float = 0.0
    bound: float = 0.0
    count: int = 0
    furthest: tuple[Element, ...] = ()


def gravest(judgements: list[Judgement]) -> Judgement:
    """Return the gravest of several, `not checked` for none."""
    if not judgements:
        return Judgement("not checked", "it gave no tensor")
    return max(judgements, key=lambda j: (OUTCOMES.index(j.outcome), j.worst))


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What a user allows instead of the bound: |y − r| ≤ atol + rtol · |r|, as `torch.allclose` has it; NaN equals NaN."""

    atol: float
    rtol: float


def judge(y: Tensor, expected: Expected, tolerance: Tolerance | None = None, *, brief: bool = False) -> Judgement:
    """Judge one recorded tensor, any shape and dtype, against what it should be.

    tolerance: replaces the bound of floats. brief: leave out where the wrong elements lie.
    """
    r, given = expected.value, expected.given
    told = _without_its_numbers(y, r)
    if told is not None:
        return told
    if y.is_complex() and y.dtype in UNIT:
        return judge(torch.view_as_real(y.resolve_conj().resolve_neg()), _parts(y.dtype, expected), tolerance, brief=brief)
    if not y.is_floating_point() and not y.is_complex():
        return _whole_numbers(y, r)
    if y.dtype in EIGHT_BITS:
        return _eight_bits(y, r, expected.noise, tolerance, brief)
    if tolerance is not None:
        return _tolerated(y, r, tolerance)
    if y.dtype not in UNIT:
        return Judgement("not checked", f"{_name(y)} has no judge yet", count=y.numel())
    if given is None:
        return _without_rounding(y, r)
    noise = given if isinstance(given, Allowance) else Allowance.of(given)
    if y.dtype == torch.float64:  # the reference has an error of the same size
        own = 2 * noise.tensor + UNIT[y.dtype] * r.abs().nan_to_num(0, 0, 0)
        return _as_wide_as_the_reference(_floats(y, r, Allowance.of(own), brief), expected.source)
    return _floats(y, r, noise, brief, (expected.gain, expected.one_sided))


def _without_its_numbers(y: Tensor, r: Tensor) -> Judgement | None:
    """Judge shape, kind of numbers and emptiness; None where the elements have to be looked at."""
    if y.shape != r.shape:
        return Judgement("bug", f"its shape is {[*y.shape]} and not {[*r.shape]}", math.inf)
    if y.is_floating_point() != r.is_floating_point() or y.is_complex() != r.is_complex():
        return Judgement("bug", f"its dtype is {_name(y)}, where {_name(r)} comes out", math.inf)
    return Judgement("exact", "it has no elements") if y.numel() == 0 else None


def _parts(dtype: torch.dtype, expected: Expected) -> Expected:
    """Return real and imaginary parts, each of which may be off by the rounding of the whole."""
    r, noise = expected.value, expected.noise
    parts = torch.view_as_real(r.resolve_conj().resolve_neg())
    whole = None if noise is None else (noise + UNIT[dtype] * r.abs()).unsqueeze(-1).expand_as(parts)
    return Expected(parts, whole, source=expected.source)


def _eight_bits(y: Tensor, r: Tensor, noise: Tensor | None, tolerance: Tolerance | None, brief: bool) -> Judgement:
    """Judge an 8-bit format by its values, where a step rounds within its own rounding and the noise; no bias is looked for."""
    info = torch.finfo(y.dtype)
    values, nearest = y.to(torch.float32), r.to(torch.float32).to(y.dtype).to(torch.float32)
    same = (values == nearest) | (values.isnan() & nearest.isnan())
    if bool(same.all()):
        return Judgement("exact", count=y.numel())
    clipped = (r.abs() > info.max) & (values.abs() == info.max) & (values.sign() == r.sign()) & ~nearest.isfinite()
    if bool(clipped.any()):
        rest = _eight_bits(torch.where(clipped, 0.0, values).to(y.dtype), torch.where(clipped, 0.0, r), noise, tolerance, brief)
        text = f"{int(clipped.sum())} numbers beyond the range of {_name(y)} became the largest: a conversion that saturates"
        return replace(rest, outcome="mode", reason=text) if rest.outcome in ("exact", "rounding") else rest
    if noise is None and tolerance is None:
        wide = values.to(torch.float64)
        halfway = (wide - r).abs() == (nearest.to(torch.float64) - r).abs()
        if bool((same | halfway).all()):
            text = "numbers in the middle of two neighbours are rounded to the other one"
            return Judgement("rounding", text, count=y.numel(), flips=1 - float(same.sum()) / y.numel())
        return _inexact(values, wide, r, nearest, same)
    own = r.abs().nan_to_num(0, 0, 0) * EIGHT_BITS[y.dtype] + info.tiny * info.eps / 2 + (0.0 if noise is None else noise)
    inside = torch.where(r.abs() > info.max, nearest.to(torch.float64), r)  # some formats have no infinity, or none but NaN
    return judge(values, Expected(inside, own), tolerance, brief=brief)


def _as_wide_as_the_reference(found: Judgement, source: str) -> Judgement:
    """Claim no more than a float64 reference shows, which rounds itself, or may be the kernel that is judged."""
    if found.outcome != "exact" or source == "IEEE 754":
        return found
    if source == "formula":
        return replace(found, outcome="rounding")
    reason = "it has the bits of torch's own float64 kernel, and no formula says what is right"
    return replace(found, outcome="not checked", reason=reason)


def _name(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _whole_numbers(y: Tensor, r: Tensor) -> Judgement:
    wrong = y.to(torch.int64) != r.to(torch.int64)
    count = int(wrong.sum())
    if count == 0:
        return Judgement("exact", count=y.numel())
    at = place_of(int(wrong.reshape(-1).to(torch.int8).argmax()), y.shape)
    kind = "booleans" if y.dtype == torch.bool else "integers"
    reason = f"{count} of {y.numel()} {kind} differ{pattern(wrong)}"
    return Judgement("bug", reason, math.inf, at, float(y[at]), float(r[at]), count / y.numel(), count=y.numel())


def _without_rounding(y: Tensor, r: Tensor) -> Judgement:
    rounded = r.to(y.dtype)
    same = (y == rounded) | (y.isnan() & rounded.isnan())
    return Judgement("exact", count=y.numel()) if bool(same.all()) else _inexact(y, y.to(torch.float64), r, rounded, same)


def _floats(
    y: Tensor,
    r: Tensor,
    noise: Allowance,
    brief: bool,
    known: tuple[float, float] = (math.inf, math.inf),
) -> Judgement:
    n = y.numel()
    sums = measured(y, r, noise)
    if sums.same == n:
        return Judgement("exact", count=n)
    if sums.lost:
        return _misplaced(y, r, lost(y, r.to(y.dtype), r, bounds(y, r, noise.tensor)), brief)
    at = place_of(sums.index, y.shape)
    found = Judgement("rounding", "", sums.worst, at, float(y[at]), float(r[at]), sums.beyond / n)
    found = replace(found, bound=sums.bound, flips=1 - sums.same / n, count=n)
    if sums.unbounded * 2 > n:
        text = "at these inputs rounding alone may change most of the result beyond measure"
        return replace(found, outcome="not checked", reason=text)
    judged = _weighed(found, sums, y, r, noise, brief, *known)
    if judged.outcome == "rounding" and sums.overflown:
        text = f"{sums.overflown} of {n} elements are lost because an inner step leaves the range of {_name(y)}"
        return replace(judged, outcome="mode", reason=text)
    return judged


def _tolerated(y: Tensor, r: Tensor, tolerance: Tolerance) -> Judgement:
    """Judge by |y − r| ≤ atol + rtol · |r| with r rounded to the format of y."""
    wide, rounded = y.to(torch.float64), r.to(y.dtype).to(torch.float64)
    allowed = tolerance.atol + tolerance.rtol * rounded.abs()
    wrong = ~torch.isclose(wide, rounded, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True)
    count = int(wrong.sum())
    ratio = ((wide - rounded).abs() / allowed).nan_to_num(math.inf, math.inf, math.inf)
    if count == 0:
        return Judgement("rounding", f"within atol={tolerance.atol:g} and rtol={tolerance.rtol:g}", count=y.numel())
    at = place_of(int(torch.where(wrong, ratio, -1.0).argmax()), y.shape)
    text = f"{count} of {y.numel()} elements are beyond atol={tolerance.atol:g} and rtol={tolerance.rtol:g}{pattern(wrong)}"
    return Judgement("bug", text, float(ratio[at]), at, float(y[at]), float(rounded[at]), count / y.numel(), count=y.numel())


def _inexact(y: Tensor, wide: Tensor, r: Tensor, rounded: Tensor, same: Tensor) -> Judgement:
    """An operator that moves or chooses numbers gave others."""
    wrong = ~same
    count = int(wrong.sum())
    error = torch.where(wrong, (wide - r).abs(), 0.0).nan_to_num(math.inf, math.inf, math.inf)
    at = place_of(int(torch.where(wrong, error, -1.0).argmax()), y.shape)
    reason = f"{count} of {y.numel()} elements differ, and the operator makes no rounding{pattern(wrong)}"
    return Judgement("bug", reason, math.inf, at, float(y[at]), float(r[at]), count / y.numel(), count=y.numel())


def _misplaced(y: Tensor, r: Tensor, wrong: Tensor, brief: bool) -> Judgement:
    at = place_of(int(wrong.reshape(-1).to(torch.int8).argmax()), y.shape)
    count, nans, infinities = int(wrong.sum()), int((wrong & y.isnan()).sum()), int((wrong & y.isinf()).sum())
    kinds = [f"{nans} NaN" if nans else "", f"{infinities} infinities" if infinities else ""]
    finite = count - nans - infinities
    kinds.append(f"{finite} finite numbers where none belongs" if finite else "")
    reason = f"{', '.join(k for k in kinds if k)} in {y.numel()} elements{'' if brief else pattern(wrong)}"
    return Judgement("bug", reason, math.inf, at, float(y[at]), float(r[at]), count / y.numel(), count=y.numel())


def _weighed(
    found: Judgement, sums: Sums, y: Tensor, r: Tensor, noise: Allowance, brief: bool, alike: float, sided: float
) -> Judgement:
    """Say how grave the errors are. alike, sided: the gain and the side that rounding gave the evaluations, at most."""
    n, unit, square = found.count, UNIT[y.dtype], sums.square
    gain = sums.weight / square if square else 0.0
    deviation = math.sqrt(sums.weights) / square if square else math.inf
    both = sums.up + sums.down
    one_sided = (sums.up - sums.down) / math.sqrt(both) if both else 0.0
    found = replace(found, gain=gain, one_sided=one_sided)
    beyond = 0 if sums.beyond <= RARE * n and found.worst <= 2 * NEAR else sums.beyond
    if found.worst > FAR or (beyond > max(FEW * n, 1.0) and sums.largest_beyond >= SMALL * sums.largest):
        return replace(found, outcome="bug", reason=_described(found, y, r, noise, brief))
    if beyond:
        return replace(found, outcome="suspicious", reason=_described(found, y, r, noise, brief))
    if 16 * sums.noise >= square / 4 and square > 0 and unit < 2.0**-4:
        share = math.sqrt(sums.noise / square)
        return replace(
            found,
            outcome="not checked",
            reason=f"at these inputs rounding alone may change the result by {share:.0%}: nothing smaller would be seen",
        )
    constant = 2 * _CONSTANT if unit >= _CONSTANT else 0.0
    explained = min(sums.explained / square, NEAR * alike + constant) if square else math.inf
    if abs(gain) > unit / 2 + explained and abs(gain) > ONE_SIDED * deviation:
        return replace(found, outcome="bug" if abs(gain) > GROSS + explained else "suspicious", reason=scaled(gain))
    if sums.quiet_flips > FLIPPED * sums.quiet + ONE_SIDED * math.sqrt(FLIPPED * sums.quiet):
        text = f"{sums.quiet_flips / sums.quiet:.1%} of the elements are not the correctly rounded value"
        return replace(found, outcome="suspicious", reason=f"{text}, as steps of {_name(y)} inside make it, and not of float32")
    many = found.flips >= MANY and abs(one_sided) >= 2 * ONE_SIDED and abs(one_sided) > NEAR * sided
    if (abs(one_sided) >= ONE_SIDED and found.flips * n > 3 * sums.flips) or many:
        side = "above" if one_sided > 0 else "below"
        share = f"{found.flips:.1%} of the elements are not the correctly rounded value"
        return replace(found, outcome="suspicious", reason=f"{share}, and nearly all of these lie {side} it")
    return found


def scaled(gain: float) -> str:
    """Return what is said of a result that is off by a factor as a whole."""
    return f"the whole result is {1 + gain:.9g} times what it should be"


def _described(found: Judgement, y: Tensor, r: Tensor, noise: Allowance, brief: bool) -> str:
    where = ""
    if not brief:
        error = (y.to(torch.float64) - r).abs().nan_to_num(0.0, 0.0, 0.0)
        where = pattern(error > NEAR * bounds(y, r, noise.tensor))
    return f"{found.worst:.3g} times its own rounding (limit {NEAR:g}), {_share(found.share)} of the elements beyond it{where}"


def _share(share: float) -> str:
    return f"{share:.2g}" if share < 0.001 else f"{share:.1%}"
