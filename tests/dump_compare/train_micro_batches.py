"""Two steps on the same samples in other micro-batches and shards: `train_micro_batches.py FOLDER KIND:MICRO_BATCHES[:FAULT]…`.

KIND: alone, ddp, fsdp1, fsdp2, tied (fsdp2; the head has the weight of the embedding), frozen (fsdp2; two are not trained).
Sizes divide by no number of ranks. FAULT, on the second rank: sample (another word), scale (of the loss), weight.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import trainprobe

WORDS, SAMPLES, STEPS = 11, 8, 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 5)
        self.up, self.act, self.down = nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)
        self.head, self.gain = nn.Linear(5, WORDS, bias=False), nn.Linear(5, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        h = h + self.down(self.act(self.up(h)))
        logits = self.head(h) * (1 + 0.1 * self.gain(h))
        return functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def spread(model: Model, kind: str) -> Any:
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    if kind != "tied":
        fully_shard(model.up, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(output: Path, kind: str, micro_batches: int, fault: str = "", *, optimizer_state: bool = False) -> None:
    torch.manual_seed(0)
    bare = Model()
    if kind.endswith("tied"):
        bare.head.weight = bare.embed.weight
    if kind.endswith("frozen"):
        bare.up.bias.requires_grad_(False)
        bare.down.weight.requires_grad_(False)
    alone = kind.startswith("alone")
    rank, ranks = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    model: Any = bare if alone else spread(bare, kind)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    if fault == "weight" and rank == 1:
        with torch.no_grad():
            held: Any = bare.head.weight
            (held.to_local() if hasattr(held, "to_local") else held).data.mul_(1.01)
    plan = {
        "level": "L0",
        "summary": "both",
        "step": list(range(STEPS)),
        "monitor": {"parameters": True, "gradients": True, "optimizer_state": optimizer_state},
        "sinks": ["dump"],
    }
    generator = torch.Generator().manual_seed(3)
    with trainprobe.Probe(plan, output=output, console=False) as probe:
        probe.open(model, optimizer)
        for _ in range(STEPS):
            words = torch.randint(WORDS, (SAMPLES, 6), generator=generator)
            if fault == "sample" and rank == 1:
                words[-1, 0] = (words[-1, 0] + 1) % WORDS
            with probe.step():
                optimizer.zero_grad()
                for part in words.chunk(ranks)[rank].chunk(micro_batches):
                    loss = model(part[:, :-1], part[:, 1:]) / micro_batches
                    (loss * (1.5 if fault == "scale" and rank == 1 else 1)).backward()
                optimizer.step()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for layout in sys.argv[2:]:
        kind, micro_batches, *fault = layout.split(":")
        train(Path(sys.argv[1]) / layout, kind, int(micro_batches), *fault)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
