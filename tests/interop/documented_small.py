"""Programs of mindstudio-probe's documentation under either tool: `documented_small.py PACKAGE FOLDER FILE…`.

PACKAGE is "msprobe" or "trainprobe": it replaces `msprobe` in the imports, and nothing else in a program is changed. Each
FILE holds a program and the files that it needs. It runs in a process of its own, in FOLDER/0, FOLDER/1 and so on, with a
small model, its data and an optimizer at hand; an error that ends it is written to `error.txt` there.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
from children import import_once, in_child


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 4)
        self.second = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(self.first(x)))


def at_hand() -> dict[str, Any]:
    """Return the names that the documentation leaves to the reader."""
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)

    def train(data: torch.Tensor, label: torch.Tensor) -> None:
        (model(data) - label).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    data = [(torch.arange(24.0).reshape(3, 8) / 24, torch.full((3, 2), 0.5)) for _ in range(2)]
    return {"__name__": "__main__", "model": model, "optimizer": optimizer, "data_loader": data, "train": train, "torch": torch}


def run(package: str, where: Path, given: dict[str, str]) -> None:
    """Run one program in a folder of its own."""
    where.mkdir(parents=True)
    os.chdir(where)
    sys.path.insert(0, str(where))
    texts = {name: re.sub(r"(?m)^(\s*(?:from|import) )msprobe\b", rf"\g<1>{package}", text) for name, text in given.items()}
    program = texts.pop("program")
    for name, text in texts.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    out = os.open("out.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    try:
        exec(compile(program, "program.py", "exec"), at_hand())
    except Exception as error:  # noqa: BLE001  (whatever ends a program is what it came to)
        Path("error.txt").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    import_once(f"{sys.argv[1]}.pytorch")
    for i, file in enumerate(sys.argv[3:]):
        in_child(lambda i=i, file=file: run(sys.argv[1], Path(sys.argv[2]) / str(i), json.loads(Path(file).read_text())))
