"""One rank of plain loops under FullyShardedDataParallel, with and without the probe; leaves what came of them in a JSON file.

train_flat_shards.py FOLDER
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import trainprobe
from tests.integrations.lightning.small_lightning import CLIP, LR, Net, batches
from tests.lockstep import bits_of
from trainprobe.integrations.torch_loop import attach

RANK = int(os.environ["RANK"])
FAULTY, STRATEGIES = 2, {"shards": ShardingStrategy.FULL_SHARD, "whole": ShardingStrategy.NO_SHARD}
GRADIENTS = {"unreduced": True, "names": ["first.**", "**.weight", "**.bias"]}  # of the original parameters
EVERYTHING = {"level": "off", "monitor": {"optimizer_state": True, "update": True, "gradients": GRADIENTS}}
AUDITED = {"level": "off", "audit": {"every": 1}, "monitor": True}


class Poisoned(Net):
    """Makes one element of the gradient of `second.weight` NaN, in the step that `poisoned` names."""

    poisoned = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.poisoned:
            self.second.weight.register_hook(lambda gradient: gradient.index_fill(1, torch.tensor(3), float("nan")))
        return super().forward(x)


def wrapped(original: bool, strategy: str, drop: float) -> tuple[Poisoned, FullyShardedDataParallel]:
    torch.manual_seed(5)
    net = Poisoned(drop)
    how = {"device_id": torch.device("cpu"), "use_orig_params": original, "sharding_strategy": STRATEGIES[strategy]}
    net.first = FullyShardedDataParallel(net.first, **how)
    return net, FullyShardedDataParallel(net, **how)


def train(
    plan: dict | None, original: bool, *, strategy: str = "shards", accumulate: int = 1, fault: str = "", drop: float = 0.0
) -> tuple[dict[str, bytes], list[list]]:
    """Train and return the bits of all that came of it, and what was found: rule, step, rank and name."""
    net, model = wrapped(original, strategy, drop)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    torch.manual_seed(9 + RANK)
    micro, bits = iter(batches(RANK)), {}
    with trainprobe.watch(model, optimizer, plan=plan) if plan else contextlib.nullcontext() as probe:
        for step in range(8 // accumulate):
            net.poisoned = fault == "nan" and step == FAULTY and RANK == 1
            with probe.step(step) if probe else contextlib.nullcontext():
                optimizer.zero_grad()
                for _ in range(accumulate):
                    loss = model(next(micro)) / accumulate
                    loss.backward()
                norm = model.clip_grad_norm_(CLIP)
                optimizer.step()
                schedule.step()
            bits |= {f"{step} loss": bits_of(loss), f"{step} norm": bits_of(norm)}
            if fault == "drift" and step + 1 == FAULTY and RANK == 1:
                with torch.no_grad():
                    next(p for n, p in model.named_parameters() if "first" not in n).view(-1)[1] += 1e-3
    bits |= {f"weight {n}": bits_of(p) for n, p in model.named_parameters()}
    for i, entries in enumerate(optimizer.state.values()):
        bits |= {f"optimizer {i} {k}": bits_of(torch.as_tensor(v)) for k, v in entries.items()}
    bits["random state"] = bits_of(torch.get_rng_state())
    return bits, [[f.rule, f.step, f.place.rank, f.site and f.site.name, f.message] for f in probe.findings] if probe else []


def train_accelerated(plan: dict | None) -> tuple[list[bytes], list[str]]:
    """Train by Accelerate, which makes DDP of FSDP on a CPU: it is told after each `prepare` that it has not."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    accelerator = Accelerator(cpu=True)
    told = {"distributed_type": DistributedType.FSDP, "device": torch.device("cpu")}
    told["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=True, sync_module_states=False)
    AcceleratorState._shared_state |= told
    PartialState._shared_state["device"] = torch.device("cpu")
    torch.manual_seed(5)
    model = accelerator.prepare(Net(0.0))
    bare = torch.optim.AdamW(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.StepLR(bare, 2)
    optimizer = accelerator.prepare(bare)
    AcceleratorState._shared_state |= told
    loop = attach(model, optimizer, plan) if plan else None
    losses = []
    for x in batches(RANK):
        loss = model(x)
        losses.append(bits_of(loss))
        accelerator.backward(loss)
        losses.append(bits_of(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    if loop is not None:
        loop.close()
    return losses, [f.message for f in loop.findings] if loop is not None else []


def main(folder: Path) -> None:
    told: dict[str, list] = {}

    def compare(name: str, plan: dict, **how) -> None:
        bare, (bits, found) = train(None, **how)[0], train({**plan, "output": str(folder / name)}, **how)
        told[f"{name} different bits"] = [key for key in bare if bare[key] != bits[key]]
        told[f"{name} found"] = found

    for original in (True, False):
        kind = "views" if original else "flat"
        compare(f"{kind} shards", EVERYTHING, original=original)
        compare(f"{kind} whole", EVERYTHING, original=original, strategy="whole")
        compare(f"{kind} accumulated", EVERYTHING, original=original, accumulate=2)
        compare(f"{kind} dump", {"level": "mix", "task": "tensor", "step": 1}, original=original, drop=0.1)
        compare(f"{kind} audit", AUDITED, original=original, drop=0.1)
        for fault in ("nan", "drift"):
            plan = {**(AUDITED if fault == "drift" else EVERYTHING), "output": str(folder / f"{kind} {fault}")}
            told[f"{kind} {fault} found"] = train(plan, original, fault=fault)[1]
    losses, found = train_accelerated({**EVERYTHING, "audit": {"every": 1}, "output": str(folder / "accelerate")})
    told |= {"accelerate same": losses == train_accelerated(None)[0], "accelerate found": found}
    (folder / f"rank{RANK}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
