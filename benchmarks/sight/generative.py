"""Programs that generate: a diffusion model with an average of its weights, and two adversaries."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

import trainprobe
from benchmarks.sight.case import STEPS
from benchmarks.sight.parts import mlp, stream


class Denoiser(nn.Module):
    """Guesses the noise in points of the plane, from the step of the noise 0 to 999."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.net = nn.Linear(16, 32), mlp(34, 64, 2, act=nn.SiLU)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * torch.logspace(0, -3, 8)
        return self.net(torch.cat([x, torch.relu(self.time(torch.cat([angles.sin(), angles.cos()], 1)))], 1))


def diffusion(bug: str) -> None:
    """A diffusion model; its average (0.99) is what would be sampled from."""
    torch.manual_seed(0)
    draw, model = stream(20), Denoiser()
    average = copy.deepcopy(model).requires_grad_(False)
    if bug == "average_in_bfloat16":
        average.bfloat16()
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    t = torch.randint(0, 1000, (64,), generator=draw)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            angle = 6.28 * torch.rand(64, generator=draw)
            clean = torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(64, 2, generator=draw)
            noise = torch.randn(64, 2, generator=draw)
            if bug != "step_drawn_once":
                t = torch.randint(0, 1000, (64,), generator=draw)
            a = kept[t][:, None]
            noisy = a.sqrt() * clean + (1 - a).sqrt() * noise
            with probe.step():
                given = noise if bug == "noise_is_given" else noisy
                seen = t.bfloat16() if bug == "steps_in_bfloat16" else t
                loss = functional.mse_loss(model(given, seen.float()), noise)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
                for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                    gap = (mean - now).to(mean.dtype)
                    mean.data.add_(gap, alpha=0.01 if bug == "average_pushed_away" else -0.01)


class Adversaries(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = mlp(8, 32, 2), mlp(2, 32, 1, act=lambda: nn.LeakyReLU(0.2))


def adversaries(bug: str) -> None:
    """Two networks against each other; each has an optimizer."""
    torch.manual_seed(0)
    draw, both = stream(21), Adversaries()
    rates = {"lr": 2e-3, "betas": (0.5, 0.99)}
    for_generator = torch.optim.Adam(both.generator.parameters(), **rates)
    for_discriminator = torch.optim.Adam(both.discriminator.parameters(), **rates)
    right, wrong = torch.ones(64, 1), torch.zeros(64, 1)
    with trainprobe.watch(both, [for_generator, for_discriminator]) as probe:
        for _ in range(STEPS):
            real = torch.randn(64, 2, generator=draw) * 0.3 + torch.tensor([1.0, -1.0])
            with probe.step():
                made = both.generator(torch.randn(64, 8, generator=draw))
                if bug != "generators_gradient_kept":
                    for_discriminator.zero_grad()
                told, doubted = both.discriminator(real), both.discriminator(made.detach())
                d_loss = functional.binary_cross_entropy_with_logits(told, right)
                d_loss = d_loss + functional.binary_cross_entropy_with_logits(doubted, wrong)
                d_loss.backward()
                for_discriminator.step()
                for_discriminator.zero_grad()
                for_generator.zero_grad()
                g_loss = functional.binary_cross_entropy_with_logits(both.discriminator(made), right)
                g_loss.backward()
                for_generator.step()
                probe.note("d_loss", d_loss)
                probe.note("g_loss", g_loss)
