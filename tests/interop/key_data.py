"""Saves, or compares, the key data of a small reinforcement-learning run with mindstudio-probe: run by its own Python."""

import sys

import torch
from msprobe.core import SingleComparator, SingleSave

if sys.argv[1] == "save":
    generator = torch.Generator().manual_seed(0)
    SingleSave(sys.argv[2])
    for step in range(2):
        for _ in range(2):
            log_prob = torch.rand(3, 4, generator=generator) + (float(sys.argv[3]) if step else 0)
            SingleSave.save(
                {"response": [torch.arange(4), torch.arange(3)], "log_prob": log_prob, "mask": {"a": torch.ones(2)}}
            )
        SingleSave.step()
    SingleSave.save_config({"n": 4})
else:
    SingleComparator.compare(*sys.argv[2:5], 1)
