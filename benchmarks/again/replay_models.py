"""Modules that the replay bench trains: some of a user's own, one with a kernel that is wrong in float32 alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class LogOfPart(nn.Module):
    """The logarithm of each element's share of its row. offset: keeps a share from being 0."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        part = x.relu() + self.offset
        return torch.log(part / (part.sum(-1, keepdim=True) + 1e-6))


@torch.library.custom_op("replay_bench::project", mutates_args=())
def project(x: Tensor, weight: Tensor, wrong: bool) -> Tensor:
    """Multiply as `x @ weight.T`, in blocks of 8; a wrong one leaves out what is behind the last whole block."""
    size = x.shape[-1]
    whole = size - size % 8 if wrong and x.dtype is torch.float32 else size
    out = x.new_zeros(*x.shape[:-1], weight.shape[0])
    for at in range(0, whole, 8):
        end = min(at + 8, whole)
        out += x[..., at:end] @ weight[:, at:end].T
    return out


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight = ctx.saved_tensors
    return gradient @ weight, gradient.T @ x, None


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


project.register_autograd(_gradients, setup_context=_keep)


class Projection(nn.Module):
    """A linear layer with the op above."""

    def __init__(self, width: int, out: int, wrong: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width) / width**0.5)
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self.weight, self.wrong)
