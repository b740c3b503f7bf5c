"""Fused operators of the NPU (`torch_npu.npu_*`), by their definitions. No NPU was at hand: they were checked against torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainprobe.op_check.cases import NotChecked
from trainprobe.op_check.noise import kept, stored
from trainprobe.op_check.references import formula
from trainprobe.op_check.references.activations import mish, silu
from trainprobe.op_check.references.matrices import linear
from trainprobe.op_check.references.norms import group_norm, layer_norm
from trainprobe.op_check.references.primitives import (
    Tensor,
    abs,
    arange,
    cat,
    exp,
    mean,
    ones,
    rsqrt,
    sqrt,
    where,
)
from trainprobe.op_check.references.softmax import softmax


@formula("npu_rms_norm")
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """γ x r with r = 1 / √(mean x² + ε) over the dimensions of γ; returns r too."""
    r = kept(rsqrt(mean(input * input, [*range(-gamma.ndim, 0)], True) + epsilon))
    return stored(input * r) * gamma, r


@formula("npu_swiglu")
def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """silu(a) · b with a and b the halves of x."""
    a, b = input.chunk(2, dim)
    return stored(silu(a)) * b


def _halves(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return cat([-b, a], -1)


def _pairs(x: Tensor) -> Tensor:
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    return cat([-pairs[..., 1:], pairs[..., :1]], -1).reshape(x.shape)


@formula("npu_rotary_mul")
def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None) -> Tensor:
    """r1 · x + r2 · x turned: [−x₂, x₁] of the halves, or of each pair with `interleave`. Raises NotChecked with a matrix."""
    if rotate is not None or rotary_mode not in ("half", "interleave"):
        raise NotChecked(f"npu_rotary_mul with rotary_mode={rotary_mode!r} or a matrix of its own has no formula")
    turned = _halves(input) if rotary_mode == "half" else _pairs(input)
    return stored(r1 * input) + stored(r2 * turned)


@formula("npu_scaled_masked_softmax")
def npu_scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float = 1.0, fixed_triu_mask: bool = False) -> Tensor:
    """softmax(s · x) with −10000 where the mask is true, or above the diagonal; a row that is masked whole is uniform."""
    hidden = ones(x.shape[-2:], dtype=mask.dtype).bool().triu(1) if fixed_triu_mask else mask.bool()
    return softmax(stored(x * scale).masked_fill(hidden, -10000.0), -1)


@formula("fast_gelu", "npu_fast_gelu")
def fast_gelu(input: Tensor) -> Tensor:
    """x · e^(0.851 (x − |x|)) / (1 + e^(−1.702 |x|)), which is x · sigmoid(1.702 x) and not GELU."""
    size = abs(input)
    return input * exp(0.851 * (input - size)) / (1 + exp(-1.702 * size))


@formula("npu_mish")
def npu_mish(input: Tensor) -> Tensor:
    """x · tanh(log(1 + e^x))."""
    return mish(input)


@formula("npu_layer_norm_eval")
def npu_layer_norm_eval(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Layer norm, with γ, β and ε."""
    return layer_norm(input, normalized_shape, weight, bias, eps)


@formula("npu_linear")
def npu_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b."""
    return linear(input, weight, bias)


@formula("npu_group_norm_silu")
def npu_group_norm_silu(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, group: int, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """silu(group_norm(x)), the mean and 1/σ of each group."""
    grouped = input.reshape(input.shape[0], group, -1)
    centre = mean(grouped, [2])
    spread = grouped - centre.unsqueeze(-1)
    return silu(stored(group_norm(input, group, weight, bias, eps))), centre, rsqrt(mean(spread * spread, [2]) + eps)


@formula("npu_confusion_transpose")
def npu_confusion_transpose(input: Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool) -> Tensor:
    """Permute and then reshape, or reshape and then permute."""
    return input.permute(*perm).reshape(*shape) if transpose_first else input.reshape(*shape).permute(*perm)


@formula("npu_sort_v2")
def npu_sort_v2(input: Tensor, dim: int = -1, descending: bool = False, out: Any = None) -> Tensor:
    """Sorted values."""
    return input.sort(dim, descending).values


@formula("npu_moe_gating_top_k_softmax")
def npu_moe_gating_top_k_softmax(x: Tensor, finished: Tensor | None = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest of softmax(x), the experts (their number where a row is finished), and row + rank · rows.

    Raises NotChecked where two probabilities are so near that rounding decides their order.
    """
    p = softmax(x, -1)
    order = p.detach().sort(dim=-1, descending=True, stable=True)
    ahead = order.values[..., : min(k + 1, p.shape[-1])]
    if bool((ahead.diff(dim=-1).abs() <= 2.0**-6 * ahead[..., 1:]).any()):
        raise NotChecked("two experts are so near that rounding decides which of them comes first")
    experts = order.indices[..., :k]
    rows = p[..., 0].numel()
    places = (arange(rows).unsqueeze(-1) + rows * arange(k)).reshape(*p.shape[:-1], k)
    values = p.gather(-1, experts)
    if finished is not None:
        experts = where(finished.bool().unsqueeze(-1), p.shape[-1], experts)
    return values, experts, places


@formula("npu_apply_adam")
def npu_apply_adam(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    use_locking: bool | None = None,
    use_nesterov: bool | None = None,
    *,
    out: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Adam: the powers of β are those of this step. out: weights, first and second moment before it."""
    var, m, v = out
    m = m + (1 - beta1) * (grad - m)
    v = v + (1 - beta2) * (grad * grad - v)
    rate = lr * (1 - beta2_power) ** 0.5 / (1 - beta1_power)
    moved = beta1 * m + (1 - beta1) * grad if use_nesterov else m
    return var - rate * moved / (sqrt(v) + epsilon), m, v


@formula("npu_apply_adam_w", results=3)
def npu_apply_adam_w(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: Tensor | None = None,
    amsgrad: bool | None = None,
    maximize: bool | None = None,
    *,
    out: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """AdamW: the powers of β are those of the step before. out: weights, first and second moment before it."""
    var, m, v = out[:3]
    g = -grad if maximize else grad
    m = m + (1 - beta1) * (g - m)
    v = v + (1 - beta2) * (g * g - v)
    largest = where(max_grad_norm > v, max_grad_norm, v) if amsgrad and max_grad_norm is not None else v
    step = m / (1 - beta1_power * beta1) / (sqrt(largest / (1 - beta2_power * beta2)) + epsilon)
    return var * (1 - lr * weight_decay) - lr * step, m, v
