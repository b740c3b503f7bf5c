"""What a judgement of floating-point results is made of: sums over all elements, taken a span at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trainprobe.op_check.noise import COARSE, UNIT

try:
    from trainprobe.op_check import _native as kernel  # pyright: ignore[reportAttributeAccessIssue]
except ImportError:
    kernel = None

Tensor = torch.Tensor
NEAR = 4.0  # bounds
_QUIET = 0.02  # of roundings that go the other way
_LEAST = 5e-324  # half of it is 0, and a bound of 0 would make the distance of what is right no number
_SPAN = 1 << 15  # elements: what is worked out of them stays in the caches


@dataclass(slots=True)
class Sums:
    """Sums over the elements of a result y with reference r and noise N; e = y − r, where all are finite.

    same: correctly rounded. lost: NaN or infinite on one side alone. unbounded: no bound is known, overflown: and y is not
    finite. worst: largest |e| in bounds, at the flat index, where the bound is `bound`. beyond: further than NEAR.
    largest, largest_beyond: of |r|. square: Σr². weight: Σer. weights: Σ(er)². noise: ΣN². explained: ΣN|r|.
    up, down: not correctly rounded, above and below in size. flips: how many of them the noise explains. quiet: elements whose
    rounding the noise hardly changes, in spans where some are not correctly rounded; quiet_flips: those of them.
    """

    same: int = 0
    lost: int = 0
    unbounded: int = 0
    overflown: int = 0
    worst: float = -1.0
    index: int = 0
    bound: float = 0.0
    beyond: int = 0
    largest: float = 0.0
    largest_beyond: float = 0.0
    square: float = 0.0
    weight: float = 0.0
    weights: float = 0.0
    noise: float = 0.0
    explained: float = 0.0
    up: int = 0
    down: int = 0
    flips: float = 0.0
    quiet: int = 0
    quiet_flips: int = 0


class Allowance:
    """How far a correct kernel may be from a result r: relative · |r| + factor · size, written out where somebody asks.

    size: ≥ 0, float32 or float64, of r's shape or one that expands to it.
    """

    __slots__ = ("_r", "factor", "relative", "size")

    def __init__(self, r: Tensor, relative: float, size: Tensor | None = None, factor: float = 0.0) -> None:
        self._r, self.relative, self.size, self.factor = r, relative, size, factor

    @classmethod
    def of(cls, noise: Tensor) -> Allowance:
        """Return one that is written out."""
        return cls(noise, 0.0, noise, 1.0)

    @property
    def tensor(self) -> Tensor:
        """The noise of each element, float64. What is written to it is kept."""
        if self.size is None or (self.relative, self.factor) != (0.0, 1.0):
            noise = self._r.abs().mul_(self.relative).nan_to_num_(0.0, 0.0, 0.0)
            self.size = noise if self.size is None else noise.add_(self.size.to(torch.float64) * self.factor)
            self.relative, self.factor = 0.0, 1.0
        return self.size


def bounds(y: Tensor, r: Tensor, noise: Tensor | None) -> Tensor:
    """Return the bound of each element, float64: what a correct kernel may be off."""
    info = torch.finfo(y.dtype)
    bound = r.abs().mul_(UNIT[y.dtype]).nan_to_num_(0, 0, 0).add_(max(info.tiny * info.eps / 2, _LEAST))
    return bound if noise is None else bound.add_(noise)


def lost(y: Tensor, rounded: Tensor, r: Tensor, bound: Tensor) -> Tensor:
    """Return where a NaN or an infinity stands on one side alone, but where rounding decides which."""
    largest = torch.finfo(y.dtype).max
    differ = (y.isnan() != rounded.isnan()) | (~y.isnan() & ~rounded.isnan() & (y.isinf() | rounded.isinf()) & (y != rounded))
    at_the_edge = (
        r.isfinite() & (r.abs() + NEAR * bound >= largest) & ~y.isnan() & (y.abs() >= largest * (1 - 8 * UNIT[y.dtype]))
    )
    return differ & ~at_the_edge & bound.isfinite()


def is_nearest(y: Tensor, r: Tensor) -> bool:
    """Return whether y is r, correctly rounded, bit by bit. It is known at the first span that differs."""
    return all(torch.equal(part, want.to(y.dtype)) for _, (part, want) in _spans(y, r))


def far(y: Tensor, r: Tensor, noise: Tensor) -> Tensor:
    """Return which elements are further than NEAR from r."""
    found = torch.empty(r.numel(), dtype=torch.bool)
    for begin, (part, want, its_noise) in _spans(y, r, noise):
        error = (part.to(torch.float64) - want).abs_()
        torch.gt(error, bounds(part, want, its_noise).mul_(NEAR), out=found[begin : begin + len(part)])
    return found.view(r.shape)


def measured(y: Tensor, r: Tensor, noise: Allowance) -> Sums:
    """Return the sums of a result of a floating format in UNIT. r: float64, of its shape."""
    sums = _compiled(y, r, noise)
    if sums is not None:
        return sums
    sums = Sums()
    for begin, (part, want, its_noise) in _spans(y, r, noise.tensor):
        _add(sums, begin, part, want, its_noise)
    return sums


def _compiled(y: Tensor, r: Tensor, noise: Allowance) -> Sums | None:
    """Return the sums of a float32 result whose numbers are all finite, where the compiled kernel is there."""
    if kernel is None or (y.dtype, r.dtype) != (torch.float32, torch.float64) or y.is_neg() or r.is_neg():
        return None
    size = noise.size
    if size is not None and (size.dtype not in (torch.float32, torch.float64) or size.is_neg()):
        return None
    y, r = y.contiguous(), r.contiguous()
    size = None if size is None else size.expand(r.shape).contiguous()
    address, width = (0, 0) if size is None else (size.data_ptr(), size.element_size())
    found = kernel.measure(y.data_ptr(), r.data_ptr(), y.numel(), NEAR, address, width, noise.factor, noise.relative)
    if found is None:
        return None
    same, worst, index, bound, beyond, largest, largest_beyond, square, weight, weights, noises, explained = found
    return Sums(
        same=same,
        worst=worst,
        index=index,
        bound=bound,
        beyond=beyond,
        largest=largest,
        largest_beyond=largest_beyond,
        square=square,
        weight=weight,
        weights=weights,
        noise=noises,
        explained=explained,
    )


def _spans(*tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    flat = [t.reshape(-1) for t in tensors]
    for begin in range(0, len(flat[0]), _SPAN):
        yield begin, tuple(t[begin : begin + _SPAN] for t in flat)


def _add(sums: Sums, begin: int, y: Tensor, r: Tensor, noise: Tensor) -> None:
    rounded = r.to(y.dtype)
    same = y == rounded
    wide = y.to(torch.float64)
    bound = bounds(y, r, noise)
    if not math.isfinite(float(wide.sum()) + float(r.sum()) + float(bound.sum())):
        same |= y.isnan() & rounded.isnan()
        sums.lost += int(lost(y, rounded, r, bound).sum())
        unbounded = ~bound.isfinite() & r.isfinite()
        sums.unbounded += int(unbounded.sum())
        sums.overflown += int((unbounded & ~y.isfinite()).sum())
        fine = y.isfinite() & r.isfinite() & bound.isfinite()
        r, noise = torch.where(fine, r, 0.0), torch.where(fine, noise, 0.0)
        wide, bound = torch.where(fine, wide, 0.0), torch.where(fine, bound, 1.0)
    right = int(same.sum())
    sums.same += right
    size = r.abs()
    _add_errors(sums, begin, wide - r, r, size, bound)
    sums.noise += float(torch.dot(noise, noise))
    sums.explained += float(torch.dot(noise, size))
    if right < len(y) and UNIT[y.dtype] >= COARSE:
        _add_flips(sums, y, rounded, noise)


def _add_errors(sums: Sums, begin: int, error: Tensor, r: Tensor, size: Tensor, bound: Tensor) -> None:
    q = error.abs().div_(bound)
    largest = float(size.max())
    worst = float(q.max())
    if worst > sums.worst:
        index = int(q.argmax())
        sums.worst, sums.index, sums.bound = worst, begin + index, float(bound[index])
    if worst > NEAR:
        beyond = q > NEAR
        sums.beyond += int(beyond.sum())
        sums.largest_beyond = max(sums.largest_beyond, float(size[beyond].max()))
    sums.largest = max(sums.largest, largest)
    weight = error.mul_(r)
    sums.square += float(torch.dot(r, r))
    sums.weight += float(weight.sum())
    sums.weights += float(torch.dot(weight, weight))


def _add_flips(sums: Sums, y: Tensor, rounded: Tensor, noise: Tensor) -> None:
    finite = y.isfinite() & rounded.isfinite()
    a, b = y.abs().to(torch.float64)[finite], rounded.abs().to(torch.float64)[finite]
    sums.up += int((a > b).sum())
    sums.down += int((a < b).sum())
    gap = 2 * UNIT[y.dtype] * torch.exp2(torch.floor(torch.log2(b.clamp_min(torch.finfo(y.dtype).tiny))))
    explained = (2 * noise[finite] / gap).clamp_max_(1.0)
    sums.flips += float(explained.sum())
    quiet = explained < _QUIET
    sums.quiet += int(quiet.sum())
    sums.quiet_flips += int((quiet & (a != b)).sum())
