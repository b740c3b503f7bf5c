"""Special functions of pairs of float64: inverses by Newton's method, the gamma function's by Stirling's series."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

import torch

from trainprobe.op_check.double_double import functions
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
    running,
    subtract,
    times_power_of_two,
)
from trainprobe.op_check.double_double.functions import ONE, complementary_error_function, exponential, logarithm
from trainprobe.op_check.double_double.rules import Numbers, pair_of, rule

_PI = (3.141592653589793, 1.2246467991473532e-16)
_HALF_LOG_2_PI = (0.9189385332046728, -3.8782941580672414e-17)
_ROOT_2 = (1.4142135623730951, -9.667293313452913e-17)
_ROOT_2_PI = (2.5066282746310007, -1.8328579980459167e-16)
_SERIES_FROM = 32  # Stirling's series has all digits from here on
_TERMS = 22
_BESSEL_TO = 60.0


def inverse_hyperbolic_sine(x: Pair) -> Pair:
    """Return log(|x| + √(x² + 1)), with the sign of x."""
    size = absolute(x)
    square = multiply(size, size)
    inner = add(size, divide(square, add(ONE, root(add(square, ONE)))))
    found = functions.logarithm_of_one_and(inner)
    return finite(*chosen(is_negative(x), negative(found), found), torch.asinh(x[0]))


def inverse_hyperbolic_cosine(x: Pair) -> Pair:
    """Return log(x + √(x² − 1)), by t = x − 1."""
    t = subtract(x, ONE)
    inner = add(t, root(multiply(t, add(t, constant(2.0)))))
    return finite(*functions.logarithm_of_one_and(inner), torch.acosh(x[0]))


def inverse_hyperbolic_tangent(x: Pair) -> Pair:
    """Return ½ log((1 + x) / (1 − x))."""
    twice = divide(times_power_of_two(x, 2.0), subtract(ONE, x))
    return finite(*times_power_of_two(functions.logarithm_of_one_and(twice), 0.5), torch.atanh(x[0]))


def angle(y: Pair, x: Pair) -> Pair:
    """Return the angle of the point (x, y)."""
    plain = torch.atan2(y[0], x[0])
    steep = y[0].abs() > x[0].abs()
    ratio = divide(chosen(steep, x, y), chosen(steep, y, x))
    found = functions.arc_tangent(ratio)
    quarter = times_power_of_two(constant(*_PI), 0.5)
    up = chosen(is_negative(y), negative(quarter), quarter)
    half = times_power_of_two(up, 2.0)
    flat = chosen(is_negative(x), add(found, half), found)
    whole = chosen(steep, subtract(up, found), flat)
    at_an_axis = (y[0] == 0) & ~is_negative(x)
    return finite(*chosen(at_an_axis, exactly(plain), whole), plain)


def _quantile(p: Pair, start: Tensor) -> Pair:
    """Return x with Φ(x) = p ≤ ½ by Newton's method, twice. start: the quantile in float64."""
    safe = start.isfinite() & (p[0] > 0)
    x = exactly(torch.where(safe, start, 0.0))
    for _ in range(2):
        below = times_power_of_two(complementary_error_function(divide(negative(x), constant(*_ROOT_2))), 0.5)
        slope = divide(exponential(times_power_of_two(multiply(x, x), -0.5)), constant(*_ROOT_2_PI))
        x = subtract(x, divide(subtract(below, p), slope))
    return finite(*x, torch.where(safe, x[0], start))


def normal_quantile(p: Pair) -> Pair:
    """Return x with Φ(x) = p."""
    rest = subtract(ONE, p)
    upper = p[0] > 0.5
    small = chosen(upper, rest, p)
    found = _quantile(small, torch.special.ndtri(small[0]))
    return chosen(upper, negative(found), found)


def inverse_error_function(y: Pair) -> Pair:
    """Return x with erf x = y: −1/√2 times the quantile of (1 − |y|) / 2, and near 0 by Newton's method at erf itself."""
    size = absolute(y)
    plain = torch.erfinv(y[0])
    far = divide(normal_quantile(times_power_of_two(subtract(ONE, size), 0.5)), negative(constant(*_ROOT_2)))
    x = exactly(torch.where(size[0] < 0.5, plain.abs(), 0.0))
    for _ in range(2):
        slope = multiply(exponential(negative(multiply(x, x))), divide(constant(2.0), root(constant(*_PI))))
        x = subtract(x, divide(subtract(functions.error_function(x), size), slope))
    found = chosen(size[0] < 0.5, x, far)
    return finite(*chosen(is_negative(y), negative(found), found), plain)


@cache
def _bernoulli() -> list[Fraction]:
    """Return B₀, B₁, B₂ and so on."""
    found: list[Fraction] = []
    for m in range(2 * _TERMS + 2):
        found.append(Fraction(int(m == 0)) - sum((math.comb(m, k) * found[k] / (m - k + 1) for k in range(m)), Fraction(0)))
    return found


def _fraction(x: Fraction) -> Pair:
    return constant(float(x), float(x - Fraction(float(x))))


def _series(z: Pair, coefficient: Callable[[int], Fraction], first: int) -> Pair:
    """Return Σ c(k) B₂ₖ z^(−2k − first) over k ≥ 1."""
    inverse = divide(ONE, z)
    square, total = multiply(inverse, inverse), constant(0.0)
    for k in range(_TERMS, 0, -1):
        total = multiply(add(total, _fraction(coefficient(k) * _bernoulli()[2 * k])), square)
    for _ in range(abs(first)):
        total = multiply(total, inverse if first > 0 else z)
    return total


def _moved_up(x: Pair, step: Callable[[Pair, Pair], Pair], start: Pair) -> tuple[Pair, Pair]:
    """Return x + n ≥ 32, and what `step` makes of start and x, x + 1, …, x + n − 1."""
    total = (start[0].expand(x[0].shape), start[1].expand(x[0].shape))
    for _ in range(_SERIES_FROM):
        here = x[0] < _SERIES_FROM
        total = chosen(here, step(total, x), total)
        x = chosen(here, add(x, ONE), x)
    return x, total


def _above_zero(x: Pair, name: str) -> Tensor:
    if bool((x[0] <= 0).any()):
        raise NotImplementedError(f"{name} of numbers that are not above 0")
    return x[0].isfinite()


def logarithm_of_gamma(x: Pair) -> Pair:
    """Return log Γ(x) of x > 0."""
    fine = _above_zero(x, "lgamma")
    z, below = _moved_up(chosen(fine, x, ONE), multiply, ONE)
    whole = subtract(multiply(subtract(z, constant(0.5)), logarithm(z)), subtract(z, constant(*_HALF_LOG_2_PI)))
    whole = add(whole, _series(z, lambda k: Fraction(1, 2 * k * (2 * k - 1)), -1))
    return finite(*subtract(whole, logarithm(below)), torch.lgamma(x[0]))


def digamma(x: Pair) -> Pair:
    """Return the derivative of log Γ(x), of x > 0."""
    fine = _above_zero(x, "digamma")
    z, below = _moved_up(chosen(fine, x, ONE), lambda total, x: add(total, divide(ONE, x)), constant(0.0))
    whole = subtract(logarithm(z), add(divide(constant(0.5), z), _series(z, lambda k: Fraction(1, 2 * k), 0)))
    return finite(*subtract(whole, below), torch.digamma(x[0]))


def polygamma(n: int, x: Pair) -> Pair:
    """Return the n-th derivative of the digamma function, of x > 0."""
    if n == 0:
        return digamma(x)
    fine = _above_zero(x, "polygamma")

    def power(x: Pair) -> Pair:
        return functions.power(x, constant(float(n + 1)))

    z, below = _moved_up(chosen(fine, x, ONE), lambda total, x: add(total, divide(ONE, power(x))), constant(0.0))
    factorial = float(math.factorial(n))
    whole = divide(constant(factorial / n), functions.power(z, constant(float(n))))
    whole = add(whole, divide(constant(factorial / 2), power(z)))
    whole = add(whole, _series(z, lambda k: Fraction(math.factorial(2 * k + n - 1), math.factorial(2 * k)), n))
    whole = add(whole, multiply(below, constant(factorial)))
    return finite(*(whole if n % 2 else negative(whole)), torch.polygamma(n, x[0]))


def bessel(order: int, x: Pair) -> Pair:
    """Return I₀ or I₁ by their power series, all of whose terms have one sign."""
    if bool((x[0].abs() > _BESSEL_TO).any()):
        raise NotImplementedError(f"a Bessel function beyond {_BESSEL_TO:g}")
    square = times_power_of_two(multiply(x, x), 0.25)
    term = total = (torch.ones_like(x[0]), torch.zeros_like(x[0]))
    for k in range(1, 130):
        term = divide(multiply(term, square), constant(float(k * (k + order))))
        total = add(total, term)
    return multiply(total, times_power_of_two(x, 0.5)) if order else total


def _unscaled(order: int) -> Callable[[Pair], Pair]:
    return lambda x: bessel(order, x)


def _scaled(order: int) -> Callable[[Pair], Pair]:
    return lambda x: multiply(bessel(order, x), exponential(negative(absolute(x))))


for _names, _of_one in (
    (("asinh",), inverse_hyperbolic_sine),
    (("acosh",), inverse_hyperbolic_cosine),
    (("atanh",), inverse_hyperbolic_tangent),
    (("erfinv",), inverse_error_function),
    (("special_ndtri",), normal_quantile),
    (("special_erfcx",), functions.scaled_complementary_error_function),
    (("lgamma",), logarithm_of_gamma),
    (("digamma",), digamma),
    (("i0", "special_modified_bessel_i0"), _unscaled(0)),
    (("special_i0e",), _scaled(0)),
    (("special_i1", "special_modified_bessel_i1"), _unscaled(1)),
    (("special_i1e",), _scaled(1)),
):
    rule(*_names)(lambda func, x, of_one=_of_one: Numbers(of_one(x)))


@rule("atan2")
def _angle(func: Any, y: Any, x: Any) -> Numbers:
    y, x = pair_of(y), pair_of(x)
    return Numbers(angle(y, x))


@rule("polygamma")
def _polygamma(func: Any, *given: Any) -> Numbers:
    n, x = given if isinstance(given[0], int) else reversed(given)
    return Numbers(polygamma(n, x))


@rule("logcumsumexp")
def _running_logarithm(func: Any, a: Any, dim: int) -> Numbers:
    def step(a: Pair, b: Pair) -> Pair:
        from_a = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] > b[1]))
        large, small = chosen(from_a, a, b), chosen(from_a, b, a)
        apart = subtract(small, large)
        apart = chosen(apart[0].isnan() & ~a[0].isnan() & ~b[0].isnan(), constant(-math.inf), apart)
        return add(large, functions.logarithm_of_one_and(exponential(apart)))

    return Numbers(running(a, dim, step))
