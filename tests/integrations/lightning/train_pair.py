"""One rank of Lightning trainings under DDP, FSDP2 and FSDP1, with and without the probe; leaves what came of them in JSON.

train_pair.py FOLDER
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import CustomPolicy

from tests.integrations.lightning.small_lightning import CLIP, bits, loader, local, module, trainer
from trainprobe.integrations.lightning import ProbeCallback

RANK = int(os.environ["RANK"])
OPTIONS = {"devices": 2, "use_distributed_sampler": False, "accumulate_grad_batches": 2, "gradient_clip_val": CLIP}
MONITORED = {"level": "off", "monitor": {"optimizer_state": True, "gradients": {"unreduced": True}}}


def sharded_module(**about):
    from torch.distributed.fsdp import fully_shard

    made = module("automatic", **about)

    class Sharded(type(made)):
        def configure_model(self):
            if not hasattr(self.net, "set_requires_gradient_sync"):
                fully_shard(self.net.first, mesh=self.device_mesh["data_parallel"])
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    made.__class__ = Sharded
    return made


class OnCpu(FSDPStrategy):
    """The strategy without its checks for a GPU; `net.first` is wrapped too."""

    def _setup_model(self, model):
        def is_first(module: torch.nn.Module) -> bool:
            return getattr(module, "in_features", 0) == 6

        return FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), use_orig_params=True, auto_wrap_policy=CustomPolicy(is_first)
        )


def strategy(kind: str):
    if kind == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    if kind == "fsdp":
        return OnCpu(process_group_backend="gloo")
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")


def fit(kind: str, probe: ProbeCallback | None, **about):
    clip = {} if kind == "ddp" else {"gradient_clip_val": None}  # Lightning leaves clipping of DTensors to the user
    run = trainer([probe] if probe else [], strategy=strategy(kind), **{**OPTIONS, **clip})
    model = (sharded_module if kind == "fsdp2" else module)(drop=0.0, quiet=True, **about)
    torch.manual_seed(9)
    run.fit(model, loader(rank=RANK))
    return run, model


def main(folder: Path) -> None:
    told: dict[str, object] = {}
    for kind in ("ddp", "fsdp2", "fsdp"):
        bare = fit(kind, None)
        watched = fit(kind, ProbeCallback(MONITORED, output=folder / kind))
        a, b = (bits(model, run) for run, model in (bare, watched))
        told[f"{kind} different bits"] = [name for name in a if a[name] != b[name]]
        told[f"{kind} weights"] = {
            n.removeprefix("net."): hashlib.sha256(local(p).detach().numpy().tobytes()).hexdigest()
            for n, p in watched[1].named_parameters()
        }
    level = ProbeCallback({"level": "mix", "step": 1}, output=folder / "dump")
    a, b = (bits(*reversed(fit("ddp", probe))) for probe in (None, level))
    told["dump different bits"] = [name for name in a if a[name] != b[name]]
    audited = {"level": "off", "monitor": True, "audit": {"every": 1}}
    healthy, drifting = (ProbeCallback(audited, output=folder / name) for name in ("healthy", "drifting"))
    c = bits(*reversed(fit("ddp", healthy)))
    told["audit different bits"] = [name for name in a if a[name] != c[name]]
    told["healthy"] = [f.message for f in healthy.findings]
    sharded = ProbeCallback(audited, output=folder / "sharded")
    d, e = (bits(*reversed(fit("fsdp", probe))) for probe in (None, sharded))
    told["sharded different bits"] = [name for name in d if d[name] != e[name]]
    told["sharded"] = [f.message for f in sharded.findings]
    poisoned = ProbeCallback(MONITORED, output=folder / "poisoned")
    fit("fsdp", poisoned, poison_at=5, rank=1)
    told["poisoned"] = [[f.step, f.place.rank, f.site.name, f.site.slot] for f in poisoned.findings if f.rule == "nonfinite"]
    fit("ddp", drifting, nudge_at=5, rank=1)
    told["drifting"] = [[f.rule, f.step, f.message] for f in drifting.findings]
    sick = ProbeCallback(output=folder / "sick")
    fit("ddp", sick, nan_at=5, rank=1)
    first = next(f for f in sick.findings if f.rule == "nonfinite")
    told["first not finite"] = [first.step, first.place.rank, first.site.name]
    stopping = {
        "level": "off",
        "monitor": {"rules": {"nonfinite": {"actions": ["stop"]}}, "parameters": False, "gradients": False},
    }
    told["stopped at"] = fit("ddp", ProbeCallback(stopping, output=folder / "stop"), nan_at=3, rank=1)[0].global_step
    (folder / f"rank{RANK}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
