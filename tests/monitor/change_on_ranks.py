"""One rank of a training whose plan is changed by a file while it runs; writes FOLDER/RANK.json: what was collected.

change_on_ranks.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import trainprobe

CONTROL = {5: "monitor: {step: every 3, gradients: {names: ['0.weight']}}\naudit: {every: 5}\n", 11: "sinks: [csv]\n"}


def main(folder: Path) -> None:
    """Train; rank 1 alone writes the file, in the middle of steps 5 and 11."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    seen: dict[int, list[str]] = {}
    plan = {"level": "off", "sinks": [], "control": 2, "monitor": {"activations": False}, "audit": {"every": 1}}
    with trainprobe.watch(model, optimizer, plan=plan, output=folder / "out") as probe:
        probe.watchers.append(
            lambda step_data: (
                seen.__setitem__(
                    step_data.step,
                    [*step_data.programs, *sorted(c.name for c in step_data.calls if "grad" in (c.params or {}))],
                )
                or ()
            )
        )
        for step in range(16):
            with probe.step(step):
                optimizer.zero_grad()
                model(torch.randn(3, 4) + rank).square().mean().backward()
                if rank == world - 1 and step in CONTROL:
                    draft = folder / "out" / "draft"
                    draft.write_text(CONTROL[step])
                    draft.replace(folder / "out" / "control.yaml")
                dist.barrier()
                optimizer.step()
    told = {"seen": seen, "findings": [[f.rule, f.severity, f.step, f.message] for f in probe.findings]}
    (folder / f"{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
