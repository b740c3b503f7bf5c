"""What the host does for a step on a device whose kernels cost nothing: Python calls of the package, and CPU time.

    python -m benchmarks.device_step

A GPT of 12 layers and 149 parameters trains on the stand-in accelerator of `tests/stand_in` (needs g++, and a minute and a half
the first time). The tensors of a step are put together for Triton's kernels, as on a GPU, and launches do nothing. Only the
training's thread is counted. The audit is off. Prints one JSON line a plan.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import torch

import trainprobe
from tests.stand_in import register
from trainprobe.demo.gpt import GPT, Shape, next_token_loss
from trainprobe.engine.arrays import triton_rows
from trainprobe.engine.plan.defaults import default_plan

DEVICE, STEPS, VOCABULARY = "npu:0", 30, 64
EVERY = {"activations": True, "activation_gradients": True, "parameters": True, "gradients": True, "optimizer_state": True}
PLANS: dict[str, dict[str, Any]] = {
    "default plan": {**default_plan(), "audit": False},
    "monitor of everything": {"level": "off", "monitor": EVERY},
    "L0": {"level": "L0"},
}
PACKAGE = f"{Path(trainprobe.__file__).parent}/"


def launch_nothing() -> None:
    """Have the stand-in's tensors reduced as those of a GPU are, but for the kernels themselves."""
    name = "trainprobe.engine.arrays.triton_kernels"
    sys.modules[name] = sys.modules["trainprobe.engine.arrays"].triton_kernels = SimpleNamespace(  # type: ignore[assignment]
        reduce_chunks="reduce_chunks", merge_parts="merge_parts"
    )
    triton_rows.DEVICES.add("npu")
    patched: Any = triton_rows
    patched._triton_is_there = lambda: True
    patched._faults = lambda: ()
    patched._run = lambda *_: None
    patched.Trust.known = lambda self, key: True
    patched.Trust.proven = lambda self, key: key[0] in triton_rows.KINDS


def measured(plan: dict[str, Any]) -> dict[str, Any]:
    """Return the calls of one step, and the least CPU time of one with the tool and without, in turn."""
    torch.manual_seed(0)
    model = GPT(Shape(layers=12, width=32, heads=2, context=16, vocabulary=VOCABULARY)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        where = frame.f_code.co_filename
        if event == "call" and where.startswith(PACKAGE) and "/demo/" not in where:
            calls[f"{where.removeprefix(PACKAGE)}:{frame.f_code.co_name}"] += 1

    def train() -> None:
        tokens = torch.randint(0, VOCABULARY, (2, 17)).to(DEVICE)
        optimizer.zero_grad()
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()

    bare, watched = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        options = {"output": folder, "console": False, "sinks": ["jsonl"], **plan}
        with trainprobe.watch(model, optimizer, options) as probe:
            for number in range(STEPS):
                probe.flush()
                sys.setprofile(count if number == STEPS - 1 else None)
                began = time.thread_time()
                with probe.step():
                    train()
                watched.append(time.thread_time() - began)
                sys.setprofile(None)
                probe.flush()
                probe.pause()
                began = time.thread_time()
                train()
                bare.append(time.thread_time() - began)
                probe.resume()
    return {"calls": calls.total(), "ms": 1e3 * (min(watched[5:-1]) - min(bare[5:])), "most": calls.most_common(12)}


def main() -> None:
    """Print a line a plan."""
    register()
    launch_nothing()
    for name, plan in PLANS.items():
        print(json.dumps({"figure": "device step", "plan": name, **measured(plan)}), flush=True)


if __name__ == "__main__":
    main()
