"""Products of matrices."""

from __future__ import annotations

from typing import Any

from trainprobe.op_check.references import formula
from trainprobe.op_check.references.primitives import Tensor, matmul, sum


@formula("linear")
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X Wᵀ + b, with W [out, in] or [in]."""
    product = matmul(input, weight.mT if weight.ndim > 1 else weight)
    return product if bias is None else product + bias


@formula("matmul", "mm", "bmm", "mv")
def product(input: Tensor, other: Tensor | None = None, *, mat2: Tensor | None = None, vec: Tensor | None = None) -> Tensor:
    """Σₖ aᵢₖ bₖⱼ."""
    second = next(x for x in (other, mat2, vec) if x is not None)
    return matmul(input, second)


@formula("rmatmul")
def reversed_product(input: Tensor, other: Tensor) -> Tensor:
    """Σₖ of other · input, as the operator of the right-hand side has it."""
    return matmul(other, input)


@formula("dot", "vdot")
def dot(input: Tensor, tensor: Tensor) -> Tensor:
    """Σ a b of two vectors."""
    return sum(input * tensor)


@formula("addmm", "baddbmm", "addmv")
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
    product = matmul(a, b) * alpha
    return product if beta == 0 else product + beta * input
