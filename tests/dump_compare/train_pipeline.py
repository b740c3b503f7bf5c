"""Train a step of a small model as a pipeline of torch.distributed.pipelining: `train_pipeline.py FOLDER LEVEL CHANGE`.

One rank holds the whole, two are a pipeline, four are two pipelines of ranks 0 and 2, 1 and 3. CHANGE: "mesh" takes the group
of a mesh, "fault" changes a weight of the last stage, and the name of a schedule of several stages a rank takes that one; with
"-fault" behind it, both.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, schedules

import trainprobe

PLAN = {"step": [0], "summary": "both", "monitor": {"parameters": True, "gradients": True}, "console": False}


class Model(nn.Module):
    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = {str(i): nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for i in range(4)}
        self.layers = nn.ModuleDict({name: layer for name, layer in layers.items() if first <= int(name) < last})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def loss_of(y, target):
    return (y - target).pow(2).mean()


def main() -> None:
    folder, level, change = [*sys.argv[1:], ""][:3]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = world // 2 if world > 1 else 1
    mesh = init_device_mesh("cpu", (2, data), mesh_dim_names=("pp", "dp")) if world > 1 else None
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(8, 8, generator=generator).chunk(data)[rank % data] for _ in range(2))
    stage, schedule = 0, None
    model = Model(0, 4)
    if change.startswith("Schedule"):
        stages = (rank, 3 - rank) if "ZBV" in change else (rank, 2 + rank)
        model = nn.ModuleList(Model(i, i + 1) for i in stages)
        made = [PipelineStage(m, i, 4, torch.device("cpu")) for m, i in zip(model, stages, strict=True)]
        schedule = getattr(schedules, change.removesuffix("-fault"))(made, 2, loss_fn=loss_of)
        stage = int(3 in stages)
    elif mesh is not None:
        stage = mesh.get_local_rank("pp")
        model = Model(2 * stage, 2 * stage + 2)
        group = mesh.get_group("pp") if change == "mesh" or world > 2 else None
        schedule = Schedule1F1B(PipelineStage(model, stage, 2, torch.device("cpu"), group=group), 2, loss_fn=loss_of)
    if change.endswith("fault"):
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.mul_(1.2 if name.endswith("layers.3.0.weight") else 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watched = list(model) if isinstance(model, nn.ModuleList) else model
    with trainprobe.watch(watched, optimizer, output=folder, level=level, on_error="raise", **PLAN) as probe, probe.step():
        if schedule is None:
            for part, wanted in zip(x.chunk(2), target.chunk(2), strict=True):
                (loss_of(model(part), wanted) / 2).backward()
        else:
            schedule.step(*([x] if rank < data else []), **({"target": target} if stage else {}))
        for p in model.parameters() if data > 1 else ():
            dist.all_reduce(p.grad, group=mesh.get_group("dp"))
            p.grad /= data
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
