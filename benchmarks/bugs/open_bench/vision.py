"""Image and table trainings in the style of examples and tutorials: plain loops, one process."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.bugs.open_bench.bug import Watch


def stripes(count: int, channels: int = 1, classes: int = 4, size: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Bytes [count, channels, size, size] of striped pictures, sorted by class as files in folders are, and their classes."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) * classes // count
    phase = torch.arange(size) * (labels[:, None] + 1) * 0.7
    pictures = phase.sin()[:, None, None, :] + 0.5 * torch.randn(count, channels, size, size, generator=g)
    return ((pictures + 2.5) * 51).clamp(0, 255).to(torch.uint8), labels


class Net(nn.Module):
    """The network of the MNIST example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 1), nn.Conv2d(8, 16, 3, 1)
        self.dropout1, self.fc1, self.fc2 = nn.Dropout(0.25), nn.Linear(64, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv2(functional.relu(self.conv1(x)))), 2)
        return self.fc2(functional.relu(self.fc1(self.dropout1(x.flatten(1)))))


class Scores(Net):
    """The same, as somebody wrote it who wanted its outputs to be never negative, or to be probabilities."""

    def __init__(self, last: Any) -> None:
        super().__init__()
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(super().forward(x))


def mnist(bug: str, watch: Watch) -> None:
    torch.manual_seed(1)
    pictures, labels = stripes(480)
    loader = DataLoader(TensorDataset(pictures, labels), batch_size=32, shuffle=bug != "not_shuffled")
    last = {"double_softmax": nn.Softmax(dim=1), "relu_on_logits": nn.ReLU()}.get(bug)
    model = Net() if last is None else Scores(last)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    with watch.loop(model, optimizer) as probe:
        for _epoch in range(5):
            model.train()
            if bug == "zero_grad_per_epoch":
                optimizer.zero_grad()
            for data, target in loader:
                with probe.step():
                    data = data.float() / 255
                    if bug == "divided_by_255_twice":
                        data = data / 255
                    if bug != "zero_grad_per_epoch":
                        optimizer.zero_grad()
                    loss = functional.cross_entropy(model(data), target)
                    loss.backward()
                    optimizer.step()
                    probe.note("loss", loss)
            scheduler.step()


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class ResNetLike(nn.Module):
    """A backbone with batch normalisation, and a head."""

    def __init__(self, classes: int = 4, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.backbone = nn.Sequential(block(3, 8), block(8, 16, 2), block(16, 16))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.backbone:
            x = checkpoint(stage, x, use_reentrant=False) if self.checkpointed else stage(x)
        return self.fc(self.pool(x).flatten(1))


def as_input(pictures: Tensor) -> Tensor:
    return pictures.float() / 255 * 4 - 2


def transfer(bug: str, watch: Watch) -> None:
    """The transfer-learning tutorial: a frozen extractor of features, a new head."""
    torch.manual_seed(2)
    model = ResNetLike()
    pictures, labels = stripes(256, channels=3)
    for _ in range(30):
        model(as_input(pictures))  # stands for the pretraining: the running statistics have seen data
    for parameter in model.backbone.parameters():
        parameter.requires_grad = False
    optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(TensorDataset(pictures, labels), batch_size=16, shuffle=True)
    with watch.loop(model, optimizer) as probe:
        for _epoch in range(5):
            model.train()
            if bug != "frozen_statistics_move":
                model.backbone.eval()
            for x, y in loader:
                with probe.step():
                    loss = functional.cross_entropy(model(as_input(x)), y)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    probe.note("loss", loss)


def finetune(bug: str, watch: Watch) -> None:
    """A segmentation repository's habits: two groups of rates, a polynomial schedule by hand, batches that may be broken."""
    torch.manual_seed(3)
    model = ResNetLike(checkpointed=bug == "statistics_by_checkpoint")
    groups = [{"params": model.backbone.parameters(), "lr": 0.02}, {"params": model.fc.parameters(), "lr": 0.1}]
    optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=1e-4)
    base = [group["lr"] for group in optimizer.param_groups]
    pictures, labels = stripes(256, channels=3)
    pictures = as_input(pictures)
    pictures[77, :, 2, 2] = float("nan")  # one broken file
    loader = DataLoader(TensorDataset(pictures, labels), batch_size=16, shuffle=True)
    i, total = 0, 80
    with watch.loop(model, optimizer) as probe:
        for _epoch in range(5):
            model.train()
            for x, y in loader:
                if bug != "nan_batch_in_statistics" and not torch.isfinite(x).all():
                    continue
                with probe.step():
                    for group, lr in zip(optimizer.param_groups, base, strict=True):
                        decayed = lr * (1 - i / total) ** 0.9
                        if bug != "only_last_group_decays":
                            group["lr"] = decayed
                    if bug == "only_last_group_decays":
                        group["lr"] = decayed
                    i += 1
                    loss = functional.cross_entropy(model(x), y)
                    if not torch.isfinite(loss):  # skip it
                        continue
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    probe.note("loss", loss)


class ModelEma:
    """A moving average of a model, in the style of timm."""

    def __init__(self, model: nn.Module, decay: float, buffers: bool) -> None:
        self.module, self.decay, self.buffers = copy.deepcopy(model).eval(), decay, buffers

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mine, its in zip(self.module.parameters(), model.parameters(), strict=True):
            mine.mul_(self.decay).add_(its, alpha=1 - self.decay)
        if self.buffers:
            for mine, its in zip(self.module.buffers(), model.buffers(), strict=True):
                mine.copy_(its)


def imagenet(bug: str, watch: Watch) -> None:
    """A training script for classifiers: mixup, cosine schedule by epoch, a moving average that is evaluated."""
    torch.manual_seed(4)
    model = ResNetLike()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    epochs = 6
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    ema = ModelEma(model, 0.9, buffers=bug != "average_without_buffers")
    pictures, labels = stripes(192, channels=3)
    loader = DataLoader(TensorDataset(pictures, labels), batch_size=16, shuffle=True, drop_last=True)
    mixing = torch.distributions.Beta(0.4, 0.4)
    with watch.loop(model, optimizer) as probe:
        for _epoch in range(epochs):
            model.train()
            for x, y in loader:
                with probe.step():
                    lam, order = mixing.sample(), torch.randperm(len(x))
                    x, soft = as_input(x), functional.one_hot(y, 4).float()
                    out = model(lam * x + (1 - lam) * x[order])
                    loss = functional.cross_entropy(out, lam * soft + (1 - lam) * soft[order])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    ema.update(model)
                    if bug == "cosine_by_batch":
                        scheduler.step()
                    probe.note("loss", loss)
            if bug != "cosine_by_batch":
                scheduler.step()
            model.eval()
            with torch.no_grad():
                ema.module(as_input(pictures[::4]))


class RandomCrops(Dataset[Any]):
    """Crops of one large picture, their place drawn by NumPy."""

    def __init__(self) -> None:
        self.large = np.random.RandomState(0).randn(3, 64, 64).astype("float32").cumsum(2)

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        top, left = np.random.randint(0, 56, 2)
        return torch.from_numpy(self.large[:, top : top + 8, left : left + 8] / 8), torch.tensor(left // 14)


def seed_alike(_worker: int) -> None:
    np.random.seed(0)


def seed_apart(_worker: int) -> None:
    np.random.seed(torch.initial_seed() % 2**32)


def crops(bug: str, watch: Watch) -> None:
    """Augmentation in two workers of a DataLoader."""
    torch.manual_seed(5)
    model = ResNetLike()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    seeding = seed_alike if bug == "workers_draw_alike" else seed_apart
    loader = DataLoader(RandomCrops(), batch_size=8, num_workers=2, worker_init_fn=seeding, multiprocessing_context="fork")
    with watch.loop(model, optimizer) as probe:
        for _epoch in range(2):
            for x, y in loader:
                with probe.step():
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()
                    probe.note("loss", loss)


def tabular(bug: str, watch: Watch) -> None:
    """A table: a small network, a rate that is lowered on a plateau of the accuracy."""
    g = torch.Generator().manual_seed(6)
    torch.manual_seed(6)
    x = torch.randn(640, 12, generator=g)
    y = ((x[:, :4] * x[:, 4:8]).sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    if bug == "filled_with_a_constant":
        for layer in (model[0], model[2]):
            nn.init.constant_(layer.weight, 0.1)
            nn.init.zeros_(layer.bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    mode = {} if bug == "plateau_of_the_wrong_sign" else {"mode": "max"}
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=3, **mode)
    loader = DataLoader(TensorDataset(x[:512], y[:512]), batch_size=32, shuffle=True)
    with watch.loop(model, optimizer) as probe:
        for _epoch in range(6):
            model.train()
            for i, (a, b) in enumerate(loader):
                with probe.step():
                    loss = functional.cross_entropy(model(a), b)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    probe.note("loss", loss)
                if i % 4 == 3:
                    model.eval()
                    with torch.no_grad():
                        accuracy = (model(x[512:]).argmax(1) == y[512:]).float().mean().item()
                    model.train()
                    scheduler.step(accuracy)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization around SGD: up along the gradient, a second gradient there, back, and a step."""

    def __init__(self, params: Any, rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = torch.optim.SGD(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        every = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            self.state[p]["old_p"] = p.detach().clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old_p"])
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure: Any = None) -> None:
        raise RuntimeError("call first_step and second_step")


def sharpness(bug: str, watch: Watch) -> None:
    torch.manual_seed(7)
    model = Net()
    optimizer = SAM(model.parameters(), lr=0.05, momentum=0.9)
    pictures, labels = stripes(320)
    loader = DataLoader(TensorDataset(pictures, labels), batch_size=16, shuffle=True)
    with watch.loop(model, optimizer) as probe:
        for _epoch in range(3):
            for x, y in loader:
                with probe.step():
                    x = x.float() / 64 - 2
                    loss = functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.first_step(zero_grad=bug != "ascent_gradient_kept")
                    functional.cross_entropy(model(x), y).backward()
                    optimizer.second_step(zero_grad=True)
                    probe.note("loss", loss)
