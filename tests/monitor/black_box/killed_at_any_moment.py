"""A training that goes on until it is killed, or, with numbers of steps, until the last of them.

killed_at_any_moment.py FOLDER STEP …. Prints a line when it has begun; with numbers of steps then what each step says, as
JSON (see tests.engine.storage.journal_of_a_step).
"""

from __future__ import annotations

import json
import sys

import torch

import trainprobe
from tests.engine.storage.journal_of_a_step import MONITOR, told


def main(folder: str, *asked: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wanted = set(map(int, asked))
    box = {"steps": 4, "max_bytes": "4 MiB"}
    kept = {}
    with trainprobe.watch(model, optimizer, output=folder, level="off", sinks=[], monitor=MONITOR, black_box=box) as probe:
        for step in range(max(wanted, default=10**9) + 1):
            probe.begin_step(step)
            optimizer.zero_grad()
            for _ in range(2):
                loss = model(torch.randn(4, 8)).square().mean()
                loss.backward()
            probe.note("loss", loss)
            optimizer.step()
            step_data = probe.end_step()
            if step in wanted:
                kept[step] = told(step_data)
            if step == 2:
                print("it trains", flush=True)
    print(json.dumps(kept))


if __name__ == "__main__":
    main(*sys.argv[1:])
