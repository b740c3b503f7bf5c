"""Programs on images: classes, masks, boxes, and a teacher that follows its student."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import trainprobe
from benchmarks.sight.case import STEPS
from benchmarks.sight.parts import convolutions, pictures, stream


class Shards(IterableDataset[tuple[Tensor, Tensor]]):
    """Reads pictures in their order; each worker reads its share, or all of them."""

    def __init__(self, x: Tensor, y: Tensor, shared_out: bool) -> None:
        self.x, self.y, self.shared_out = x, y, shared_out

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker and self.shared_out else (0, 1)
        yield from zip(self.x[first::every], self.y[first::every], strict=True)


def images(bug: str) -> None:
    """Fine-tunes a network in epochs: the backbone at a tenth of the rate, a warm-up and a decay by hand."""
    torch.manual_seed(0)
    x, y, _ = pictures(256, stream(30))
    model = convolutions()
    backbone, head = ({"params": list(part.parameters())} for part in model)
    groups = [{**backbone, "lr": 2e-3}, {**head, "lr": 2e-2}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    base = [group["lr"] for group in groups]
    sampler = DistributedSampler(TensorDataset(x), num_replicas=1, rank=0, seed=3)
    with trainprobe.watch(model, optimizer) as probe:
        for epoch in range(STEPS // 16):
            if bug != "same_order_each_epoch":
                sampler.set_epoch(epoch)
            if bug == "optimizer_made_again" and epoch:
                optimizer = torch.optim.AdamW(optimizer.param_groups, weight_decay=0.01)
            for i, (images_, labels) in enumerate(DataLoader(TensorDataset(x, y), 16, sampler=sampler)):
                step = epoch * 16 + i
                scale = min(1.0, (step + 1) / 8) * (1 - step / (2 * STEPS))
                for group, rate in zip(optimizer.param_groups, base, strict=True):
                    group["lr"] = scale * (base[1] if bug == "one_rate_for_all" else rate)
                with probe.step():
                    loss = functional.cross_entropy(model(images_), labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    probe.note("loss", loss)


def streamed(bug: str) -> None:
    """Reads pictures in their order with two workers."""
    torch.manual_seed(0)
    x, y, _ = pictures(1280, stream(31))
    model = convolutions()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loader = DataLoader(Shards(x, y, shared_out=bug != "workers_read_the_same"), 16, num_workers=2)
    with trainprobe.watch(model, optimizer) as probe:
        for _, (images_, labels) in zip(range(STEPS), loader, strict=False):
            with probe.step():
                loss = functional.cross_entropy(model(images_), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)


def segmentation(bug: str) -> None:
    """Tells the background from the squares of four classes; 255 would be unlabelled."""
    torch.manual_seed(0)
    draw = stream(32)
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 5, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            x, y, mask = pictures(16, draw)
            target = torch.where(mask, y[:, None, None] + 1, 0)
            with probe.step():
                ignored = 0 if bug == "background_ignored" else 255
                loss = functional.cross_entropy(model(x), target, ignore_index=ignored)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)


class Detector(nn.Module):
    """Gives for each of 3 x 3 cells whether a square is in it, where, and of which class."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 32, 4, 4), nn.ReLU())
        self.present, self.box, self.kind = nn.Conv2d(32, 1, 1), nn.Conv2d(32, 2, 1), nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cells = self.body(x)
        return self.present(cells).squeeze(1), self.box(cells), self.kind(cells)


def detection(bug: str) -> None:
    """Finds the squares: boxes and classes are learned in the cells that hold one."""
    torch.manual_seed(0)
    draw, model = stream(33), Detector()
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            x, y, mask = pictures(32, draw)
            rows, columns = mask.any(2).float().argmax(1), mask.any(1).float().argmax(1)
            cell = ((rows + 2) // 4).clamp(max=2) * 3 + ((columns + 2) // 4).clamp(max=2)
            holds = functional.one_hot(cell, 9).view(-1, 3, 3).float()
            offsets = torch.stack([rows % 4, columns % 4], 1).float()[:, :, None, None] / 4 * holds[:, None]
            with probe.step():
                present, box, kind = model(x)
                objectness = functional.binary_cross_entropy_with_logits(present, holds)
                misses = (box - offsets).abs().sum(1)
                counted = torch.ones_like(holds) if bug == "boxes_of_empty_cells" else holds
                boxes = (misses * counted).sum() / counted.sum()
                kinds = functional.cross_entropy(kind.flatten(2).transpose(1, 2)[holds.flatten(1).bool()], y)
                loss = objectness + boxes + kinds
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
                probe.note("box_loss", boxes)


def mean_teacher(bug: str) -> None:
    """Learns from few labels, and from a teacher that is the average of the student."""
    torch.manual_seed(0)
    draw, student = stream(34), convolutions()
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), 0.1, momentum=0.9, nesterov=True)
    with trainprobe.watch(student, optimizer) as probe:
        for step in range(STEPS):
            x, y, _ = pictures(32, draw)
            jitter = 0.05 * torch.randn(x.shape, generator=draw)
            with probe.step():
                logits = student(x)
                with torch.no_grad():
                    wanted = teacher(x + jitter).softmax(1)
                consistency = functional.mse_loss(logits.softmax(1), wanted)
                loss = functional.cross_entropy(logits[:16], y[:16]) + consistency
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
                probe.note("consistency", consistency)
                decay = min(0.97, (1 + step) / (10 + step))
                for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                    if slow.dim() > 1 or bug != "vectors_left_behind":
                        slow.data.mul_(decay).add_(fast.data, alpha=1 - decay)
