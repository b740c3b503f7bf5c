"""One rank of a DDP or FSDP2 training, with or without the probe; leaves its bits and its collectives in a JSON file.

train_sharded.py ddp|fsdp2 RESULT_FOLDER PLAN_JSON|null
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import trainprobe
from tests.lockstep import bits_of, seed_all
from tests.zoo import load

STEPS = 3


def wrap(kind: str, model: torch.nn.Module) -> torch.nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def local(t: torch.Tensor | None) -> torch.Tensor | None:
    return t.to_local() if hasattr(t, "to_local") else t


def train(kind: str, plan: dict | None) -> dict[str, str]:
    """Train and return a digest of every loss, gradient, weight and optimizer entry of this rank."""
    case = load("residual_gpt")
    seed_all()
    model = wrap(kind, case.build())
    torch.manual_seed(100 + dist.get_rank())  # dropout differs between ranks, as it does in earnest
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found: dict[str, bytes] = {}
    with trainprobe.watch(model, optimizer, plan=plan) if plan else contextlib.nullcontext() as probe:
        for step in range(STEPS):
            with probe.step() if probe else contextlib.nullcontext():
                optimizer.zero_grad()
                loss = case.loss(model, case.batch(step * dist.get_world_size() + dist.get_rank()))
                loss.backward()
                optimizer.step()
            found[f"step {step} loss"] = bits_of(loss)
            found |= {f"step {step} gradient {n}": bits_of(local(p.grad)) for n, p in model.named_parameters()}
    found |= {f"weight {n}": bits_of(local(p)) for n, p in model.named_parameters()}
    for i, entries in enumerate(optimizer.state.values()):
        found |= {f"optimizer {i} {k}": bits_of(local(torch.as_tensor(v))) for k, v in entries.items()}
    found["random state"] = bits_of(torch.get_rng_state())
    return {name: hashlib.sha256(value).hexdigest() for name, value in found.items()}


def main() -> None:
    kind, folder, plan = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        bits = train(kind, plan)
    collectives = Counter(e.name for e in profile.events() if e.name.startswith(("gloo:", "c10d::")))
    result = {"bits": bits, "collectives": collectives}
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
