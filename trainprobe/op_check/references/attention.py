"""Scaled dot-product attention."""

from __future__ import annotations

import math
from typing import Any

import torch

from trainprobe.op_check.cases import NotChecked
from trainprobe.op_check.noise import gradients_alone, kept, rough, stored
from trainprobe.op_check.references import formula
from trainprobe.op_check.references.primitives import Tensor, abs, exp, log, matmul, ones, sum, where, zeros_like


def _scores(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return s · Q Kᵀ + mask, and what is seen of it; None for all."""
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = stored(matmul(query, key.mT) * factor)
    if is_causal:
        return scores, ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        return scores, attn_mask
    return (scores if attn_mask is None else stored(scores + attn_mask)), None


def _of_gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, Tensor] | None:
    """The last products of the backward: √K times the root of the sum of their squares."""
    if not query.shape[:-2] == key.shape[:-2] == value.shape[:-2] or query.ndim < 2:
        return None
    scores, seen = _scores(query, key, attn_mask, is_causal, scale)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    weights = scores.softmax(-1).nan_to_num_(0.0)
    of_scores = matmul(gradient, value.mT).mul_(weights)
    of_scores = of_scores.sub_(weights * sum(of_scores, -1, True)).square_()
    off = (matmul(abs(gradient), abs(value.mT)) * weights).square_().mul_(gradient.shape[-1])  # where the difference cancels
    factor = (1 / query.shape[-1]) if scale is None else scale**2
    rows, columns = of_scores.shape[-2:]
    return {
        "query": matmul((of_scores * columns).add_(off).mul_(factor), key.square()).sqrt_(),
        "key": matmul((of_scores * rows).add_(off).mul_(factor).mT, query.square()).sqrt_(),
        "value": matmul(weights.square_().mT, gradient.square()).mul_(rows).sqrt_(),
    }


@formula("scaled_dot_product_attention", rows=True, gradients=_of_gradients)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(s · Q Kᵀ + mask) V; the causal mask has its corner at the upper left; a row that sees nothing is 0.

    Raises NotChecked with dropout, whose mask the call does not show.
    """
    if dropout_p:
        raise NotChecked("attention with dropout: the dump does not hold which weights were dropped")
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores, seen = _scores(query, key, attn_mask, is_causal, scale)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    return _Weighing.apply(scores, value)


_EXPONENTIAL = 5  # u: fused kernels take the exponential of 20 ulp, and a verdict allows four times the noise


class _Weighing(torch.autograd.Function):
    """softmax(S) V. Its backward works as fused kernels do.

    It takes Σ P·dP as Σ G·O over the result O, and P as e^(S − L) with L = log Σ e^S as it was stored in the forward.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, value: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        largest = scores.amax(-1, True) if scores.numel() else scores.sum(-1, True)
        largest = where(largest == -math.inf, zeros_like(largest), largest)
        powers = rough(exp(scores - largest), _EXPONENTIAL)
        total = sum(powers, -1, True)
        weights = where(total == 0, zeros_like(powers), powers / where(total == 0, zeros_like(total) + 1, total))
        weights = stored(weights)
        out = matmul(weights, value)
        ctx.scores = scores.shape
        if gradients_alone():
            logs = largest + log(where(total == 0, zeros_like(total) + 1, total))
            weights = weights * exp(logs - rough(logs, 1))
        ctx.save_for_backward(weights, value, kept(out))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        weights, value, out = ctx.saved_tensors
        of_weights = stored(matmul(gradient, value.mT)) - sum(gradient * out, -1, True)
        of_value = matmul(weights.mT, gradient)
        return (weights * of_weights).sum_to_size(ctx.scores), of_value.sum_to_size(value.shape)
