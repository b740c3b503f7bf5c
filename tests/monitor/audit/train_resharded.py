"""One rank of a training that is saved in one layout and goes on in another, through torch.distributed.checkpoint.

train_resharded.py FOLDER save LAYOUT…             train to step 3 and save, each layout into FOLDER/LAYOUT
train_resharded.py FOLDER load FROM-LAYOUT-FAULT…  load what FROM saved, go on in LAYOUT to step 11; writes
                                                FROM-LAYOUT-FAULT.RANKS.RANK.json

Layouts: fsdp, columns (shards of the second dimension), ddp, plain. Faults: healthy, swapped (pieces, or two tensors, at each
other's place), moment (one is lost), schedule (it begins again), data (it begins again), unshared (of one rank nothing lies
beside the output), apart (ranks are not compared).
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.optim.lr_scheduler import StepLR

import trainprobe

SAVED, LAST = 3, 11
SWAPPED, LOST = "1.weight", "2.bias"


def build(layout: str):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5))
    if layout in ("fsdp", "columns"):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        cut = (lambda p: Shard(p.dim() - 1)) if layout == "columns" else None
        for layer in model:
            fully_shard(layer, mesh=mesh, shard_placement_fn=cut)
        fully_shard(model, mesh=mesh, shard_placement_fn=cut)
    if layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, StepLR(optimizer, 5)


def train(probe, model, optimizer, schedule, steps, data_from: int = 0) -> None:
    for step in steps:
        torch.manual_seed(100 * (step - data_from) + dist.get_rank())
        with probe.step(step):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            schedule.step()


def plan_of(folder: Path, audit) -> dict:
    return {"level": "off", "sinks": [], "output": str(folder), "audit": audit, "on_existing": "continue"}


def save(folder: Path, layout: str) -> None:
    model, optimizer, schedule = build(layout)
    with trainprobe.watch(model, optimizer, plan=plan_of(folder / layout, {"every": 1})) as probe:
        train(probe, model, optimizer, schedule, range(SAVED + 1))
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder / layout / "checkpoint")
        (folder / layout / f"schedule{dist.get_rank()}.json").write_text(json.dumps(schedule.state_dict()))


def load(folder: Path, case: str) -> list[list]:
    """Go on, and return what was found on this rank."""
    source, layout, fault = case.split("-")
    out = folder / f"{case} out {dist.get_world_size()}"
    if dist.get_rank() == 0:
        shutil.copytree(folder / source, out)
        if fault == "unshared":
            (out / "rank1" / "saved_states.json").unlink()
    dist.barrier()
    model, optimizer, schedule = build(layout)
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder / source / "checkpoint")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    if fault != "schedule":
        schedule.load_state_dict(json.loads((folder / source / "schedule0.json").read_text()))
    spoil(fault, model, optimizer)
    audit = {"every": 10} | ({"ranks": False} if fault == "apart" else {})
    with trainprobe.watch(model, optimizer, plan=plan_of(out, audit)) as probe:
        train(probe, model, optimizer, schedule, range(SAVED + 1, LAST + 1), SAVED + 1 if fault == "data" else 0)
    return [[f.rule, f.severity, f.step, f.site and f.site.name, f.site and f.site.slot, f.message] for f in probe.findings]


def spoil(fault: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    named = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    if fault == "swapped":
        with torch.no_grad():
            a, b = named[SWAPPED].data, named["2.weight"].data
            if hasattr(a, "to_local"):  # each piece of one tensor at the place of the one before it
                mine = a.to_local().contiguous()
                pieces = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
                dist.all_gather(pieces, mine)
                a.to_local().copy_(pieces[(dist.get_rank() + 1) % len(pieces)])
            else:
                kept = a.clone()
                a.copy_(b)
                b.copy_(kept)
    if fault == "moment":
        del optimizer.state[named[LOST]]


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    where = Path(sys.argv[1])
    for name in sys.argv[3:]:
        if sys.argv[2] == "save":
            save(where, name)
        else:
            told = json.dumps(load(where, name))
            (where / f"{name}.{dist.get_world_size()}.{dist.get_rank()}.json").write_text(told)
    dist.destroy_process_group()
