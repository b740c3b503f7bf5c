"""Calls of a loop that depend on how many rows a batch has, in a form that also fits another batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def of_any_rows(function: Any, args: Any) -> tuple[Any, Any]:
    """Return a call that leaves the first dimension as it is, also where the number of rows is another."""
    if getattr(function, "__name__", "") not in ("view", "reshape") or len(args) < 2 or not isinstance(args[0], Tensor):
        return function, args
    shape = args[1] if isinstance(args[1], list | tuple) else args[1:]
    if not args[0].dim() or not shape or isinstance(shape[0], torch.dtype) or shape[0] != args[0].shape[0]:
        return function, args
    return _reshaped, (args[0], tuple(shape[1:]))


def _reshaped(x: Tensor, rest: tuple[int, ...]) -> Tensor:
    return x.reshape(len(x), *rest)


def row_numbers(rows: Tensor) -> Tensor:
    """Return int64 [rows]: the numbers of the rows of a tensor, from 0."""
    return torch.arange(len(rows), device=rows.device)


def with_gradient(rows: Tensor) -> Tensor:
    """Return a leaf that requires a gradient, as a penalty asks for that of its rows."""
    return rows.detach().requires_grad_()
