"""Softmax and the losses that stand on it."""

from __future__ import annotations

from typing import Any

from trainprobe.op_check.noise import from_result, gradients_alone, kept, stored
from trainprobe.op_check.references import formula
from trainprobe.op_check.references.matrices import linear
from trainprobe.op_check.references.primitives import Tensor, amax, clamp, exp, gather, log, log1p, mean, sum, where, zeros_like


def _shifted(x: Tensor, dim: int) -> Tensor:
    """X less its largest along `dim`; a row of −inf stays so, and gives NaN as 0/0 does."""
    return x - amax(x.detach(), dim, True) if x.numel() and x.ndim else x - x.detach() if not x.ndim else x


@formula("softmax", "_softmax")
def softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None, half_to_float: bool = False
) -> Tensor:
    """e^x / Σ e^x along `dim`."""
    dim = _implied(input) if dim is None else dim
    return from_result(input, lambda x: _normalised(x, dim), lambda y, g: y * g - y * _total(y * g, dim))


def _normalised(x: Tensor, dim: int) -> Tensor:
    powers = exp(_shifted(x, dim))
    return powers / _total(powers, dim)


def _total(x: Tensor, dim: int) -> Tensor:
    return sum(x, dim, True) if x.ndim else x


@formula("softmin")
def softmin(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
    """Softmax of −x."""
    return softmax(-input, dim)


@formula("log_softmax", "_log_softmax")
def log_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None, half_to_float: bool = False
) -> Tensor:
    """X − log Σ e^x along `dim`."""
    dim = _implied(input) if dim is None else dim

    def value(x: Tensor) -> Tensor:
        shifted = _shifted(x, dim)
        return shifted - log(_total(exp(shifted), dim))

    return from_result(input, value, lambda y, g: g - exp(y) * _total(g, dim))


@formula("logsumexp")
def logsumexp(input: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """log Σ e^x along `dim`."""
    dims = [dim] if isinstance(dim, int) else list(dim)
    largest = amax(input.detach(), dims, True)
    largest = where(largest.isfinite(), largest, zeros_like(largest))
    whole = log(sum(exp(input - largest), dims, True)) + largest
    return kept(whole if keepdim else whole.squeeze(tuple(dims)) if input.ndim else whole.reshape(()))


def _implied(input: Tensor) -> int:
    """The dimension that torch chose in its first years, and still does where none is given."""
    return 0 if input.ndim in (0, 1, 3) else 1


@formula("nll_loss", "nll_loss_nd")
def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """−w[t] · x[t], averaged by the weights; classes are along dimension 1."""
    return _picked(input, target, weight, ignore_index, _reduction(size_average, reduce, reduction))


@formula("cross_entropy")
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """−log softmax(x)[t], or −Σ q log softmax(x) for targets q that are probabilities."""
    dim = 0 if input.ndim == 1 else 1
    logs = stored(log_softmax(input, dim))
    classes = input.shape[dim]
    how = _reduction(size_average, reduce, reduction)
    if target.dtype.is_floating_point:
        soft = target * (1 - label_smoothing) + label_smoothing / classes
        weighed = logs * soft if weight is None else logs * soft * _along(weight, dim, input.ndim)
        losses = stored(-sum(weighed, dim))
        count = input.numel() / max(1, classes)
        return losses if how == "none" else sum(losses) if how == "sum" else sum(losses) / count
    picked = stored(_picked(logs, target, weight, ignore_index, how))
    if label_smoothing == 0.0:
        return picked
    smooth = -sum(logs if weight is None else logs * _along(weight, dim, input.ndim), dim)
    seen = target != ignore_index
    smooth = stored(where(seen, smooth, zeros_like(smooth)))
    if how == "mean":
        smooth = sum(smooth) / _weights(target, weight, seen, input)
    elif how == "sum":
        smooth = sum(smooth)
    return (1 - label_smoothing) * picked + label_smoothing / classes * smooth


@formula("linear_cross_entropy")
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> Tensor:
    """Cross entropy of X Wᵀ + b, for weights of two dimensions."""
    if linear_weight.ndim != 2:
        raise NotImplementedError
    ignored = -100 if ignore_index is None else ignore_index
    logits = stored(linear(input, linear_weight, linear_bias))
    return cross_entropy(logits, target, weight, None, ignored, None, reduction, label_smoothing)


@formula("binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *given: Any,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: Any = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    """w · ((1 − t) x + (1 + (p − 1) t) log(1 + e^−x)), with −x + log(1 + e^x) in place of the logarithm where x is negative."""
    if gradients_alone():
        raise NotImplementedError  # torch's backward stores each of its steps in the format of the gradient
    rest: list[Any] = [*given]
    if rest and not isinstance(rest[0], bool) and len(rest) < 3:  # torch itself has the weights of positives here
        pos_weight, reduction = rest[0], rest[1] if len(rest) > 1 else reduction
    else:
        options: list[Any] = [size_average, reduce, reduction, pos_weight]
        size_average, reduce, reduction, pos_weight = [*given, *options[len(given) :]][: len(options)]
    soft = log1p(exp(-input.abs())) + clamp(-input, min=0.0)
    losses = (1 - target) * input + (soft if pos_weight is None else (1 + (pos_weight - 1) * target) * soft)
    losses = stored(losses if weight is None else losses * weight)
    how = _reduction(size_average, reduce, reduction)
    return losses if how == "none" else sum(losses) if how == "sum" else mean(losses)


def _picked(logs: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, how: str) -> Tensor:
    dim = 0 if logs.ndim == 1 else 1
    seen = target != ignore_index
    safe = where(seen, target, zeros_like(target))
    chosen = -gather(logs, dim, safe.unsqueeze(dim)).squeeze(dim)
    if weight is not None:
        chosen = chosen * weight[safe]
    chosen = where(seen, chosen, zeros_like(chosen))
    if how == "none":
        return chosen
    return sum(chosen) if how == "sum" else sum(chosen) / _weights(target, weight, seen, logs)


def _weights(target: Tensor, weight: Tensor | None, seen: Tensor, like: Tensor) -> Any:
    if weight is None:
        return sum(seen).to(like.dtype)
    return sum(where(seen, weight[where(seen, target, zeros_like(target))], zeros_like(seen, dtype=like.dtype)))


def _along(weight: Tensor, dim: int, ndim: int) -> Tensor:
    return weight.reshape([-1 if i == dim else 1 for i in range(ndim)])


def _reduction(size_average: bool | None, reduce: bool | None, reduction: Any) -> str:
    if size_average is not None or reduce is not None:
        return "none" if reduce is False else "sum" if size_average is False else "mean"
    return reduction if isinstance(reduction, str) else ("none", "mean", "sum")[int(reduction)]
