"""Two ranks that join their gradients by hand, watched: `train_collectives.py FOLDER NAMES|off`.

Each rank writes FOLDER/RANK.json: the collectives that the probe saw with their numbers, what NumPy says of the same, and
a digest of the weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import trainprobe  # noqa: E402
from trainprobe.engine.core.records import Value  # noqa: E402

torch.set_num_threads(1)


def told(step_data) -> list[dict]:
    norms = step_data.numbers()["norm"]
    found = []
    for call in step_data.calls:
        if call.kind == "collective":
            sides = {"in": call.args, "out": call.out}
            numbers = {side: [float(norms[v.row]) for v in tree] for side, tree in sides.items() if isinstance(tree, list)}
            shapes = [list(v.shape) for v in call.args if isinstance(v, Value)]
            group = call.kwargs["group"].extra["group_ranks"]
            found.append({"name": call.name, "call": call.call, "group": group, "shapes": shapes, **numbers})
    return found


def main(folder: Path, names: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen, wanted = [], []
    plan = {"output": folder / f"out{names}", "level": "off", "sinks": ["memory"], "on_error": "raise"}
    monitor = {"collectives": True if names == "all" else {"names": names}}
    with contextlib.nullcontext() if names == "off" else trainprobe.watch(model, optimizer, plan, monitor=monitor) as probe:
        for step in range(3):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
            if probe:
                probe.begin_step(step)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            for p in model.parameters():
                before = float(np.linalg.norm(p.grad.double().numpy()))
                dist.all_reduce(p.grad)
                wanted.append({"in": before, "out": float(np.linalg.norm(p.grad.double().numpy()))})
            dist.broadcast(torch.full((3,), float(rank)), 0)
            optimizer.step()
            if probe:
                seen.append(told(probe.end_step()))
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    (folder / f"{names}.{rank}.json").write_text(json.dumps({"seen": seen, "wanted": wanted, "digest": digest}))
    dist.barrier()
    os._exit(0)  # all is written; gloo's own threads may abort a process at its end


main(Path(sys.argv[1]), sys.argv[2])
