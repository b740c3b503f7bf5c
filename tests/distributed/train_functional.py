"""Functional collectives of two ranks, watched: `train_functional.py FOLDER`; each rank writes FOLDER/RANK.json.

It tells the collectives that the probe saw with their norms beside NumPy's, whether anything stayed in torch's way behind the
step, what another torch-function mode saw with the probe and without it, and digests of the gradients.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import trainprobe
from trainprobe.dump_compare.dump_side import Side
from trainprobe.engine.capture.functional_collectives import OPERATORS
from trainprobe.engine.core.records import Opaque
from trainprobe.engine.core.step_data import leaves

torch.set_num_threads(1)
SPACE = torch.ops._c10d_functional
NAMES = ("wait_tensor", *OPERATORS)


def norm(x: Tensor) -> float:
    return float(np.linalg.norm(x.detach().double().numpy().ravel()))


class Pass(nn.Module):
    """Hands on what a collective may still write."""

    def forward(self, x: Tensor) -> Tensor:
        return functional_collectives.all_reduce(x, "sum", dist.group.WORLD)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.sum, self.held = nn.Linear(6, 8), Pass(), Pass()
        self.wanted: list[list[float]] = []
        self.unused: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        group = dist.group.WORLD
        h = self.first(x)
        summed = self.sum(h)
        told = [norm(h), norm(summed * 1)]
        gathered = functional_collectives.all_gather_tensor_autograd(summed * 2, 1, group)
        told += [norm(summed * 2), norm(gathered)]
        scattered = functional_collectives.reduce_scatter_tensor_autograd(gathered, "sum", 0, group)
        told += [norm(gathered), norm(scattered * 1)]
        sent = scattered * 3
        exchanged = functional_collectives.all_to_all_single_autograd(sent, None, None, group)
        told += [norm(sent), norm(exchanged * 1)]
        self.wanted.append(told)
        self.unused.append(self.held(exchanged.detach() * 1))
        return (exchanged * torch.arange(1.0, exchanged.numel() + 1).view_as(exchanged)).sum()


class Seen(TorchFunctionMode):
    """Another program's mode: what it is handed, and whether that is what the namespace has."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(f"{type(func).__name__} {getattr(func, '__name__', func)}")
        return func(*args, **(kwargs or {}))


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.grad.numpy().tobytes() for p in model.parameters())).hexdigest()


def run(folder: Path, level: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model, mode = Model(), Seen()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    watch: Any = contextlib.nullcontext()
    if level != "off":
        plan = {"level": level, "summary": "both", "task": "tensor", "sinks": ["dump"]}
        watch = trainprobe.Probe(plan, output=folder / level, console=False)
    before = [getattr(SPACE, name, None) for name in NAMES]
    with watch as probe:
        if probe:
            probe.open(model)
        with probe.step() if probe else contextlib.nullcontext(), mode:
            model(x).backward()
            within = [type(getattr(SPACE, name, None)).__name__ for name in ("wait_tensor", "all_reduce")]
        waited = [each.completed for each in model.unused]
        after = [getattr(SPACE, name, None) for name in NAMES]
    return {
        "digest": digest(model),
        "wanted": model.wanted,
        "functions": mode.functions,
        "waited": waited,
        "within": within,
        "put_back": all(one is other for one, other in zip(before, after, strict=True)),
    }


def told(folder: Path) -> dict[str, Any]:
    side = Side(folder / "step0" / f"rank{dist.get_rank()}")
    collectives, values = [], {}
    for call in side.step_data.calls:
        if call.kind == "collective":
            numbers = [[side.numbers(v)["norm"] for _, v in leaves(tree, "")] for tree in (call.args, call.out)]
            pending = isinstance(call.out, Opaque) and call.out.value
            said = call.kwargs["group"].extra["group_ranks"], call.kwargs.get("op") and call.kwargs["op"].value
            collectives.append([call.name, *said, *numbers, pending])
        if call.kind == "module" and call.phase == "forward":
            for _, value in leaves(call.out, ""):
                array = side.array(value) if value.tensor else None
                stored = None if array is None else float(np.linalg.norm(array.ravel()))
                values[call.name] = [side.numbers(value).get("norm"), stored, value.note]
    ops = [call.name for call in side.step_data.calls if call.kind == "op"]
    return {"collectives": collectives, "values": values, "ops": ops}


def compiled() -> list[float]:
    """Return what a compiled function with functional collectives gives, within a step and outside one."""

    def scaled(x: Tensor) -> Tensor:
        return functional_collectives.all_reduce(x * 2, "sum", dist.group.WORLD) * 3

    function, found = torch.compile(scaled, backend="aot_eager", fullgraph=True), []
    for level in ("mix", "off"):
        with trainprobe.Probe({"level": level, "sinks": []}, console=False) as probe:
            probe.open(nn.Identity())
            for _ in range(2):
                with probe.step():
                    found.append(float(function(torch.ones(3)).sum()))
    return found


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    runs = {level: run(folder, level) for level in ("off", "mix", "L0")}
    dumps = {level: told(folder / level) for level in ("mix", "L0")}
    found = {"runs": runs, "dumps": dumps, "compiled": compiled()}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # all is written; gloo's own threads may abort a process at its end


if __name__ == "__main__":
    main(Path(sys.argv[1]))
