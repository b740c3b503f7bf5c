"""Real loops whose labels only a loss sees: `labels_run.py FOLDER KIND CHANGE…`; a pack for each change."""

from __future__ import annotations

import sys
from pathlib import Path

from trainprobe import ConfigChecker

STEPS = 5


def samples(change: str):
    import torch

    made = torch.Generator().manual_seed(1)
    inputs, classes = torch.randn(40, 6, generator=made), torch.randint(0, 3, (40,), generator=made)
    heights = torch.randn(40, 1, generator=made)
    if change == "labels":
        classes[2], heights[2] = (classes[2] + 1) % 3, 7.0
    if change == "later labels":
        classes[21], heights[21] = (classes[21] + 1) % 3, 7.0
    return inputs, classes, heights


def net(change: str):
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def plain(change: str, out: Path) -> None:
    """Labels are cut out of tensors, and torch's loss gets them."""
    import torch

    model, (inputs, classes, _) = net(change), samples(change)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if change == "rate" else 0.1)
    with ConfigChecker(model, output_zip_path=out, on_error="raise"):
        for step in range(STEPS):
            rows = slice(step * 8, step * 8 + 8)
            torch.nn.CrossEntropyLoss()(model(inputs[rows]), classes[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()


def loader(change: str, out: Path) -> None:
    """Floats from a loader, in a loss that is written out."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    model, (inputs, _, heights) = torch.nn.Linear(6, 1), samples(change)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if change == "rate" else 0.1)
    with ConfigChecker(model, output_zip_path=out, on_error="raise"):
        for x, y in DataLoader(TensorDataset(inputs, heights), batch_size=8):
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def teacher(change: str, out: Path) -> None:
    """A target of floats that another network works out: it follows from weights and is no data."""
    import torch

    torch.manual_seed(0)
    model, other, (inputs, _, _) = torch.nn.Linear(6, 1), torch.nn.Linear(6, 1), samples(change)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if change == "rate" else 0.1)
    with ConfigChecker(model, output_zip_path=out, on_error="raise"):
        for step in range(STEPS):
            rows = inputs[step * 8 : step * 8 + 8]
            with torch.no_grad():
                target = other(rows) + model(rows)
            torch.nn.functional.mse_loss(model(rows), target).backward()
            optimizer.step()
            optimizer.zero_grad()


def fabric(change: str, out: Path) -> None:
    """Fabric's wrapper enters autocast on the way to the model."""
    import torch
    from lightning.fabric import Fabric
    from torch.utils.data import DataLoader, TensorDataset

    kind = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed" if change == "autocast" else "32-true")
    inputs, classes, _ = samples(change)
    model = net(change)
    model, optimizer = kind.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batches = kind.setup_dataloaders(DataLoader(TensorDataset(inputs, classes), batch_size=8))
    with ConfigChecker(model, output_zip_path=out, on_error="raise"):
        for x, y in batches:
            kind.backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


def accelerate(change: str, out: Path) -> None:
    """Accelerate puts autocast into the model's own forward, and its loaders fetch one batch ahead."""
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from torch.utils.data import DataLoader, TensorDataset

    AcceleratorState._reset_state(reset_partial_state=True)
    kind = Accelerator(cpu=True, mixed_precision="bf16" if change == "autocast" else "no")
    inputs, classes, _ = samples(change)
    model = net(change)
    made = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(inputs, classes), batch_size=8)
    model, optimizer, batches = kind.prepare(model, *made)
    with ConfigChecker(model, output_zip_path=out, on_error="raise"):
        for x, y in batches:
            kind.backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    folder, kind, *changes = sys.argv[1:]
    for change in changes:
        ConfigChecker.apply_patches(on_error="raise")
        globals()[kind](change, Path(folder) / f"{change.replace(' ', '_')}.zip")
