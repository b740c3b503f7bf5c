"""What optimizers are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainprobe.op_check.references import formula
from trainprobe.op_check.references.primitives import Tensor, mean, ones_like, sqrt, zeros_like


def _of_lerp(input: Tensor, end: Tensor, weight: Any) -> Tensor:
    """Kernels start from either end, or add (1 − w) x and w e."""
    size = abs(weight)
    return (abs(input) + abs(end)).mul_(size).mul_(2).add_(abs(input))


def _of_addcmul(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: Any = 1) -> Tensor:
    return abs(tensor1 * tensor2).mul_(2 * abs(value)).add_(abs(input))


def _of_addcdiv(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: Any = 1) -> Tensor:
    return abs(tensor1 / tensor2).mul_(3 * abs(value)).add_(abs(input))


@formula("lerp", pointwise=True, rounding=_of_lerp)
def lerp(input: Tensor, end: Tensor, weight: Any) -> Tensor:
    """X + w (end − x)."""
    change = end - input
    return input + (change.mul_(weight) if isinstance(weight, float) else weight * change)


@formula("addcmul", pointwise=True, rounding=_of_addcmul)
def addcmul(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: Any = 1) -> Tensor:
    """X + value · a · b."""
    return input + (tensor1 * tensor2).mul_(value)


@formula("addcdiv", pointwise=True, rounding=_of_addcdiv)
def addcdiv(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: Any = 1) -> Tensor:
    """X + value · a / b."""
    return input + (tensor1 / tensor2).mul_(value)


def _adam(
    self: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    *,
    decoupled: bool,
    lr: Any,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> list[list[Tensor]]:
    """θ − lr m̂ / (√v̂ + ε), with m and v after the step; steps are counted before the kernel is called."""
    if found_inf is not None and bool(found_inf):
        return [[*self], [*exp_avgs], [*exp_avg_sqs], [*max_exp_avg_sqs]]
    written: list[list[Tensor]] = [[], [], [], []]
    for i, (p, g, m, v, step) in enumerate(zip(self, grads, exp_avgs, exp_avg_sqs, state_steps, strict=True)):
        g = g if grad_scale is None else g / grad_scale
        g = -g if maximize else g
        p, g = (p - lr * weight_decay * p, g) if decoupled else (p, g + weight_decay * p if weight_decay else g)
        m, v = m.lerp(g, 1 - beta1), beta2 * v + (1 - beta2) * g * g  # one step: signs of several may leave no rounding
        largest = max_exp_avg_sqs[i].maximum(v) if amsgrad else v
        first, second = 1 - beta1 ** float(step), 1 - beta2 ** float(step)
        change = m / (sqrt(largest) / second**0.5 + eps)
        written[0].append(p.sub(change, alpha=float(lr) / first))
        written[1].append(m)
        written[2].append(v)
        written[3] += [largest] if amsgrad else []
    return written


@formula("_fused_adamw")
def fused_adamw(*given: Any, **named: Any) -> list[list[Tensor]]:
    """AdamW, whose decay is apart from the gradient."""
    return _adam(*given, decoupled=True, **named)


@formula("_fused_adam")
def fused_adam(*given: Any, **named: Any) -> list[list[Tensor]]:
    """Adam, whose decay is part of the gradient."""
    return _adam(*given, decoupled=False, **named)


Near = tuple[Tensor, Tensor]  # a number, and how far a kernel may be off in it, in units of what it calculates in


def _plus(x: Near, y: Near, factor: Any) -> Near:
    """X + factor · y, before the result is rounded."""
    return x[0] + factor * y[0], x[1] + abs(factor) * (y[1] + abs(y[0]))


def _rounded(x: Near) -> Near:
    return x[0], x[1] + abs(x[0])


def _sgd(
    self: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffer_list: Sequence[Tensor],
    *,
    weight_decay: float,
    momentum: float,
    lr: Any,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> list[list[Near]]:
    """θ − lr b with b = μ b + (1 − τ) g, at the first step b = g."""
    if found_inf is not None and bool(found_inf):
        return [[(t, zeros_like(t)) for t in tensors] for tensors in (self, momentum_buffer_list)]
    written: list[list[Near]] = [[], []]
    for i, (p, gradient) in enumerate(zip(self, grads, strict=True)):
        weight = p, zeros_like(p)
        g = gradient, zeros_like(gradient)
        g = g if grad_scale is None else _rounded((gradient / grad_scale, g[1]))
        g = (-g[0], g[1]) if maximize else g
        g = _rounded(_plus(g, weight, weight_decay)) if weight_decay else g
        if momentum:
            b = g
            if not is_first_step:
                new = _rounded(((1 - dampening) * g[0], abs(1 - dampening) * g[1])) if dampening else g
                b = _plus(new, (momentum_buffer_list[i], zeros_like(p)), momentum)
            written[1].append(b)
            g = _rounded(_plus(g, _rounded(b), momentum)) if nesterov else _rounded(b)
        written[0].append(_plus(weight, g, -lr))
    return written


def _of_sgd(*given: Any, **named: Any) -> list[list[Tensor]]:
    """Worked out and not tried: a sum that cancels may hide in every try that its terms are off by the same."""
    return [[off for _, off in each] for each in _sgd(*given, **named)]


@formula("_fused_sgd", rounding=_of_sgd)
def fused_sgd(*given: Any, **named: Any) -> list[list[Tensor]]:
    """SGD with momentum and decay."""
    return [[value for value, _ in each] for each in _sgd(*given, **named)]


@formula("_amp_foreach_non_finite_check_and_unscale")
def unscaled(self: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> list[Any]:
    """Gradients times 1 / scale, and whether one of them is not finite."""
    amiss = any(not bool(g.isfinite().all()) for g in self)
    return [[g * inv_scale for g in self], ones_like(found_inf) if amiss else found_inf]


def _scale(
    current_scale: Tensor, growth_tracker: Tensor, found_inf: Tensor, growth: float, backoff: float, interval: int
) -> tuple[Tensor, Tensor]:
    """A step with an infinity makes the scale smaller, so many without one make it larger where it stays finite."""
    if bool(found_inf):
        return current_scale * backoff, zeros_like(growth_tracker)
    if int(growth_tracker) + 1 < interval:
        return current_scale, growth_tracker + 1
    larger = current_scale * growth
    return larger if float(larger) <= _LARGEST_SCALE else current_scale, zeros_like(growth_tracker)


_LARGEST_SCALE = 3.4028234663852886e38


@formula("_amp_update_scale")
def new_scale(*given: Any, **named: Any) -> Tensor:
    """The scale of GradScaler's next step."""
    return _scale(*given, **named)[0]


@formula("written_by__amp_update_scale")
def steps_since(*given: Any, **named: Any) -> list[Tensor]:
    """How many steps without an infinity there have been."""
    return [_scale(*given, **named)[1]]


@formula("batch_norm_statistics")
def batch_norm_statistics(
    input: Tensor, running_mean: Tensor, running_var: Tensor, training: bool, momentum: float, each: bool
) -> list[Tensor]:
    """(1 − m) s + m times the batch's mean, and its variance over n − 1; each: of each sample, averaged."""
    if not training:
        return [running_mean, running_var]
    dims = [d for d in range(input.ndim) if d > 1 or (d == 0 and not each)]
    count = 1
    for d in dims:
        count *= input.shape[d]
    center = mean(input, dims, True)
    square = ((input - center) ** 2).sum(dims) / (count - 1)
    center = center.reshape(square.shape)
    if each:
        center, square = mean(center, 0), mean(square, 0)
    return [
        (1 - momentum) * running_mean + momentum * center,
        (1 - momentum) * running_var + momentum * square,
    ]
