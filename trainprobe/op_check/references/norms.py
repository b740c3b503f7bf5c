"""Normalisations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainprobe.op_check.noise import kept, stored
from trainprobe.op_check.references import formula
from trainprobe.op_check.references.primitives import Tensor, abs, mean, rsqrt, sqrt, sum


def _normal(x: Tensor, dims: Sequence[int], eps: float) -> Tensor:
    """(x − mean) / √(variance + ε) over `dims`; 1/N in the variance."""
    centred = x - kept(mean(x, dims, True))
    return centred * kept(rsqrt(mean(centred * centred, dims, True) + eps))


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int] | None = None) -> Tensor:
    if weight is not None:
        x = x * (weight if shape is None else weight.reshape(shape))
    if bias is not None:
        x = x + (bias if shape is None else bias.reshape(shape))
    return x


def _of_layer_norms_gradients(
    gradient: Tensor,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> dict[str, Tensor]:
    """Its sums of K products, √K times the sum of their sizes."""
    count = 1 if isinstance(normalized_shape, int) else len(normalized_shape)
    dims = [*range(-count, 0)]
    rows = [*range(input.ndim - count)]
    normal = _normal(input, dims, eps)
    scaled = abs(gradient if weight is None else gradient * weight)
    deviation = rsqrt(mean((input - mean(input, dims, True)).square_(), dims, True) + eps)
    root = math.prod(input.shape[: input.ndim - count]) ** 0.5
    along = [sum(t, rows).mul_(root) if rows else t for t in (abs(gradient * normal), abs(gradient))]
    return {
        "input": (scaled + mean(scaled.square(), dims, True).sqrt_()) * deviation,
        "weight": along[0],
        "bias": along[1],
    }


@formula("layer_norm", gradients=_of_layer_norms_gradients)
def layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """γ (x − mean) / √(var + ε) + β over the last dimensions."""
    count = 1 if isinstance(normalized_shape, int) else len(normalized_shape)
    return _affine(_normal(input, [*range(-count, 0)], eps), weight, bias)


@formula("native_layer_norm")
def native_layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm, the mean and 1 / √(var + ε)."""
    dims = [*range(-len(normalized_shape), 0)]
    center = mean(input, dims, True)
    deviation = rsqrt(mean((input - center) * (input - center), dims, True) + eps)
    return layer_norm(input, normalized_shape, weight, bias, eps), center, deviation


@formula("rms_norm")
def rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Γ x / √(mean x² + ε) over the last dimensions."""
    count = 1 if isinstance(normalized_shape, int) else len(normalized_shape)
    small = 0.0 if eps is None else eps
    scaled = input * kept(rsqrt(mean(input * input, [*range(-count, 0)], True) + small))
    return scaled if weight is None else stored(scaled) * weight


@formula("group_norm")
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Each group of channels is normalised by itself; γ and β are for channels."""
    grouped = input.reshape(input.shape[0], num_groups, -1)
    shape = [1, -1, *[1] * (input.ndim - 2)]
    return _affine(_normal(grouped, [2], eps).reshape(input.shape), weight, bias, shape)


@formula("batch_norm")
def batch_norm(input: Tensor, *given: Any, **named: Any) -> Tensor:
    """Each channel (dimension 1) by the statistics of the batch, or in evaluation by the running ones."""
    # torch.nn.functional has the running statistics before weight and bias, torch itself after them
    names = ("running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    if len(given) > 7 or "cudnn_enabled" in named:
        names = ("weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled")
    told: dict[str, Any] = {
        "weight": None,
        "bias": None,
        "training": False,
        "eps": 1e-5,
        **dict(zip(names, given, strict=False)),
        **named,
    }
    shape = [1, -1, *[1] * (input.ndim - 2)] if input.ndim > 1 else [-1]
    if told["training"]:
        normal = _normal(input, [i for i in range(input.ndim) if i != 1], told["eps"])
    else:
        deviation = rsqrt(told["running_var"] + told["eps"])
        normal = (input - told["running_mean"].reshape(shape)) * deviation.reshape(shape)
    return _affine(normal, told["weight"], told["bias"], shape)


@formula("instance_norm")
def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Each channel of each sample by itself, or in evaluation by the running statistics."""
    shape = [1, -1, *[1] * (input.ndim - 2)]
    if not use_input_stats and running_mean is not None and running_var is not None:
        normal = (input - running_mean.reshape(shape)) * rsqrt(running_var + eps).reshape(shape)
    else:
        normal = _normal(input, [*range(2, input.ndim)], eps)
    return _affine(normal, weight, bias, shape)


@formula("_weight_norm")
def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """G v / ‖v‖, with the norm over all dimensions but `dim`, or over all with −1."""
    dims = [d for d in range(v.ndim) if d != dim]
    return v * (g / kept(sqrt(sum(v * v, dims, True))))
