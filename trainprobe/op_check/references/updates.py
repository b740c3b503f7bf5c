"""What optimizers are made of."""

from __future__ import annotations

from typing import Any

from trainprobe.op_check.references import formula
from trainprobe.op_check.references.primitives import Tensor


@formula("lerp", pointwise=True)
def lerp(input: Tensor, end: Tensor, weight: Any) -> Tensor:
    """X + w (end − x)."""
    return input + weight * (end - input)


@formula("addcmul", pointwise=True)
def addcmul(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: Any = 1) -> Tensor:
    """X + value · a · b."""
    return input + value * (tensor1 * tensor2)


@formula("addcdiv", pointwise=True)
def addcdiv(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: Any = 1) -> Tensor:
    """X + value · a / b."""
    return input + value * (tensor1 / tensor2)
