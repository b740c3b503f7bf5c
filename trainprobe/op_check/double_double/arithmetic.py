"""Sums, products and quotients of pairs of float64 whose sum is the number, to about 2⁻¹⁰⁴ of the result.

The transformations without an error are Knuth's sum and Dekker's product of two. Where the number is not finite, the first of
the pair is what float64 gives and the second is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
_SPLITTER = 2.0**27 + 1
_HUGE = 2.0**995  # beyond it the splitter overflows
_SCALE = 2.0**-30


def exactly(x: Tensor) -> Pair:
    """Return a float64 number as a pair."""
    return x, torch.zeros_like(x)


def constant(high: float, low: float = 0.0) -> Pair:
    """Return a constant, with what float64 leaves of it."""
    return torch.tensor(high, dtype=torch.float64), torch.tensor(low, dtype=torch.float64)


def two_sum(a: Tensor, b: Tensor) -> Pair:
    """Return the rounded sum of any two numbers and its error."""
    s = a + b
    part = s - a
    return s, (a - (s - part)) + (b - part)


def _quick_sum(a: Tensor, b: Tensor) -> Pair:
    """Return the sum of two numbers, of which the first is larger, and its error."""
    s = a + b
    return s, b - (s - a)


def _split(a: Tensor) -> Pair:
    shifted = _SPLITTER * a
    high = shifted - (shifted - a)
    return high, a - high


def two_product(a: Tensor, b: Tensor) -> Pair:
    """Return the rounded product of two numbers and its error."""
    p = a * b
    over_a, over_b = a.abs() > _HUGE, b.abs() > _HUGE
    some = bool(over_a.any()) or bool(over_b.any())
    if some:
        a, b = torch.where(over_a, a * _SCALE, a), torch.where(over_b, b * _SCALE, b)
    (ah, al), (bh, bl) = _split(a), _split(b)
    whole = a * b
    error = ((ah * bh - whole) + ah * bl + al * bh) + al * bl
    if some:
        factor = torch.where(over_a, 1 / _SCALE, 1.0) * torch.where(over_b, 1 / _SCALE, 1.0)
        error = error * factor
    return p, error


def finite(high: Tensor, low: Tensor, plain: Tensor) -> Pair:
    """Return the pair, with what float64 gives where it is not finite."""
    fine = torch.isfinite(high) & torch.isfinite(plain)
    if bool(fine.all()):
        return high, low.nan_to_num(0.0, 0.0, 0.0) if not math.isfinite(float(low.sum())) else low
    return torch.where(fine, high, plain), torch.where(fine & torch.isfinite(low), low, 0.0)


def add(a: Pair, b: Pair) -> Pair:
    """Return a + b."""
    s, e = two_sum(a[0], b[0])
    t, f = two_sum(a[1], b[1])
    s, e2 = _quick_sum(s, e + t)
    high, low = _quick_sum(s, e2 + f)
    return finite(high, low, a[0] + b[0])


def negative(a: Pair) -> Pair:
    """Return −a."""
    return -a[0], -a[1]


def subtract(a: Pair, b: Pair) -> Pair:
    """Return a − b."""
    return add(a, negative(b))


def multiply(a: Pair, b: Pair) -> Pair:
    """Return a · b."""
    p, e = two_product(a[0], b[0])
    high, low = _quick_sum(p, e + (a[0] * b[1] + a[1] * b[0]))
    return finite(high, low, p)


def times_power_of_two(a: Pair, factor: Tensor | float) -> Pair:
    """Return a · factor, which makes no rounding."""
    return a[0] * factor, a[1] * factor


def divide(a: Pair, b: Pair) -> Pair:
    """Return a / b."""
    plain = a[0] / b[0]
    rest = subtract(a, multiply(exactly(plain), b))
    return finite(*_quick_sum(plain, rest[0] / b[0]), plain)


def root(a: Pair) -> Pair:
    """Return √a."""
    plain = torch.sqrt(a[0])
    rest = subtract(a, multiply(exactly(plain), exactly(plain)))
    return finite(*_quick_sum(plain, torch.where(plain == 0, 0.0, rest[0] / (2 * plain))), plain)


def absolute(a: Pair) -> Pair:
    """Return |a|."""
    return chosen(is_negative(a), negative(a), a)


def is_negative(a: Pair) -> Tensor:
    """Return where a is below 0; the first of a pair carries the sign, as −0 does."""
    return torch.signbit(a[0])


def less(a: Pair, b: Pair) -> Tensor:
    """Return where a < b."""
    return (a[0] < b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))


def equal(a: Pair, b: Pair) -> Tensor:
    """Return where a = b."""
    return (a[0] == b[0]) & (a[1] == b[1])


def chosen(where: Tensor, a: Pair, b: Pair) -> Pair:
    """Return a where the condition holds, else b."""
    return torch.where(where, a[0], b[0]), torch.where(where, a[1], b[1])


def folded(a: Pair, dims: list[int], step: Callable[[Pair, Pair], Pair], neutral: float) -> Pair:
    """Return all numbers along some dimensions combined two by two; these dimensions are 1 long afterwards."""
    ndim = a[0].ndim
    dims = sorted({d % ndim for d in dims}) if ndim else []
    kept = [d for d in range(ndim) if d not in dims]
    shape = [1 if d in dims else a[0].shape[d] for d in range(ndim)]
    length = math.prod(a[0].shape[d] for d in dims)
    high, low = (x.permute([*dims, *kept]).reshape(length, *[x.shape[d] for d in kept]) for x in a)
    if length == 0:
        return exactly(torch.full(shape, neutral, dtype=torch.float64))
    while len(high) > 1:
        half = len(high) // 2
        first, second = (high[:half], low[:half]), (high[half : 2 * half], low[half : 2 * half])
        left = (high[2 * half :], low[2 * half :])
        high, low = step(first, second)
        if len(left[0]):
            high, low = torch.cat([high, left[0]]), torch.cat([low, left[1]])
    return high[0].reshape(shape), low[0].reshape(shape)


def added_up(a: Pair, dims: list[int]) -> Pair:
    """Return the sum along some dimensions."""
    return folded(a, dims, add, 0.0)


def running(a: Pair, dim: int, step: Callable[[Pair, Pair], Pair]) -> Pair:
    """Return all numbers up to each place along a dimension, combined: in log₂ of its length steps over all of them."""
    high, low = (x.movedim(dim, 0) for x in a) if a[0].ndim else a
    length, reach = (len(high) if a[0].ndim else 1), 1
    while reach < length:
        sum_high, sum_low = step((high[reach:], low[reach:]), (high[:-reach], low[:-reach]))
        high, low = torch.cat([high[:reach], sum_high]), torch.cat([low[:reach], sum_low])
        reach *= 2
    return (high.movedim(0, dim), low.movedim(0, dim)) if a[0].ndim else (high, low)


def added_at(a: Pair, index: Tensor, rows: Pair) -> Pair:
    """Return a with rows added to its rows `index`, which may name a row several times: one turn for each repetition."""
    order = torch.argsort(index, stable=True)
    ordered = index[order]
    first = torch.searchsorted(ordered, ordered)
    turn = torch.arange(len(index)) - first
    high, low = a[0].clone(), a[1].clone()
    for i in range(int(turn.max()) + 1 if len(index) else 0):
        at = order[turn == i]
        to = index[at]
        high[to], low[to] = add((high[to], low[to]), (rows[0][at], rows[1][at]))
    return high, low
