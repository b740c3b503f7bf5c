"""Train a small model on the stand-in accelerator with the kernels and without, and print as JSON how the two compare.

TRITON_INTERPRET=1 python -m tests.triton_kernels.on_the_stand_in
"""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import numpy as np
import torch

import trainprobe
from tests.stand_in import register
from trainprobe.engine.arrays import triton_jobs, triton_rows

PLAN = {"level": "off", "monitor": {"parameters": True, "gradients": True, "optimizer_state": True, "activations": True}}
SIZES = {"_LEVELS": (10, 10, 7, 10), "_MERGE_LEVELS": 3, "_LEAST": 1024, "_MOST": 1 << 14}  # the interpreter takes its time


def train(**plan: Any) -> tuple[list[torch.Tensor], list[Any], Any]:
    """Train for three steps; return the parameters, the steps and the probe."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)).to("npu:0")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
    collected: list[Any] = []
    inputs = torch.ones(4, 6).to("npu:0")
    with tempfile.TemporaryDirectory() as folder:
        options = {**PLAN, **plan, "output": folder, "sinks": ["jsonl"], "on_error": "raise", "console": False}
        with trainprobe.watch(model, optimizer, options) as probe:
            probe.watchers.append(lambda step_data: collected.append(step_data) or ())
            for _ in range(3):
                with probe.step():
                    optimizer.zero_grad()
                    model(inputs).square().sum().backward()
                    optimizer.step()
                probe.settle()  # the kernels are believed once the numbers of their trial have come
    return [p.detach().cpu() for p in model.parameters()], collected, probe


def main() -> None:
    """Print the comparison."""
    register()
    triton_rows.DEVICES.add("npu")
    for name, size in SIZES.items():
        setattr(triton_jobs, name, size)
    launches: list[int] = []
    plain = triton_rows.launch

    def counted(jobs: Any, *others: Any) -> None:
        plain(jobs, *others)
        launches.append(len(jobs))

    triton_rows.launch = counted
    want, by_torch, _ = train(native=False)
    assert launches == []
    found, by_kernels, probe = train()
    pairs = list(zip(by_torch, by_kernels, strict=True))
    told = {
        "bits": all(map(torch.equal, want, found)),
        "together": sum(many >= 4 for many in launches[3:]) >= 4,  # gradients, values before and after, states, of two steps
        "findings": [finding.message for finding in probe.findings],
        "calls": all([c.name for c in a.calls] == [c.name for c in b.calls] for a, b in pairs),
        "numbers": all(np.allclose(b.partials, a.partials, rtol=1e-12, atol=1e-14, equal_nan=True) for a, b in pairs),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
