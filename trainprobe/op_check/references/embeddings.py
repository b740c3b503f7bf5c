"""Embeddings."""

from __future__ import annotations

from trainprobe.op_check.references import formula
from trainprobe.op_check.references.primitives import Tensor, index_select, where


@formula("embedding")
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Rows of the weight; the row of padding_idx gets no gradient. Raises NotImplementedError for what changes the weight."""
    if (
        weight.dtype == input.dtype or not weight.dtype.is_floating_point
    ):  # torch.embedding has its arguments the other way round
        input, weight = weight, input
    if max_norm is not None or scale_grad_by_freq:
        raise NotImplementedError("embedding with max_norm or scale_grad_by_freq has no formula here")
    rows = index_select(weight, 0, input.reshape(-1)).reshape(*input.shape, weight.shape[1])
    if padding_idx is None or padding_idx == -1:
        return rows
    row = padding_idx if padding_idx >= 0 else weight.shape[0] + padding_idx
    return where((input == row).unsqueeze(-1), rows.detach(), rows)
