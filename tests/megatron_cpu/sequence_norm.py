"""A norm for sequence parallelism on the CPU: Megatron's own torch norm refuses it, because it does not mark its weight."""

from __future__ import annotations

import torch


class SequenceNorm(torch.nn.RMSNorm):
    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


def install() -> None:
    from megatron.core.models import backends
    from megatron.core.transformer import transformer_block

    backends.WrappedTorchNorm = transformer_block.LayerNormImpl = SequenceNorm
