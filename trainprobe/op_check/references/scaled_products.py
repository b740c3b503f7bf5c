"""Products of matrices in 8-bit formats with scales: one for all, one a row, or one a block as MX formats have them."""

from __future__ import annotations

from typing import Any

from trainprobe.op_check.references import Sum, formula
from trainprobe.op_check.references.primitives import Tensor, matmul

_BLOCKS = (32, 16)  # numbers along K that share a scale, where the scales' own layout does not say


def _length(input: Tensor, *given: Any, **named: Any) -> int:
    return input.shape[-1]


@formula("_scaled_mm", adds=Sum(_length, ("bias",)))
def scaled_mm(
    input: Tensor,
    mat2: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """Σₖ sᵢₖ aᵢₖ tₖⱼ bₖⱼ + bias. A scale of two dimensions holds for a rectangle of numbers, one of one for a block along K."""
    if scale_result is not None:
        raise NotImplementedError("the scale of an 8-bit result")
    a = input * _spread(scale_a, *input.shape)
    b = mat2.mT * _spread(scale_b.mT if scale_b.ndim == 2 else scale_b, *mat2.mT.shape)
    product = matmul(a, b.mT)
    return product if bias is None else product + bias


def _spread(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Return the scale of each number of a matrix whose rows lie along K."""
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.ndim == 1:
        scale = _rows_of_tiles(scale, rows, columns)
    if rows % scale.shape[0] or columns % scale.shape[1]:
        raise NotImplementedError(f"scales of shape {[*scale.shape]} for numbers of shape {[rows, columns]}")
    each = scale.repeat_interleave(rows // scale.shape[0], 0)
    return each.repeat_interleave(columns // scale.shape[1], 1)


def _rows_of_tiles(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Return [rows, blocks] of scales that lie in tiles of 128 rows and 4 blocks, in each of which 32 rows lie side by side."""
    tall = -(-rows // 128)
    for block in _BLOCKS:
        wide = -(-columns // (4 * block))
        if columns % block == 0 and scale.numel() == tall * wide * 512:
            tiles = scale.reshape(tall, wide, 32, 4, 4)
            return tiles.permute(0, 3, 2, 1, 4).reshape(tall * 128, wide * 4)[:rows, : columns // block]
    raise NotImplementedError(f"{scale.numel()} scales for numbers of shape {[rows, columns]}")
