"""One of two ranks under the default plan: `train_two_ranks.py FOLDER KIND`; writes its steps and what warned."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import distributed, nn

from trainprobe.engine.plan.defaults import default_plan
from trainprobe.integrations.torch_loop import attach

STEPS = 64
folder, kind = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
torch.manual_seed(5)
model: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 2))


def distributed_data_parallel() -> list[str]:
    """Accumulate over two micro-batches, as PyTorch's documentation does."""
    distributed.init_process_group("gloo")
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer, scheduler = optimizer_of(parallel)
    loop = attach(parallel, optimizer, output=folder / "out", **default_plan())
    data = torch.Generator().manual_seed(distributed.get_rank())
    for _ in range(STEPS):
        with parallel.no_sync():
            loss_of(parallel, data).backward()
        loss_of(parallel, data).backward()
        nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return ended(loop)


def accelerate() -> list[str]:
    """Accumulate and shard the data as Accelerate does."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    x = torch.randn(STEPS * 2 * 2 * 4, 6)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long()), batch_size=4, shuffle=True)
    prepared, optimizer, loader, scheduler = accelerator.prepare(model, (made := optimizer_of(model))[0], loader, made[1])
    loop = attach(prepared, optimizer, output=folder / "out", **default_plan())
    for a, b in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(nn.functional.cross_entropy(prepared(a), b))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return ended(loop)


def tensor_parallel() -> list[str]:
    """Split two layers over a mesh without names, with the same data on both ranks, as PyTorch's example does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    toy = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    parallel = parallelize_module(toy, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer, scheduler = optimizer_of(parallel)
    loop = attach(parallel, optimizer, output=folder / "out", **default_plan())
    data = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(parallel, data).backward()
        optimizer.step()
        scheduler.step()
    return ended(loop)


def optimizer_of(trained: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return an optimizer and its warm-up from a rate of zero."""
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))


def loss_of(trained: nn.Module, data: torch.Generator) -> torch.Tensor:
    """Return the loss of the next micro-batch."""
    x = torch.randn(8, 6, generator=data)
    return nn.functional.cross_entropy(trained(x), (x.sum(1) > 0).long())


def ended(loop: object) -> list[str]:
    """Return what warned, once all is written."""
    loop.close()  # type: ignore[attr-defined]
    return [f"{f.step} {f.rule}: {f.message}" for f in loop.findings if f.severity != "info"]  # type: ignore[attr-defined]


alarms = {"ddp": distributed_data_parallel, "accelerate": accelerate, "tensor parallel": tensor_parallel}[kind]()
(folder / f"alarms{distributed.get_rank()}.txt").write_text("\n".join(alarms))
distributed.destroy_process_group()
