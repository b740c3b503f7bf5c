"""Three steps of a small model, two micro-batches each, under the monitor of either tool: `monitor_small.py WHO FOLDER JSON…`.

WHO is "msprobe" or "trainprobe". JSON: a configuration of `TrainerMon`, or, with a key `monitors`, of `TrainerMonitorV2`.
Each is a process of its own, or, with a key `ranks`, as many, whose gradients are averaged; `nan_at` is a step
with NaN. The files go to FOLDER/0, FOLDER/1 and so on.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from children import import_once, in_child
from torch import distributed
from torch.nn import functional
from train_small import Net

WHERE = {"msprobe": ("msprobe.pytorch", "msprobe.core.monitor_v2"), "trainprobe": ("trainprobe.pytorch", "trainprobe.pytorch")}


def train(who: str, folder: Path, config: dict[str, Any], broken: int | None) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    first, second = WHERE[who]
    file = folder.with_suffix(f".{os.getpid()}.json")
    file.write_text(json.dumps({**config, **({"output_dir": str(folder)} if "monitors" in config else {})}))
    if "monitors" in config:
        folder.mkdir(exist_ok=True)
        importlib.import_module(second).TrainerMonitorV2(str(file)).start(model=model, optimizer=optimizer)
    else:
        monitor = importlib.import_module(first).TrainerMon(str(file), params_have_main_grad=False)
        monitor.set_monitor(model, grad_acc_steps=2, optimizer=optimizer)
    world, rank = (distributed.get_world_size(), distributed.get_rank()) if distributed.is_initialized() else (1, 0)
    for step in range(3):
        for micro in range(2):
            tokens = torch.arange(6).reshape(2, 3) + (micro + rank) % 3
            logits = model(tokens) * (float("nan") if step == broken else 1.0)
            functional.cross_entropy(logits.reshape(-1, 8), tokens.reshape(-1)).backward()
        for gradient in [p.grad for p in model.parameters() if world > 1 and p.grad is not None]:
            distributed.all_reduce(gradient)
            gradient /= world
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(json.dumps([float(p.sum()) for p in model.parameters()]))


def train_ranks(who: str, folder: Path, config: dict[str, Any]) -> None:
    """Train in one process a rank, or in this process where the configuration says nothing of ranks."""
    world, rank = config.pop("ranks", 1), 0
    broken = config.pop("nan_at", None)
    children: list[int] = []
    while len(children) < world - 1:
        children.append(os.fork())
        if not children[-1]:
            rank, children = len(children), []
            break
    if world > 1:
        distributed.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=world)
    train(who, folder, config, broken)
    if any(os.waitpid(child, 0)[1] for child in children):
        sys.exit("a rank failed")


if __name__ == "__main__":
    import_once(WHERE[sys.argv[1]][0])
    root = Path(sys.argv[2])
    root.mkdir(parents=True)

    def run(folder: Path, text: str) -> None:
        os.environ["MONITOR_OUTPUT_DIR"] = str(folder)
        train_ranks(sys.argv[1], folder, json.loads(text))

    for i, text in enumerate(sys.argv[3:]):
        if not in_child(lambda i=i, text=text: run(root / str(i), text)):
            sys.exit(f"{text} failed")
