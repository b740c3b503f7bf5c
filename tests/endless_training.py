"""A training that goes on until it is killed: the victim of the fault tests.

endless_training.py OUTPUT PLAN_JSON
"""

from __future__ import annotations

import json
import sys

import torch

import trainprobe
from tests.lockstep import one_step, seed_all
from tests.zoo import load


def main() -> None:
    torch.set_num_threads(1)
    case = load("residual_gpt")
    seed_all()
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with trainprobe.watch(model, optimizer, output=sys.argv[1], **json.loads(sys.argv[2])) as probe:
        print("ready", flush=True)
        for step in range(100_000):
            with probe.step():
                loss = one_step(case, model, optimizer, step)[0]
                probe.note("loss", loss)


if __name__ == "__main__":
    main()
