"""A step of a small GPT that others split over ranks: `train_styles.py FOLDER KIND[+PLAN]…` on each rank.

KIND: alone; styles (tensor parallelism of torch: ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput and
loss_parallel), deepspeed (attention of DeepSpeed's sequence parallelism, `deepspeed.sequence.layer.DistributedAttention`).
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import trainprobe
from tests.dump_compare.train_gathered import HEADS, PLANS, SAMPLES, TOKENS, WIDTH, WORDS, own, rank, world
from trainprobe.engine.core.records import Place


class Core(nn.Module):
    """Attention within heads, [samples, tokens, heads, width of a head]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.core: Any = Core()
        self.spread: Any = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, WIDTH // HEADS)) for linear in (self.q, self.k, self.v))
        mixed = self.core(q, k, v) if self.spread is None else self.spread[0](q, k, v, batch_dim_idx=0)
        return self.out(mixed.flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def by_styles(model: Model) -> None:
    """Split a model as torch's guide to tensor parallelism does it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (world(),))
    whole = {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), "norm": SequenceParallel()}
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {**whole, "head": head})
    given = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for block in model.blocks:
        matrices = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"mlp.up": ColwiseParallel()}
        back = {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.out", "mlp.down")}
        norms = {"norm": SequenceParallel(), "norm2": SequenceParallel()}
        parallelize_module(block, mesh, {"attention": given, "mlp": given, **matrices, **back, **norms})


def by_deepspeed(model: Model) -> None:
    """Exchange tokens for heads around attention, as DeepSpeed does it."""
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
    deepspeed.comm.init_distributed("gloo", verbose=False)
    for block in model.blocks:
        core = block.attention.core
        block.attention.spread = [DistributedAttention(core, dist.group.WORLD, scatter_idx=2, gather_idx=1)]


def train(output: Path, kind: str = "alone", plan: str = "mix-both") -> None:
    torch.manual_seed(0)
    model, place, loss_of = Model(), None, contextlib.nullcontext()
    words = torch.randint(WORDS, (SAMPLES, TOKENS + 1), generator=torch.Generator().manual_seed(3))
    x, y = words[:, :-1], words[:, 1:]
    if kind == "styles":
        from torch.distributed.tensor.parallel import loss_parallel

        by_styles(model)
        loss_of = loss_parallel()
        place = Place(rank(), world(), {"tp": (rank(), world())})
    if kind == "deepspeed":
        by_deepspeed(model)
        place = Place(rank(), world(), {"sp": (rank(), world())})
        x, y = own(x, 1), own(y, 1)
    level, _, kept = plan.partition("-")
    asked = {"level": level, **PLANS[kept or "both"], "sinks": ["dump"]}
    with trainprobe.Probe(asked, place=place, output=output, console=False) as probe:
        probe.open(model)
        with probe.step(), loss_of:
            functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for layout in sys.argv[2:]:
        kind, _, plan = layout.partition("+")
        train(Path(sys.argv[1]) / layout, kind, plan or "mix-both")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
