"""Models that generate, contrast or imitate: plain loops, one of them on Accelerate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.bugs.open_bench.bug import Watch
from benchmarks.bugs.open_bench.vision import stripes


class VAE(nn.Module):
    """The variational autoencoder of the examples."""

    def __init__(self, reparameterized: bool) -> None:
        super().__init__()
        self.reparameterized = reparameterized
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 48), nn.Linear(48, 6), nn.Linear(48, 6)
        self.fc3, self.fc4 = nn.Linear(6, 48), nn.Linear(48, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = functional.relu(self.fc1(x))
        mu, logvar = self.fc21(h), self.fc22(h)
        posterior = torch.distributions.Normal(mu, (0.5 * logvar).exp())
        z = posterior.rsample() if self.reparameterized else posterior.sample()
        return torch.sigmoid(self.fc4(functional.relu(self.fc3(z)))), mu, logvar


def vae(bug: str, watch: Watch) -> None:
    torch.manual_seed(20)
    pictures = stripes(512)[0].flatten(1).float() / 255
    model = VAE(reparameterized=bug != "sampled_without_gradient")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(pictures, batch_size=32, shuffle=True)
    with watch.loop(model, optimizer) as probe:
        for _epoch in range(5):
            for data in loader:
                with probe.step():
                    optimizer.zero_grad()
                    recon, mu, logvar = model(data)
                    bce = functional.binary_cross_entropy(recon, data, reduction="sum")
                    loss = bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
                    loss.backward()
                    optimizer.step()
                    probe.note("loss", loss / len(data))


def gan(bug: str, watch: Watch) -> None:
    """DCGAN's order of things: the discriminator on real and fake pictures, then the generator."""
    torch.manual_seed(21)
    pictures = stripes(512)[0].flatten(1).float() / 127.5 - 1
    net_g = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 64), nn.Tanh())
    net_d = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    nets = nn.ModuleDict({"generator": net_g, "discriminator": net_d})
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-4, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    loader = torch.utils.data.DataLoader(pictures, batch_size=32, shuffle=True)
    with watch.loop(nets, [optimizer_g, optimizer_d]) as probe:
        for _epoch in range(4):
            for real in loader:
                with probe.step():
                    one, zero = torch.ones(len(real), 1), torch.zeros(len(real), 1)
                    optimizer_g.zero_grad()
                    optimizer_d.zero_grad()
                    fake = net_g(torch.randn(len(real), 8))
                    shown = fake if bug == "fake_not_detached" else fake.detach()
                    loss_d = criterion(net_d(real), one) + criterion(net_d(shown), zero)
                    loss_d.backward()
                    optimizer_d.step()
                    again = net_g(torch.randn(len(real), 8))
                    loss_g = criterion(net_d(again), one)
                    loss_g.backward()
                    optimizer_g.step()
                    probe.note("loss_d", loss_d)
                    probe.note("loss_g", loss_g)


class Denoiser(nn.Module):
    """Predicts the noise in a point, given the time."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.enter = nn.Embedding(50, 32), nn.Linear(2, 32)
        self.middle, self.leave = nn.Linear(32, 32), nn.Linear(32, 2)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.leave(functional.silu(self.middle(functional.silu(self.enter(x) + self.time(t)))))


def diffusion(bug: str, watch: Watch) -> None:
    """An unconditional diffusion on Accelerate: two micro-batches a step, clipping, samples for the eye at intervals."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    torch.manual_seed(22)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    angle = torch.rand(1024, generator=torch.Generator().manual_seed(22)) * 6.283
    points = torch.stack([angle.cos(), angle.sin()], 1)
    model: Any = Denoiser()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader: Any = torch.utils.data.DataLoader(points, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    kept = torch.linspace(0.999, 0.02, 50)
    update = 0

    def micro(batch: Tensor) -> Tensor:
        with accelerator.accumulate(model):
            noise, t = torch.randn_like(batch), torch.randint(0, 50, (len(batch),))
            a = kept[t][:, None]
            loss = functional.mse_loss(model(a.sqrt() * batch + (1 - a).sqrt() * noise, t), noise)
            accelerator.backward(loss)
            if accelerator.sync_gradients or bug == "clipped_each_micro_batch":
                accelerator.clip_grad_norm_(model.parameters(), 0.15)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    with watch.loop(model, optimizer) as probe:
        for _epoch in range(4):
            batches = iter(loader)
            for batch in batches:
                with probe.step():
                    losses = [micro(batch)]
                    losses.append(micro(next(batches)))
                    probe.note("loss", torch.stack(losses).mean())
                update += 1
                if update % 8 == 0:
                    seeded = torch.manual_seed(0) if bug == "seeded_by_sampling" else torch.Generator().manual_seed(0)
                    with torch.no_grad():
                        model(torch.randn(16, 2, generator=seeded), torch.full((16,), 49))


def contrast(bug: str, watch: Watch) -> None:
    """SimCLR: two views of each picture, all others are negatives."""
    torch.manual_seed(23)
    pictures = stripes(512)[0].flatten(1).float() / 64 - 2
    model = nn.ModuleDict(
        {
            "encoder": nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU()),
            "projector": nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 16)),
        }
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-6)
    loader = torch.utils.data.DataLoader(pictures, batch_size=32, shuffle=True)
    with watch.loop(model, optimizer) as probe:
        for _epoch in range(4):
            for batch in loader:
                with probe.step():
                    views = torch.cat([batch + 0.3 * torch.randn_like(batch) for _ in range(2)])
                    z = functional.normalize(model["projector"](model["encoder"](views)), dim=1)
                    similarity = z @ z.T / 0.2
                    if bug != "compared_with_itself":
                        similarity = similarity.masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
                    n = len(batch)
                    loss = functional.cross_entropy(similarity, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    probe.note("loss", loss)


class Classifier(nn.Sequential):
    """A classifier with dropout."""

    def __init__(self, width: int) -> None:
        layers = nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 4)
        super().__init__(*layers)


class Distiller(nn.Module):
    """A teacher and a student in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = Classifier(64), Classifier(16)
        self.teacher.requires_grad_(False)


def distill(bug: str, watch: Watch) -> None:
    torch.manual_seed(24)
    pictures, labels = stripes(512)
    pictures = pictures.flatten(1).float() / 64 - 2
    model = Distiller()
    for _ in range(30):
        model.teacher(pictures)  # stands for its training: the running statistics have seen data
    optimizer = torch.optim.AdamW(model.student.parameters(), lr=2e-3)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(pictures, labels), batch_size=32, shuffle=True)
    temperature = 2.0
    with watch.loop(model, optimizer) as probe:
        for _epoch in range(4):
            model.train()
            if bug != "teacher_in_training_mode":
                model.teacher.eval()
            for x, y in loader:
                with probe.step():
                    with torch.no_grad():
                        taught = model.teacher(x)
                    out = model.student(x)
                    soft = (taught / temperature).softmax(-1)
                    said = (taught if bug == "teacher_twice" else out) / temperature
                    said = said.softmax(-1) if bug == "divergence_of_probabilities" else said.log_softmax(-1)
                    loss = functional.cross_entropy(out, y) + temperature**2 * functional.kl_div(
                        said, soft, reduction="batchmean"
                    )
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    probe.note("loss", loss)
