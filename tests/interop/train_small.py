"""Two steps of one small model on the CPU, recorded by either tool: `train_small.py WHO FOLDER JSON`.

WHO is "trainprobe" (JSON: fields of a plan), or "classic" or "msprobe" (JSON: a config.json, read by PrecisionDebugger of
trainprobe or of mindstudio-probe). The second step adds a NaN. With several JSON texts, each run is a process of its own and
writes to FOLDER/0, FOLDER/1 and so on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from children import import_once, in_child
from torch.nn import functional


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(4)
        self.fc = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + functional.gelu(self.fc(self.norm(x))) * scale


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.layers = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(4, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.head(x)


def one_step(model: Net, step: int) -> None:
    tokens = torch.arange(6).reshape(2, 3)
    logits = model(tokens)
    if step == 1:
        logits = logits + torch.tensor([float("nan")] + [0.0] * 7)
    functional.cross_entropy(logits.reshape(-1, 8), tokens.reshape(-1)).backward()


def train(model: Net, around: Callable[[int, Callable[[], None]], None]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        around(step, lambda step=step: one_step(model, step))
        optimizer.step()
        optimizer.zero_grad()


def by_trainprobe(folder: str, settings: dict[str, Any]) -> None:
    import trainprobe

    torch.manual_seed(0)
    model = Net()
    with trainprobe.watch(model, output=folder, **settings) as probe:

        def around(step: int, run: Callable[[], None]) -> None:
            with probe.step(step):
                run()

        train(model, around)


def by_msprobe(folder: str, settings: dict[str, Any]) -> None:
    from msprobe.pytorch import PrecisionDebugger

    by_debugger(PrecisionDebugger, folder, settings)


def by_classic_front(folder: str, settings: dict[str, Any]) -> None:
    from trainprobe.pytorch import PrecisionDebugger

    by_debugger(PrecisionDebugger, folder, settings)


def by_debugger(kind: Any, folder: str, settings: dict[str, Any]) -> None:
    config = Path(f"{folder}.json")
    config.write_text(json.dumps({"dump_path": folder, "rank": [], "step": [0, 1], "risk_level": "ALL", **settings}))
    debugger = kind(config_path=str(config))
    torch.manual_seed(0)
    model = Net()

    def around(step: int, run: Callable[[], None]) -> None:
        debugger.start(model=model)
        run()
        debugger.stop()
        debugger.step()

    train(model, around)


def run_all(run: Callable[[str, dict[str, Any]], None], folder: Path, texts: list[str]) -> None:
    """Run each configuration in a child of this process, which has imported everything once."""
    import_once("msprobe.pytorch" if run is by_msprobe else "trainprobe.pytorch")
    for i, text in enumerate(texts):
        if not in_child(lambda i=i, text=text: run(str(folder / str(i)), json.loads(text))):
            sys.exit(f"{text} failed")


if __name__ == "__main__":
    who = {"trainprobe": by_trainprobe, "classic": by_classic_front, "msprobe": by_msprobe}[sys.argv[1]]
    if len(sys.argv) > 4:
        Path(sys.argv[2]).mkdir(parents=True)
        run_all(who, Path(sys.argv[2]), sys.argv[3:])
    else:
        who(sys.argv[2], json.loads(sys.argv[3]))
