"""Healthy programs: architectures of other people, and what breaks a property on purpose."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.preflight.case import Trial
from benchmarks.preflight.programs import (
    CAUSAL,
    MASKED,
    SEQ2SEQ,
    VISION,
    causal,
    clozes,
    masked,
    of_model,
    pictures,
    seq2seq,
    texts,
    vision,
)


def _causal(kind: str) -> Trial:
    return Trial(of_model, causal(kind), texts())


def _masked(kind: str) -> Trial:
    return Trial(of_model, masked(kind), clozes())


def _seq2seq(kind: str) -> Trial:
    batch = texts()
    return Trial(of_model, seq2seq(kind), {**batch, "labels": batch["labels"][:, :9].contiguous()})


def _vision(kind: str) -> Trial:
    return Trial(of_model, vision(kind), pictures())


def _contrastive() -> Trial:
    def loss(model: Any, batch: Any) -> Tensor:
        a, b = (nn.functional.normalize(model(x), dim=1) for x in batch)
        return nn.functional.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 16))
    return Trial(loss, model, (torch.randn(6, 8), torch.randn(6, 8)))


def _regression() -> Trial:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    return Trial(lambda m, b: nn.functional.mse_loss(m(b[0]), b[1]), model, (torch.randn(16, 8), torch.randn(16, 1)))


def _autoencoder() -> Trial:
    """A variational autoencoder samples in training on purpose."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(12, 8), nn.Linear(4, 12)

        def forward(self, x: Tensor) -> Tensor:
            mean, log_var = self.encode(x).chunk(2, 1)
            code = mean + torch.randn_like(mean) * (log_var / 2).exp() if self.training else mean
            distance = (self.decode(code) - x).pow(2).sum(1)
            return (distance - 0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum(1)).mean()

    torch.manual_seed(0)
    return Trial(lambda m, b: m(b), Model(), torch.randn(8, 12))


HEALTHY: dict[str, Callable[[], Trial]] = {
    **{f"causal {kind}": partial(_causal, kind) for kind in CAUSAL},
    **{f"masked {kind}": partial(_masked, kind) for kind in MASKED},
    **{f"seq2seq {kind}": partial(_seq2seq, kind) for kind in SEQ2SEQ},
    **{f"vision {kind}": partial(_vision, kind) for kind in VISION},
    "contrastive pairs": _contrastive,
    "regression": _regression,
    "variational autoencoder": _autoencoder,
}
