"""Activations, element by element."""

from __future__ import annotations

import math

from trainprobe.op_check.noise import from_input, from_result
from trainprobe.op_check.references import formula
from trainprobe.op_check.references.primitives import (
    Tensor,
    abs,
    clamp,
    erf,
    exp,
    expm1,
    log1p,
    ones_like,
    tanh,
    where,
    zeros_like,
)


def _sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^−x), without overflow on either side."""
    small = exp(-x.abs())
    return where(x >= 0, ones_like(x), small) / (1 + small)


@formula("sigmoid", "expit", pointwise=True)
def sigmoid(input: Tensor) -> Tensor:
    """1 / (1 + e^−x)."""
    return from_result(input, _sigmoid, lambda y, g: g * ((1 - y) * y))


@formula("tanh", pointwise=True)
def tangent(input: Tensor) -> Tensor:
    """(e^x − e^−x) / (e^x + e^−x) = −expm1(−2|x|) / (2 + expm1(−2|x|)), with the sign of x."""

    def value(x: Tensor) -> Tensor:
        small = expm1(-2 * x.abs())
        return where(x < 0, 1.0, -1.0) * small / (2 + small)

    return from_result(input, value, lambda y, g: g * (1 - y * y))


@formula("relu", pointwise=True)
def relu(input: Tensor, inplace: bool = False) -> Tensor:
    """The larger of x and 0; NaN stays NaN."""
    return where((input > 0) | (input != input), input, zeros_like(input))


@formula("silu", pointwise=True)
def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """x · sigmoid(x)."""
    return input * _sigmoid(input)


def _of_gelus_gradient(gradient: Tensor, input: Tensor, approximate: str = "none") -> dict[str, Tensor]:
    """Of Φ, whose error function vector code takes with 8 u, twice its size near 0."""
    return {"input": abs(gradient) * clamp(abs(input), max=1.0).mul_(2.7)}


@formula("gelu", pointwise=True, gradients=_of_gelus_gradient)
def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """x · Φ(x), with Φ the normal distribution, or its approximation by tanh."""
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (input + 0.044715 * input * input * input)
        return 0.5 * input * (1 + tanh(inner))
    return from_input(input, lambda x: x * _normal(x), lambda x: _normal(x) + x * exp(x * x * -0.5) * (2 * math.pi) ** -0.5)


def _normal(x: Tensor) -> Tensor:
    """The share of the normal distribution that lies below x."""
    return (1 + erf(x * math.sqrt(0.5))) * 0.5


@formula("leaky_relu", pointwise=True)
def leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    """X, or slope · x where x is negative."""
    return where(input > 0, input, input * negative_slope)


@formula("elu", pointwise=True)
def elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """X, or α (e^x − 1) where x is negative."""
    return where(input > 0, input, alpha * expm1(clamp(input, max=0.0)))


@formula("softplus", pointwise=True)
def softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """log(1 + e^βx) / β, and x itself where βx is beyond the threshold."""
    scaled = input * beta
    soft = (clamp(scaled, min=0.0) + log1p(exp(-scaled.abs()))) / beta
    return where(scaled > threshold, input, soft)


@formula("logsigmoid", pointwise=True)
def logsigmoid(input: Tensor) -> Tensor:
    """−log(1 + e^−x)."""
    return clamp(input, max=0.0) - log1p(exp(-input.abs()))


@formula("hardtanh", pointwise=True)
def hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
    """X, cut at both limits."""
    return clamp(input, min_val, max_val)


@formula("hardsigmoid", pointwise=True)
def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """clamp(x + 3, 0, 6) / 6."""
    return clamp(input + 3, 0.0, 6.0) / 6


@formula("hardswish", pointwise=True)
def hardswish(input: Tensor, inplace: bool = False) -> Tensor:
    """x · clamp(x + 3, 0, 6) / 6."""
    return input * clamp(input + 3, 0.0, 6.0) / 6


@formula("mish", pointwise=True)
def mish(input: Tensor, inplace: bool = False) -> Tensor:
    """x · tanh(log(1 + e^x))."""
    return input * tanh(softplus(input, threshold=1e300))


@formula("glu")
def glu(input: Tensor, dim: int = -1) -> Tensor:
    """a · sigmoid(b), with a and b the halves along `dim`."""
    first, second = input.chunk(2, dim)
    return first * _sigmoid(second)
