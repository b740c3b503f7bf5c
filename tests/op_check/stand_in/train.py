"""Train a small GPT on the stand-in accelerator, one kernel of which is wrong, and print what op_check says of it as JSON.

    python train.py KERNEL OUTPUT_FOLDER [HOST:PORT of a server]

KERNEL: `none`, `forward` (GELU), `backward` (the gradient of layer norm) or `strided` (tanh of what does not lie in order).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import trainprobe
from tests.stand_in import register
from trainprobe.demo.gpt import GPT, Shape
from trainprobe.op_check.dump import check_dump, rank_folders

aten = torch.ops.aten


def gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """Give another approximation, 0.02 off."""
    host = x.cpu()
    return (host * torch.sigmoid(1.702 * host)).to(x.device)


def gradient_of_layer_norm(*given: Any) -> tuple[Any, ...]:
    """Forget the mean of the gradient."""
    g, x, shape, mean, rstd, weight, *rest = [t.cpu() if isinstance(t, torch.Tensor) else t for t in given]
    found = aten.native_layer_norm_backward(g, x, shape, mean, rstd, weight, *rest)
    normal, scaled = (x - mean) * rstd, g * weight
    wrong = rstd * (scaled - normal * (scaled * normal).mean(-1, True))
    return tuple(t.to(given[0].device) for t in (wrong, *found[1:]))


def tanh(x: torch.Tensor) -> torch.Tensor:
    """Read a tensor as it lies in memory, whatever its strides."""
    host = x.cpu() if x.is_contiguous() else x.mT.cpu().contiguous().view(x.shape)
    return torch.tanh(host).to(x.device)


KERNELS: dict[str, tuple[str, Any]] = {
    "forward": ("gelu", gelu),
    "backward": ("native_layer_norm_backward", gradient_of_layer_norm),
    "strided": ("tanh", tanh),
}


class Model(nn.Module):
    """A GPT whose loss has a term of its turned scores, and one of them as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(Shape(layers=2, width=32, heads=2, context=16, vocabulary=40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gpt(x)
        turned = torch.tanh(scores.mT) * torch.tanh(scores).mT
        return F.cross_entropy(scores.flatten(0, 1), x.flatten()) + turned.mean()


def main(kernel: str, output: str, server: str = "") -> None:
    register()
    library = torch.library.Library("aten", "IMPL")
    if kernel in KERNELS:
        library.impl(*KERNELS[kernel], "PrivateUse1")
    torch.manual_seed(0)
    model = Model().to("npu:0")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    where: dict[str, Any] = {} if not server else {"server": server, "patience": 10.0, "wait": 60.0, "run": kernel}
    plan: Any = {"level": "mix", "task": "tensor", "step": [0], "sinks": ["dump"], "console": False, "output": output}
    with trainprobe.watch(model, optimizer, **plan, op_check={"step": [0], **where}) as probe:
        for _ in range(2):
            x = torch.randint(0, 40, (2, 16)).to("npu:0")
            with probe.step():
                model(x).backward()
                optimizer.step()
                optimizer.zero_grad()
    rows = check_dump(rank_folders(Path(output))).rows
    bugs = sorted((row for row in rows if row.worst.outcome in ("bug", "suspicious")), key=lambda row: -row.worst.worst)
    report = {
        "calls": len(rows),
        "not checked": [f"{row.entry}: {row.worst.reason}" for row in rows if row.worst.outcome == "not checked"],
        "offline": [f"{row.entry}: {row.worst.reason}" for row in bugs],
        "training": [f.message for f in probe.findings if f.rule == "op_check" and f.severity in ("error", "warning")],
        "said": [*probe.sentences],
    }
    print("REPORT", json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
