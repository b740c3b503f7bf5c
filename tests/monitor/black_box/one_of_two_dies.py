"""Two ranks train; rank 1 is killed in the forward pass of step 3, and the other then waits for it, or fails.

one_of_two_dies.py FOLDER; each rank prints a line when it is in step 3.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

import trainprobe

STEP = 3


class Fatal(torch.nn.Linear):
    """Dies in its forward when it is told to."""

    deadly = False

    def forward(self, x):
        if self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.Linear(8, 8), Fatal(8, 8))
    model = torch.nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plan = {"level": "off", "monitor": {"activation_gradients": True}, "black_box": {"steps": 4, "max_bytes": "4 MiB"}}
    with trainprobe.watch(model, optimizer, output=folder, **plan) as probe:
        for step in range(STEP + 1):
            with probe.step(step):
                inner[1].deadly = step == STEP and dist.get_rank() == 1
                optimizer.zero_grad()
                if step == STEP:
                    print("in the step", flush=True)
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()


if __name__ == "__main__":
    main(*sys.argv[1:])
