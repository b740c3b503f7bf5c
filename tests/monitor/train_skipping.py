"""Two ranks of DistributedDataParallel, one of which gets a bad row, twice: without the tool, where the loop leaves the update
of the bad step out by hand, and with `skip`. Arguments: FOLDER FAULT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import trainprobe

STEPS, BAD, ROW = 74, 70, 5
PLAN = {
    "record": "nothing",
    "monitor": {"features": {"loss_rows": True}, "collectives": True},
    "audit": {"every": 1},
    "skip": True,
}
folder, fault = Path(sys.argv[1]), sys.argv[2]


class Training:
    """Two optimizers, as where Muon has the matrices."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4)
        self.model: Any = torch.nn.Sequential(*layers)
        if fault.startswith("sharded"):
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            self.wrapped = fully_shard(self.model, mesh=init_device_mesh("cpu", (2,)))
        else:
            self.wrapped = torch.nn.parallel.DistributedDataParallel(self.model)
        self.halves = [[p for p in self.model.parameters() if p.dim() == kind] for kind in (1, 2)]
        self.optimizers = [torch.optim.AdamW(half, lr=1e-2) for half in self.halves]
        self.schedules = [torch.optim.lr_scheduler.LinearLR(optimizer) for optimizer in self.optimizers]
        torch.manual_seed(rank)

    def step(self, step: int, by_hand: bool = False) -> None:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        y = x[:, :4].argmax(1)
        if step == BAD and rank == 1 and fault != "none":
            x[ROW] = x[ROW] * 300 if fault.endswith("spike") else float("nan")
            y[ROW] = x[ROW, :4].argmin()
        loss = cross_entropy(self.wrapped(x), y)
        self.clear()
        loss.backward()
        if by_hand and step == BAD and fault != "none":
            self.clear()
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()

    def clear(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def save(self, path: Path) -> None:
        weights = [getattr(p, "_local_tensor", p).detach() for p in self.model.parameters()]
        states = [optimizer.state[p] for optimizer, half in zip(self.optimizers, self.halves, strict=True) for p in half]
        state = [[getattr(t, "_local_tensor", t) for t in one.values()] for one in states]
        rates = [schedule.get_last_lr() for schedule in self.schedules]
        torch.save({"weights": weights, "state": state, "random": torch.get_rng_state(), "rates": rates}, path)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_num_threads(1)
reference = Training()
for n in range(STEPS):
    reference.step(n, by_hand=True)
reference.save(folder / f"by_hand{rank}.pt")
training = Training()
more = {"output": str(folder / "out"), "console": False, "on_error": "continue" if fault == "lost" else "raise"}
with trainprobe.watch(training.wrapped, training.optimizers, {**PLAN, **more}) as probe:
    for n in range(STEPS):
        with probe.step():
            if fault == "lost" and n == BAD - 2 and rank == 0:
                probe.guard.trip(ValueError("a fault of the tool"))
            training.step(n)
training.save(folder / f"skip{rank}.pt")
(folder / f"findings{rank}.json").write_text(json.dumps([[f.rule, f.severity, f.step, f.message] for f in probe.findings]))
dist.destroy_process_group()
