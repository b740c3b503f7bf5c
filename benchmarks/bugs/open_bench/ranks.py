"""Trainings on two data-parallel ranks under DistributedDataParallel."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradient
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.bugs.open_bench.bug import Watch


def batches(seed: int) -> torch.Generator:
    """The data stream of this rank."""
    return torch.Generator().manual_seed(seed + 100 * dist.get_rank())


class Codebook(nn.Module):
    """A codebook that follows the moving average of what is assigned to each of its codes."""

    def __init__(self, reduced: bool) -> None:
        super().__init__()
        self.reduced = reduced
        self.register_buffer("embed", torch.randn(16, 4))
        self.register_buffer("cluster_size", torch.ones(16))
        self.register_buffer("embed_avg", self.embed.clone())

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.cdist(z.detach(), self.embed).argmin(1)
        quantized = self.embed[chosen]
        if self.training:
            onehot = functional.one_hot(chosen, 16).float()
            counts, sums = onehot.sum(0), onehot.T @ z.detach()
            if self.reduced:
                dist.all_reduce(counts)
                dist.all_reduce(sums)
            self.cluster_size.mul_(0.9).add_(counts, alpha=0.1)
            self.embed_avg.mul_(0.9).add_(sums, alpha=0.1)
            self.embed.copy_(self.embed_avg / (self.cluster_size[:, None] + 1e-3))
        return z + (quantized - z).detach(), functional.mse_loss(z, quantized)


class Codec(nn.Module):
    """An autoencoder over a codebook."""

    def __init__(self, reduced: bool) -> None:
        super().__init__()
        self.encoder, self.quantizer, self.decoder = nn.Linear(12, 4), Codebook(reduced), nn.Linear(4, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        quantized, commitment = self.quantizer(self.encoder(x))
        return self.decoder(quantized), commitment


def codec(bug: str, watch: Watch) -> None:
    torch.manual_seed(50)
    model = DistributedDataParallel(Codec(bug != "codebook_of_each_rank"), broadcast_buffers=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    g = batches(50)
    with watch.loop(model, optimizer) as probe:
        for _ in range(60):
            x = torch.randn(32, 12, generator=g).sign() + 0.1 * torch.randn(32, 12, generator=g)
            with probe.step():
                out, commitment = model(x)
                loss = functional.mse_loss(out, x) + 0.25 * commitment
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)


def unfreezing(bug: str, watch: Watch) -> None:
    """The head alone for 24 steps, then the whole; the healthy way wraps the model again."""
    torch.manual_seed(51)
    net = nn.Sequential(nn.Sequential(nn.Linear(12, 32), nn.ReLU()), nn.Linear(32, 4))
    net[0].requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model = DistributedDataParallel(net)
    g = batches(51)
    with watch.loop(net, optimizer) as probe:
        for step in range(70):
            if step == 24:
                net[0].requires_grad_(True)
                model = model if bug == "unfrozen_after_wrapping" else DistributedDataParallel(net)
            x = torch.randn(32, 12, generator=g)
            with probe.step():
                loss = functional.cross_entropy(model(x), x[:, :4].argmax(1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)


class Towers(nn.Module):
    """CLIP's two towers and its scale."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = (nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (
            functional.normalize(self.image(image), dim=1),
            functional.normalize(self.text(text), dim=1),
            self.logit_scale.exp(),
        )


def gathered(features: Tensor) -> Tensor:
    """The features of all ranks, without a gradient."""
    pieces = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, features.contiguous())
    return torch.cat(pieces)


def clip(bug: str, watch: Watch) -> None:
    """Each rank contrasts its own pairs with those of all ranks."""
    torch.manual_seed(52)
    model = DistributedDataParallel(Towers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    g, mixing = batches(52), torch.randn(12, 12, generator=torch.Generator().manual_seed(0)) / 3
    with watch.loop(model, optimizer) as probe:
        for _ in range(60):
            seen = torch.randn(16, 12, generator=g)
            with probe.step():
                image, text, scale = model(seen, seen @ mixing + 0.1 * torch.randn(16, 12, generator=g))
                if bug == "gathered_without_gradient":
                    images, texts = gathered(image), gathered(text)
                else:
                    images, texts = (torch.cat(with_gradient.all_gather(f)) for f in (image, text))
                own = torch.arange(16) + 16 * dist.get_rank()
                loss = (
                    functional.cross_entropy(scale * image @ texts.T, own)
                    + functional.cross_entropy(scale * text @ images.T, own)
                ) / 2
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
