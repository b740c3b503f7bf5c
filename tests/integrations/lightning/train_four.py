"""One of four ranks of Lightning trainings: DDP, and tensor parallel 2 × FSDP2 2 (ModelParallelStrategy); leaves JSON.

train_four.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from tests.integrations.lightning.small_lightning import CLIP, bits, loader, module, trainer
from trainprobe.integrations.lightning import ProbeCallback

RANK = int(os.environ["RANK"])
PLAN = {"level": "off", "monitor": {"optimizer_state": True, "gradients": {"unreduced": True}}, "audit": {"every": 1}}


class Writes(Callback):
    """Writes to what rank 3 holds of `net.first.weight`, between the second update and the third."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, index):
        if RANK == 3 and index == 3:
            held = pl_module.net.first.weight
            with torch.no_grad():
                (held.to_local() if hasattr(held, "to_local") else held).view(-1)[0] += 1e-3


def cut_module():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    made = module(drop=0.0, quiet=True)

    class Cut(type(made)):
        def configure_model(self):
            if not hasattr(self.net, "set_requires_gradient_sync"):
                how = {"first": ColwiseParallel(), "second": RowwiseParallel()}
                parallelize_module(self.net, self.device_mesh["tensor_parallel"], how)
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    made.__class__ = Cut
    return made


def fit(kind: str, probe: ProbeCallback | None, *callbacks):
    if kind == "ddp":
        model, strategy, clip, own = module(drop=0.0, quiet=True), DDPStrategy(process_group_backend="gloo"), CLIP, RANK
    else:
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2, process_group_backend="gloo")
        model, clip, own = cut_module(), None, RANK // 2  # Lightning leaves clipping of DTensors to the user
    run = trainer(
        [*callbacks, *([probe] if probe else [])], strategy=strategy, devices=4, use_distributed_sampler=False,
        accumulate_grad_batches=2, gradient_clip_val=clip,
    )  # fmt: skip
    torch.manual_seed(9)
    run.fit(model, loader(rank=own))
    return bits(model, run)


def main(folder: Path) -> None:
    told: dict[str, list] = {}
    for kind in ("ddp", "cut"):
        healthy = ProbeCallback(PLAN, output=folder / kind)
        bare, watched = fit(kind, None), fit(kind, healthy)
        told[f"{kind} different bits"] = [name for name in bare if bare[name] != watched[name]]
        told[f"{kind} healthy"] = [f.message for f in healthy.findings]
        drifting = ProbeCallback({"level": "off", "sinks": [], "audit": {"every": 1}}, output=folder / "drifting")
        fit(kind, drifting, Writes())
        told[f"{kind} drifting"] = [[f.rule, f.step, f.site and f.site.name, f.message] for f in drifting.findings]
    (folder / f"rank{RANK}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
