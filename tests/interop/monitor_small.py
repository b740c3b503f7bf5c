"""Three steps of a small model, two micro-batches each, under the monitor of either tool: `monitor_small.py WHO FOLDER JSON…`.

WHO is "msprobe" or "trainprobe". JSON: a configuration of `TrainerMon`, or, with a key `monitors`, of `TrainerMonitorV2`. Each
is a process of its own, and writes to FOLDER/0, FOLDER/1 and so on.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from train_small import Net

WHERE = {"msprobe": ("msprobe.pytorch", "msprobe.core.monitor_v2"), "trainprobe": ("trainprobe.pytorch", "trainprobe.pytorch")}


def train(who: str, folder: Path, config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    first, second = WHERE[who]
    file = folder.with_suffix(".json")
    file.write_text(json.dumps({**config, **({"output_dir": str(folder)} if "monitors" in config else {})}))
    if "monitors" in config:
        folder.mkdir()
        importlib.import_module(second).TrainerMonitorV2(str(file)).start(model=model, optimizer=optimizer)
    else:
        monitor = importlib.import_module(first).TrainerMon(str(file), params_have_main_grad=False)
        monitor.set_monitor(model, grad_acc_steps=2, optimizer=optimizer)
    for _ in range(3):
        for micro in range(2):
            tokens = torch.arange(6).reshape(2, 3) + micro
            functional.cross_entropy(model(tokens).reshape(-1, 8), tokens.reshape(-1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(json.dumps([float(p.sum()) for p in model.parameters()]))


if __name__ == "__main__":
    importlib.import_module(WHERE[sys.argv[1]][0])
    root = Path(sys.argv[2])
    root.mkdir(parents=True)
    for i, text in enumerate(sys.argv[3:]):
        child = os.fork()
        if not child:
            os.environ["MONITOR_OUTPUT_DIR"] = str(root / str(i))
            train(sys.argv[1], root / str(i), json.loads(text))
            sys.exit()
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{text} failed")
