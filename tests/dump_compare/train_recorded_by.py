"""The small training of tests/interop, recorded by whoever is named: `train_recorded_by.py WHO FOLDER JSON [weight|backward]`.

The last word plants a difference in the second layer: one element of a weight, or a gradient.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "interop"))
from children import import_once

with contextlib.suppress(ImportError):  # once, for all recordings of a Python
    import_once("msprobe.pytorch")
import train_small


class Changed(train_small.Net):
    def __init__(self) -> None:
        super().__init__()
        if "weight" in sys.argv:
            with torch.no_grad():
                self.layers[1].fc.weight[1, 2] += 0.1
        if "backward" in sys.argv:
            self.layers[1].fc.weight.register_hook(lambda gradient: gradient * 1.1)


train_small.Net = Changed
who = {"trainprobe": train_small.by_trainprobe, "msprobe": train_small.by_msprobe}[sys.argv[1]]
who(sys.argv[2], json.loads(sys.argv[3]))
