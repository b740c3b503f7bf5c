"""Two steps of a small GPT in several layouts of torch, dumped: `train_layouts.py FOLDER KIND[:FAULT]…` on each rank.

KIND: ddp, fsdp2, tensor (DTensor), alone. All layouts begin with the same weights and see the same samples.
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

WIDTH, WORDS, STEPS = 32, 50, 2
WHERE = "layers.1.down"
MONITOR = {"parameters": True, "gradients": True}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        b, t, _ = h.shape
        q, k, v = (linear(h).view(b, t, -1, 8).transpose(1, 2) for linear in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, -1))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def spread(kind: str, model: Any) -> Any:
    """Return a model whose parameters are spread over the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp" if kind == "tensor" else "dp",))
    if kind == "tensor":
        column, row = ["q", "k", "v", "up"], ["out", "down"]
        for layer in model.layers:
            ways = {name: ColwiseParallel() for name in column} | {name: RowwiseParallel() for name in row}
            parallelize_module(layer, mesh, ways)
        return model
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def plant(fault: str, bare: Any, model: Any) -> None:
    """Change a `weight` or a `shard` of the second rank alone; or leave out the `reduce` of activations or `gradients`."""
    linear = bare.get_submodule(WHERE)
    if fault in ("weight", "shard") and dist.get_rank() == 1:
        with torch.no_grad():
            (linear.weight.to_local() if fault == "shard" else linear.weight).mul_(1.01)
    if fault == "reduce":
        linear._forward_hooks.clear()
        linear.register_forward_hook(lambda module, given, out: out.to_local())
    if fault == "gradients":
        bare.register_forward_pre_hook(lambda module, given: setattr(model, "require_backward_grad_sync", False))
        model.require_backward_grad_sync = False


def train(output: Path, kind: str = "alone", fault: str = "") -> None:
    torch.manual_seed(0)
    bare = Gpt()
    model = bare if kind == "alone" else spread(kind, bare)
    if fault:
        plant(fault, bare, model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    samples = torch.randint(WORDS, (STEPS, 4, 9), generator=torch.Generator().manual_seed(3))
    shares = dist.get_world_size() if kind in ("ddp", "fsdp2") else 1
    plan = {"level": "L0", "summary": "both", "step": list(range(STEPS)), "monitor": MONITOR, "sinks": ["dump"]}
    with trainprobe.watch(model, optimizer, plan=plan, output=output, console=False) as probe:
        for words in samples:
            words = words.chunk(shares)[dist.get_rank() if shares > 1 else 0]
            with probe.step():
                optimizer.zero_grad()
                model(words[:, :-1], words[:, 1:]).backward()
                optimizer.step()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for layout in sys.argv[2:]:
        kind, _, fault = layout.partition(":")
        train(Path(sys.argv[1]) / layout, kind, fault)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
