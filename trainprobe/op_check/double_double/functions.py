"""Exponentials, logarithms and their like of pairs of float64, to about 2⁻⁹⁵ of the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch

from trainprobe.op_check.double_double.arithmetic import (
    Pair,
    Tensor,
    absolute,
    add,
    chosen,
    constant,
    divide,
    exactly,
    finite,
    is_negative,
    multiply,
    negative,
    root,
    subtract,
    times_power_of_two,
)

_LN_2 = (0.6931471805599453, 2.3190468138462996e-17)
_LN_10 = (2.302585092994046, -2.1707562233822494e-16)
_HALF_PI = (1.5707963267948966, 6.123233995736766e-17, -1.4973849048591698e-33)
_TWO_OVER_ROOT_PI = (1.1283791670955126, 1.533545961316588e-17)
_ONE_OVER_ROOT_PI = (0.5641895835477563, 7.66772980658294e-18)
_HALVINGS = 9
_TINY = 2.0**-200  # e^x − 1 is x
_FARTHEST_ANGLE = 2.0**24
_TAIL = 2.5  # from here on erfc is taken from its continued fraction
ONE = constant(1.0)


def _fraction(x: Fraction) -> Pair:
    high = float(x)
    return constant(high, float(x - Fraction(high)))


_FACTORIALS = [_fraction(Fraction(1, math.factorial(n))) for n in range(32)]
_ODD = [_fraction(Fraction(1, 2 * n + 1)) for n in range(90)]


def _polynomial(x: Pair, coefficients: Sequence[Pair]) -> Pair:
    """Return c₀ + c₁ x + c₂ x² and so on."""
    total = chosen(torch.ones_like(x[0], dtype=torch.bool), coefficients[-1], x)
    for c in reversed(coefficients[:-1]):
        total = add(multiply(total, x), c)
    return total


def _where(at: Tensor, x: Pair, inside: Callable[[Pair], Pair], outside: Callable[[Pair], Pair]) -> Pair:
    """Return one function where the condition holds and the other elsewhere, each taken of these numbers alone."""
    high, low = torch.empty_like(x[0]), torch.empty_like(x[0])
    for part, function in ((at, inside), (~at, outside)):
        if bool(part.any()):
            high[part], low[part] = function((x[0][part], x[1][part]))
    return high, low


def _exponential_less_one(x: Pair) -> Pair:
    """Return e^x − 1 of |x| ≤ 0.35: the series of x / 2⁹, and (1 + y)² − 1 = 2y + y² nine times."""
    small = times_power_of_two(x, 2.0**-_HALVINGS)
    y = multiply(small, _polynomial(small, _FACTORIALS[1:12]))
    for _ in range(_HALVINGS):
        y = add(times_power_of_two(y, 2.0), multiply(y, y))
    return y


def _reduced(x: Pair) -> tuple[Tensor, Pair]:
    """Return the multiple of log 2 that is nearest to x, and what is left."""
    times = torch.round((x[0] / _LN_2[0]).nan_to_num(0.0, 0.0, 0.0)).clamp(-1100, 1100)
    return times, subtract(x, multiply(exactly(times), constant(*_LN_2)))


def _by_power_of_two(x: Pair, exponent: Tensor) -> Pair:
    half = torch.floor(exponent / 2)
    return times_power_of_two(times_power_of_two(x, torch.exp2(half)), torch.exp2(exponent - half))


def exponential(x: Pair) -> Pair:
    """Return e^x."""
    times, rest = _reduced(x)
    return finite(*_by_power_of_two(add(_exponential_less_one(rest), ONE), times), torch.exp(x[0]))


def exponential_less_one(x: Pair) -> Pair:
    """Return e^x − 1."""
    times, rest = _reduced(x)
    y = _exponential_less_one(rest)
    whole = subtract(_by_power_of_two(add(y, ONE), times), ONE)
    found = chosen(times == 0, chosen(x[0].abs() < _TINY, x, y), whole)
    return finite(*found, torch.expm1(x[0]))


def _logarithm_near_one(z: Pair, one_and_z: Pair) -> Pair:
    """Return log(1 + z) = 2 artanh(z / (2 + z)) of 1 + z between √½ and √2."""
    s = divide(z, add(one_and_z, ONE))
    return times_power_of_two(multiply(s, _polynomial(multiply(s, s), _ODD[:26])), 2.0)


def logarithm(x: Pair) -> Pair:
    """Return log x."""
    plain = torch.log(x[0])
    safe = chosen((x[0] > 0) & torch.isfinite(x[0]), x, ONE)
    fraction, exponent = torch.frexp(safe[0])
    exponent = torch.where(fraction < math.sqrt(0.5), exponent - 1, exponent).to(torch.float64)
    near = _by_power_of_two(safe, -exponent)
    result = add(multiply(exactly(exponent), constant(*_LN_2)), _logarithm_near_one(subtract(near, ONE), near))
    return finite(*result, plain)


def logarithm_of_one_and(z: Pair) -> Pair:
    """Return log(1 + z)."""
    return _where(z[0].abs() < 0.25, z, lambda z: _logarithm_near_one(z, add(z, ONE)), lambda z: logarithm(add(z, ONE)))


def power_of_two(x: Pair) -> Pair:
    """Return 2^x."""
    return finite(*exponential(multiply(x, constant(*_LN_2))), torch.exp2(x[0]))


def binary_logarithm(x: Pair) -> Pair:
    """Return log₂ x."""
    return divide(logarithm(x), constant(*_LN_2))


def decimal_logarithm(x: Pair) -> Pair:
    """Return log₁₀ x."""
    return divide(logarithm(x), constant(*_LN_10))


def hyperbolic_tangent(x: Pair) -> Pair:
    """Return tanh x."""
    y = exponential_less_one(times_power_of_two(absolute(x), -2.0))
    size = divide(negative(y), add(y, constant(2.0)))
    return chosen(is_negative(x), negative(size), size)


def sigmoid(x: Pair) -> Pair:
    """Return 1 / (1 + e^−x)."""
    small = exponential(negative(absolute(x)))
    return divide(chosen(is_negative(x), small, ONE), add(small, ONE))


def hyperbolic_sine(x: Pair) -> Pair:
    """Return (e^x − e^−x) / 2, by y = e^|x| − 1 as (y + y / (y + 1)) / 2."""
    y = exponential_less_one(absolute(x))
    size = times_power_of_two(add(y, divide(y, add(y, ONE))), 0.5)
    return finite(*chosen(is_negative(x), negative(size), size), torch.sinh(x[0]))


def hyperbolic_cosine(x: Pair) -> Pair:
    """Return (e^x + e^−x) / 2."""
    e = exponential(absolute(x))
    return finite(*times_power_of_two(add(e, divide(ONE, e)), 0.5), torch.cosh(x[0]))


def error_function(x: Pair) -> Pair:
    """Return erf x."""

    def far(x: Pair) -> Pair:
        size = subtract(ONE, _complement_of_far(absolute(x)))
        return finite(*chosen(is_negative(x), negative(size), size), torch.erf(x[0]))

    return _where(x[0].abs() < _TAIL, x, _error_function_near_zero, far)


def complementary_error_function(x: Pair) -> Pair:
    """Return 1 − erf x."""
    near = lambda x: subtract(ONE, error_function(x))  # noqa: E731
    return _where(x[0] < _TAIL, x, near, lambda x: finite(*_complement_of_far(x), torch.erfc(x[0])))


def _error_function_near_zero(x: Pair) -> Pair:
    """Return erf x = 2/√π e^(−x²) x Σ (2x²)ⁿ / (2n + 1)!!, all of whose terms are positive."""
    square = multiply(x, x)
    twice, total = times_power_of_two(square, 2.0), ONE
    for c in reversed(_ODD[1:]):
        total = add(multiply(multiply(total, twice), c), ONE)
    return multiply(multiply(exponential(negative(square)), constant(*_TWO_OVER_ROOT_PI)), multiply(x, total))


def _complement_of_far(x: Pair) -> Pair:
    """Return erfc x = e^(−x²) times what follows, of x ≥ 2.5."""
    return multiply(exponential(negative(multiply(x, x))), _scaled_complement_of_far(x))


def _scaled_complement_of_far(x: Pair) -> Pair:
    """Return 1/√π · 1/(x + ½/(x + 1/(x + 3/2/(x + …)))) of x ≥ 2.5."""
    below = x
    for k in range(130, 0, -1):
        below = add(x, divide(constant(k / 2), below))
    return divide(constant(*_ONE_OVER_ROOT_PI), below)


def scaled_complementary_error_function(x: Pair) -> Pair:
    """Return e^(x²) (1 − erf x)."""
    near = lambda x: multiply(exponential(multiply(x, x)), complementary_error_function(x))  # noqa: E731
    return finite(*_where(x[0] < _TAIL, x, near, _scaled_complement_of_far), torch.special.erfcx(x[0]))


def sine_and_cosine(x: Pair) -> tuple[Pair, Pair]:
    """Return sin x and cos x. Raises NotImplementedError for |x| > 2²⁴, whose quarter turns it does not know well enough."""
    size = x[0].abs()
    if bool((torch.isfinite(size) & (size > _FARTHEST_ANGLE)).any()):
        raise NotImplementedError("sine of an angle beyond 2²⁴")
    turns = torch.round((x[0] / _HALF_PI[0]).nan_to_num(0.0, 0.0, 0.0))
    rest = x
    for part in _HALF_PI:
        rest = subtract(rest, multiply(exactly(turns), constant(part)))
    square = negative(multiply(rest, rest))
    sine = multiply(rest, _polynomial(square, _FACTORIALS[1::2]))
    cosine = _polynomial(square, _FACTORIALS[0::2])
    quarter = torch.remainder(turns, 4)
    odd = (quarter == 1) | (quarter == 3)
    first, second = chosen(odd, cosine, sine), chosen(odd, sine, cosine)
    first = chosen(quarter >= 2, negative(first), first)
    second = chosen((quarter == 1) | (quarter == 2), negative(second), second)
    return finite(*first, torch.sin(x[0])), finite(*second, torch.cos(x[0]))


def sine(x: Pair) -> Pair:
    """Return sin x."""
    return sine_and_cosine(x)[0]


def cosine(x: Pair) -> Pair:
    """Return cos x."""
    return sine_and_cosine(x)[1]


def tangent(x: Pair) -> Pair:
    """Return tan x."""
    return divide(*sine_and_cosine(x))


def arc_tangent(x: Pair) -> Pair:
    """Return arctan x: of y near it, y + arctan((x cos y − sin y) / (cos y + x sin y)), whose last step is small."""
    plain = torch.atan(x[0])
    safe = chosen(torch.isfinite(x[0]), x, ONE)
    near = torch.atan(safe[0])
    s, c = sine_and_cosine(exactly(near))
    rest = divide(subtract(multiply(safe, c), s), add(c, multiply(safe, s)))
    return finite(*chosen(torch.isfinite(x[0]), add(exactly(near), rest), exactly(plain)), plain)


def arc_sine(x: Pair) -> Pair:
    """Return arcsin x = 2 arctan(x / (1 + √(1 − x²)))."""
    other = root(multiply(subtract(ONE, x), add(ONE, x)))
    return finite(*times_power_of_two(arc_tangent(divide(x, add(ONE, other))), 2.0), torch.asin(x[0]))


def arc_cosine(x: Pair) -> Pair:
    """Return arccos x = 2 arctan(√((1 − x) / (1 + x)))."""
    half = arc_tangent(root(divide(subtract(ONE, x), add(ONE, x))))
    return finite(
        *chosen(x[0] == -1, times_power_of_two(constant(*_HALF_PI[:2]), 2.0), times_power_of_two(half, 2.0)), torch.acos(x[0])
    )


def reciprocal_root(x: Pair) -> Pair:
    """Return 1 / √x."""
    return finite(*divide(ONE, root(x)), torch.rsqrt(x[0]))


def reciprocal(x: Pair) -> Pair:
    """Return 1 / x."""
    return divide(ONE, x)


def power(x: Pair, exponent: Pair) -> Pair:
    """Return x^y: by products where y is one small whole number, else e^(y log |x|) with the sign that torch gives."""
    plain = torch.pow(x[0], exponent[0])
    if exponent[0].numel() == 1 and float(exponent[0]) in _WHOLE and float(exponent[1]) == 0:
        return finite(*_repeated(x, int(float(exponent[0]))), plain)
    if exponent[0].numel() == 1 and float(exponent[0]) == 0.5:
        return finite(*root(x), plain)
    size = exponential(multiply(exponent, logarithm(absolute(x))))
    signed = chosen(plain < 0, negative(size), size)
    return chosen((plain == 0) | ~torch.isfinite(plain) | (x[0] == 0), exactly(plain), signed)


_WHOLE = {float(n) for n in range(-8, 9)}


def _repeated(x: Pair, times: int) -> Pair:
    total = exactly(torch.ones_like(x[0]))
    for _ in range(abs(times)):
        total = multiply(total, x)
    return total if times >= 0 else reciprocal(total)
