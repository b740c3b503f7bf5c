"""Products of matrices."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from trainprobe.op_check.noise import gradients_alone
from trainprobe.op_check.references import Sum, formula
from trainprobe.op_check.references.primitives import Tensor, cat, matmul, stack, sum

_BY_NORMS = ContextVar("by_norms", default=False)


@contextmanager
def by_norms() -> Generator[None]:
    """Have formulas multiply the norms of rows and columns in place of matrices: no element of a product is larger."""
    token = _BY_NORMS.set(True)
    try:
        yield
    finally:
        _BY_NORMS.reset(token)


def _times(a: Tensor, b: Tensor) -> Tensor:
    if not _BY_NORMS.get() or a.ndim < 2 or b.ndim < 2:
        return matmul(a, b)
    return matmul((a * a).sum(-1, True).sqrt_(), (b * b).sum(-2, True).sqrt_())


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """A B, which is left out where its gradients alone are wanted."""
    if gradients_alone() and a.ndim > 1 and b.ndim > 1:
        return _GradientsOfProduct.apply(a, b)
    return _times(a, b)


class _GradientsOfProduct(torch.autograd.Function):
    """The gradients of A B, G Bᵀ and Aᵀ G. In place of the product stand zeros."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(a, b)
        shape = [*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]]
        return a.new_zeros(()).expand(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        a, b = ctx.saved_tensors
        of_a, of_b = ctx.needs_input_grad
        if b.ndim == 2:  # one product over all of A's rows
            a_rows, rows = a.reshape(-1, a.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
            of_rows = _times(rows, b.mT).reshape(a.shape) if of_a else None
            if of_b and b.mT.is_contiguous():  # a weight: its gradient comes out as it lies in memory
                return of_rows, _times(rows.mT, a_rows).mT
            return of_rows, _times(a_rows.mT, rows) if of_b else None
        return (
            _times(gradient, b.mT).sum_to_size(a.shape) if of_a else None,
            _times(a.mT, gradient).sum_to_size(b.shape) if of_b else None,
        )


def _inner(input: Tensor, *given: Any, **named: Any) -> int:
    """The length of the rows of the first factor."""
    return input.shape[-1] if input.ndim else 1


def _inner_of_added(
    input: Tensor, first: Tensor | None = None, *given: Any, mat1: Any = None, batch1: Any = None, mat: Any = None, **named: Any
) -> int:
    return next(x for x in (first, mat1, batch1, mat) if x is not None).shape[-1]


@formula("linear", adds=Sum(_inner, ("bias",)))
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X Wᵀ + b, with W [out, in] or [in]."""
    product = _matmul(input, weight.mT if weight.ndim > 1 else weight)
    return product if bias is None else product + bias


@formula("matmul", "mm", "bmm", "mv", adds=Sum(_inner))
def product(input: Tensor, other: Tensor | None = None, *, mat2: Tensor | None = None, vec: Tensor | None = None) -> Tensor:
    """Σₖ aᵢₖ bₖⱼ."""
    second = next(x for x in (other, mat2, vec) if x is not None)
    return _matmul(input, second)


@formula("rmatmul")
def reversed_product(input: Tensor, other: Tensor) -> Tensor:
    """Σₖ of other · input, as the operator of the right-hand side has it."""
    return _matmul(other, input)


@formula("dot", "vdot", adds=Sum(_inner))
def dot(input: Tensor, tensor: Tensor) -> Tensor:
    """Σ a b of two vectors."""
    return sum(input * tensor)


@formula("addmm", "baddbmm", "addmv", adds=Sum(_inner_of_added, ("input",)))
def added(
    input: Tensor,
    first: Tensor | None = None,
    second: Tensor | None = None,
    *,
    beta: Any = 1,
    alpha: Any = 1,
    mat1: Tensor | None = None,
    mat2: Tensor | None = None,
    batch1: Tensor | None = None,
    batch2: Tensor | None = None,
    mat: Tensor | None = None,
    vec: Tensor | None = None,
) -> Tensor:
    """Β · input + α · A B; where β is 0, the input is not read."""
    a = next(x for x in (first, mat1, batch1, mat) if x is not None)
    b = next(x for x in (second, mat2, batch2, vec) if x is not None)
    product = _matmul(a, b) * alpha
    return product if beta == 0 else product + beta * input


@formula("_grouped_mm", "grouped_mm")
def grouped(
    input: Tensor, mat2: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """One product for each group: of rows of the first, of columns of the second, or of what both are added up over.

    offs: where each group ends. What lies behind the last is written by no kernel.
    """
    if offs is None:
        return _matmul(input, mat2)
    ends = [int(end) for end in offs]
    spans = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    if input.ndim == 2 and mat2.ndim == 2:
        return stack([matmul(input[:, span], mat2[span]) for span in spans])
    if input.ndim == 2:
        whole = cat([matmul(input[span], mat2[i]) for i, span in enumerate(spans)], 0)
        if len(whole) < len(input):
            raise NotImplementedError("rows that belong to no group")
        return whole
    return cat([matmul(input[i], mat2[:, span]) for i, span in enumerate(spans)], 1)
