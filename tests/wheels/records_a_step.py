"""Trains two steps with a probe where only the wheel is installed, and prints what was recorded beside what torch says."""

import json
import shutil
import sys
from contextlib import nullcontext

import torch

import trainprobe
from trainprobe import _native
from trainprobe.engine.compare.compiled import kernel

SINKS = sys.argv[2:] or ["memory"]


def trained(output=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    x, seen = torch.randn(16, 64), []
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.detach().clone()))
    steps = []
    watching = nullcontext() if output is None else trainprobe.watch(model, optimizer, output=output, level="mix", sinks=SINKS)
    with watching as probe:
        for _ in range(2):
            if probe is not None:
                probe.begin_step()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if probe is not None:
                steps.append(probe.end_step())
    return [p.detach().tolist() for p in model.parameters()], seen, steps


plain, _, _ = trained()
watched, outputs, steps = trained(sys.argv[1])
records = [r for r in steps[0].records() if r.site.kind == "module" and r.site.name == "0" and r.site.slot == "output"]
print(
    json.dumps(
        {
            "files": [trainprobe.__file__, _native.__file__, kernel.__file__],
            "compilers": [name for name in ("cc", "gcc", "clang", "g++") if shutil.which(name)],
            "same": plain == watched,
            "steps": len(steps),
            "calls": len(steps[0].calls),
            "max": [r.values["max"] for r in records if r.step.phase == "forward"],
            "torch": outputs[0].max().item(),
        }
    )
)
