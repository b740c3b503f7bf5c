"""Trains with FSDP and saves each step by DCP. Usage: train_over_ranks.py OUT FROM|- LAST [what is not loaded]."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main(out: str, start: str, last: str, lost: str = "") -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(len(start))
    net = nn.Sequential(nn.Linear(7, 13), nn.LayerNorm(13), nn.ReLU(), nn.Linear(13, 3))
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    step = 0
    if start != "-":
        weights, moments = get_state_dict(net, optimizer)
        loop = {"step": 0}
        states = {"model": weights, "optim": moments, "loop": loop}
        dcp.load(states, checkpoint_id=start)
        if lost == "moments":
            for one in moments["state"].values():
                one["exp_avg"] = torch.zeros_like(one["exp_avg"])
        if lost == "step counters":
            for one in moments["state"].values():
                one["step"] = torch.zeros_like(one["step"])
        set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=moments)
        step = loop["step"]
    while step < int(last):
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))  # the same on all ranks
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        weights, moments = get_state_dict(net, optimizer)
        dcp.save({"model": weights, "optim": moments, "loop": {"step": step}}, checkpoint_id=str(Path(out, str(step))))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
