"""Which places of rows of unequal lengths are padding, told from the rows alone."""

from __future__ import annotations

import torch
from torch import Tensor


def tail(t: Tensor) -> Tensor:
    """Return which places of a row are of the run of one token, or of zeros, that ends it: bool [rows, time].

    t: tokens [rows, time], or numbers [rows, time, features]. Nothing is padding where no such run is of two places or more,
    or where what pads also stands elsewhere in a row.
    """
    if t.shape[1] < 2:
        return t.new_zeros(t.shape[:2], dtype=torch.bool)
    if t.dim() == 2:
        twice = t[:, -1] == t[:, -2]
        pads = t == torch.where(twice, t[:, -1], t.new_full((), -1)).amax()
    else:
        pads = (t == 0).all(2)
    run = pads.flip(1).int().cumprod(1).flip(1).bool()
    return run & ~(pads & ~run).any() & run[:, -2].any()
