"""A plain torch training, once for each change: `plain.py FOLDER CHANGE…` leaves FOLDER/CHANGE.zip, on 1 rank or more."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))
from change import BATCH, Net, nudge, rate, samples, seed_all

from trainprobe import ConfigChecker


def train(out: Path, change: str, rank: int, world: int) -> None:
    ConfigChecker.apply_patches(on_error="raise")
    seed_all(change)
    if change == "flag":
        torch.use_deterministic_algorithms(True)
    net = Net(change)
    nudge(net, change)
    model = DistributedDataParallel(net) if world > 1 else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate(change), weight_decay=0.0 if change == "weight decay" else 0.01)
    x, y = samples(change)
    if change == "rank data" and rank == 1:
        x = x + 1
    with ConfigChecker(model, output_zip_path=out / f"{change.replace(' ', '_')}.zip", on_error="raise"):
        for i in range(6):
            here = slice(i * BATCH + rank, (i + 1) * BATCH, world)
            optimizer.zero_grad()
            model(x[here], y[here]).backward()
            optimizer.step()
    torch.use_deterministic_algorithms(False)
    if world > 1:
        dist.barrier()


def main() -> None:
    torch.set_num_threads(1)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    for change in sys.argv[2:]:
        train(Path(sys.argv[1]), change, rank, world)
    if world > 1:
        dist.destroy_process_group()


main()
