"""Ops that were bound by name at import (`from torch import relu`), out= arguments, and a registered custom op."""

import torch
from torch import matmul, nn, relu
from torch.nn.functional import linear, softmax

from tests.zoo import normal


@torch.library.custom_op("trainprobe_zoo::double_sum", mutates_args=())
def double_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 2 * (x + y)


double_sum.register_autograd(lambda ctx, gradient: (2 * gradient, 2 * gradient))
double_sum.register_fake(lambda x, y: torch.empty_like(x))


class Unbound(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))

    def forward(self, x):
        y = relu(linear(x, self.weight))
        with torch.no_grad():
            scratch = torch.empty(4, 4)
            matmul(y.detach()[:4], y.detach()[:4].T, out=scratch)
        z = softmax(y, -1) * scratch.mean()
        return double_sum(z, y), torch.ops.trainprobe_zoo.double_sum(y, y)


def build():
    return Unbound()


def batch(step):
    return (normal(step, 4, 6),)
