"""Trains a task while an incident happens to it, or a healthy kind, and leaves the run log in a folder.

training.py FOLDER INCIDENT TASK SEED        (started on each rank for the incidents of one rank)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.incidents.catalogue import INCIDENTS
from benchmarks.incidents.tasks import TASKS
from trainprobe.watching import watch

PLAN: dict[str, Any] = {"level": "off", "monitor": True, "audit": True, "console": False}


def train(folder: Path, incident: str, task: str, seed: int) -> None:
    """Train once on this rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    kind = INCIDENTS[incident]()
    here = TASKS[task](seed, rank, kind.easy)
    optimizer = torch.optim.Adam(here.model.parameters(), lr=2e-3) if kind.adam else here.optimizer()
    base = float(optimizer.param_groups[0]["lr"])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=50, enabled=kind.scaler)
    with watch(here.model, optimizer, PLAN, output=str(folder), on_existing="replace") as probe:
        for step in range(kind.steps):
            optimizer.param_groups[0]["lr"] = kind.rate(step, base)
            batch = kind.batch(step, here, rank)
            with torch.no_grad():
                kind.between(step, here)
            with probe.step(step):
                loss = here.loss(batch)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                if kind.ranks > 1:
                    _reduce(here.model)
                kind.gradients(step, here)
                scaler.step(optimizer)
                scaler.update()
                probe.note("loss", loss.detach())
                probe.note("lr", optimizer.param_groups[0]["lr"])


def _reduce(model: Any) -> None:
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    train(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
    if dist.is_initialized():
        dist.destroy_process_group()
