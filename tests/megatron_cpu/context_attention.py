"""Attention for context parallelism on the CPU: Megatron's torch attention refuses it, and the kernel that has it needs a GPU.

Each rank holds chunks i and 2n - 1 - i of 2n chunks of the sequence, as Megatron cuts it; keys and values of all ranks are
gathered, and the mask that comes with the batch has a column for each gathered position.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from megatron.core.transformer.dot_product_attention import DotProductAttention


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mine, group):
        ctx.group = group
        every = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(every, mine.contiguous(), group)
        return torch.cat(every)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None


class GatheredAttention(DotProductAttention):
    def __init__(self, config, *arguments, **settings):
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(alone, *arguments, **settings)

    def forward(self, query, key, value, attention_mask, *arguments, **settings):
        from megatron.core import parallel_state

        group = parallel_state.get_context_parallel_group()
        if group.size() > 1:
            key, value = (Gathered.apply(each, group) for each in (key, value))
        return super().forward(query, key, value, attention_mask, *arguments, **settings)


def positions(length: int, rank: int, size: int) -> torch.Tensor:
    """Return which positions of a sequence a rank holds, in order."""
    chunks = torch.arange(length).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def install() -> None:
    from megatron.core.models import backends

    backends.DotProductAttention = GatheredAttention
