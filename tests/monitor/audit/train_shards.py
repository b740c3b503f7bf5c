"""One rank of an FSDP2 training under the audit of every step; writes FOLDER/FAULT.RANK.json: what was found.

train_shards.py FOLDER FAULT…    faults: healthy, drift (a shard is written to), data (the same on all ranks), norm (of the own
shards alone), moments (lost). They begin at step 2. hybrid: healthy, on two replicas of what the other ranks shard; copy and
moment_copy: there, a bit of a weight, or of a moment, of the last rank is flipped; decay_copy: its updates decay weights more.
same_pieces: healthy, but that each rank begins with the first one's piece of a weight. nan: all weights are NaN.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import trainprobe
from tests.zoo import load
from tests.zoo.residual_gpt import batch as batch_of

STEPS, FAULTY = 5, 2
HYBRID = ("hybrid", "copy", "moment_copy", "decay_copy")
FLIPPED = "layers.1.mlp.down.weight"


def train(fault: str, folder: Path) -> list[list]:
    """Train and return what was found on this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    case = load("residual_gpt")
    model = case.build()
    shape, names = ((2, world // 2), ("replicate", "shard")) if fault in HYBRID else ((world,), ("dp",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if fault == "same_pieces":
        dist.broadcast(dict(model.named_parameters())[FLIPPED].to_local().detach(), 0)
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plan = {"level": "off", "sinks": [], "output": str(folder / f"{fault} out"), "audit": {"every": 1}}
    with trainprobe.watch(model, optimizer, plan=plan) as probe:
        for step in range(STEPS):
            begun = step >= FAULTY
            with probe.step(step):
                optimizer.zero_grad()
                own = 0 if fault == "data" and begun else rank
                case.loss(model, batch_of(step * world + own)).backward()
                own_norm = torch.stack([p.grad.to_local().norm() for p in model.parameters()]).norm()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()
                probe.note("grad_norm", own_norm if fault == "norm" and begun else norm)
                optimizer.step()
            if step + 1 == FAULTY:
                spoil(fault, model, optimizer)
    return [[f.rule, f.step, f.site.name if f.site else None, f.message] for f in probe.findings]


def spoil(fault: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write to a shard on one rank, change its optimizer, or lose the moments on all."""
    with torch.no_grad():
        if fault == "drift" and dist.get_rank() == 1:
            dict(model.named_parameters())[FLIPPED].to_local().view(-1)[1] += 1e-3
        if fault == "decay_copy" and dist.get_rank() == dist.get_world_size() - 1:
            optimizer.param_groups[0]["weight_decay"] = 0.5
        if fault in ("copy", "moment_copy") and dist.get_rank() == dist.get_world_size() - 1:
            p = dict(model.named_parameters())[FLIPPED]
            held = p if fault == "copy" else optimizer.state[p]["exp_avg"]
            held.to_local().view(-1).view(torch.int32)[1] ^= 1
        if fault == "nan":
            for p in model.parameters():
                p.to_local().fill_(torch.nan)
        if fault == "moments":
            for state in optimizer.state.values():
                state["exp_avg"].to_local().zero_()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in sys.argv[2:]:
        (Path(sys.argv[1]) / f"{name}.{dist.get_rank()}.json").write_text(json.dumps(train(name, Path(sys.argv[1]))))
    dist.destroy_process_group()
