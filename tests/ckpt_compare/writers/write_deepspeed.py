"""Write DeepSpeed checkpoints on a CPU: ZeRO stages, a pipeline, a mixture of experts. One process a rank.

Every rank sees the same batch, so that the mean over ranks is exact and the weights do not depend on stage or number of ranks.
Usage: write_deepspeed.py OUT KIND [KIND …]; a KIND is `zero0` … `zero3`, with or without `-bf16` behind it, `tied0` … `tied3`
(a shared parameter and buffers), `pipe2`, `pipe1` (which loads the weights of OUT/pipe2), `moe0` or `moe1`.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
import deepspeed  # noqa: E402
import torch  # noqa: E402
from deepspeed.moe.layer import MoE  # noqa: E402
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer  # noqa: E402
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec  # noqa: E402
from torch import nn  # noqa: E402

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
WIDTH = 8


class Net(nn.Module):
    """Odd sizes, so that ZeRO has to pad."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2, self.head = nn.Linear(7, 13), nn.LayerNorm(13), nn.Linear(13, 13), nn.Linear(13, 3)

    def forward(self, x, y):
        z = torch.relu(self.fc2(torch.relu(self.norm(self.fc1(x)))))
        return nn.functional.cross_entropy(self.head(z).float(), y)


class Tied(nn.Module):
    """A head that is the embedding, and buffers: one that is saved and changes with every step, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(7, 5), nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x, y):
        self.seen[0] += 1
        z = torch.tanh(self.inner(self.embedding(x.abs().long() % 7)[:, 0]))
        return nn.functional.cross_entropy(self.head(z).float(), y)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(7, WIDTH), nn.Linear(WIDTH, 3)
        self.moe = MoE(hidden_size=WIDTH, expert=Expert(), num_experts=4, ep_size=2, k=1, capacity_factor=2.0, min_capacity=4)

    def forward(self, x, y):
        h = self.inp(x)
        mixed, balance, _ = self.moe(h)
        return nn.functional.cross_entropy(self.out(h + mixed).float(), y) + 0.01 * balance.float()


class Block(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.lin(x))


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(99)
        self.weight = nn.Parameter(torch.randn(11, WIDTH) * 0.1)

    def forward(self, ids):
        return self.weight[ids]


def config(stage: int, dtype: str) -> dict:
    made = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, "steps_per_print": 10**9}
    if dtype == "bf16":
        made["bf16"] = {"enabled": True}
    return made


def batch(step: int):
    g = torch.Generator().manual_seed(100 + step)
    return torch.randn(4, 7, generator=g), torch.randint(0, 3, (4,), generator=g)


def groups(net: nn.Module) -> list[dict]:
    params = list(net.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]


def zero(out: str, stage: int, dtype: str, kind: type[nn.Module] = Net) -> None:
    torch.manual_seed(0)
    net = kind()
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(groups(net), lr=1e-2), config=config(stage, dtype))
    for step in range(3):
        x, y = batch(step)
        engine.backward(engine(x.to(next(engine.module.parameters()).dtype), y))
        engine.step()
    if stage:
        full = {n: deepspeed.utils.safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}
        if os.environ["RANK"] == "0":
            torch.save(full, f"{out}.fp32.pt")
    engine.save_checkpoint(out)
    engine.destroy()


def moe(out: str, stage: int) -> None:
    torch.manual_seed(0)
    net = Mixture()
    split = split_params_into_different_moe_groups_for_optimizer({"params": list(net.parameters()), "name": "main"})
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(split, lr=1e-2), config=config(stage, "fp32"))
    for step in range(3):
        engine.backward(engine(*batch(step)))
        engine.step()
    torch.save({n: p.detach().clone() for n, p in engine.module.named_parameters()}, f"{out}.rank{os.environ['RANK']}.pt")
    engine.save_checkpoint(out)
    engine.destroy()


def pipe(out: str, stages: int) -> None:
    torch.manual_seed(0)
    head = TiedLayerSpec("emb", Embedding, forward_fn=lambda m, x: x @ m.weight.t())
    specs = [TiedLayerSpec("emb", Embedding), *(LayerSpec(Block, i) for i in range(4)), head]
    loss = lambda o, y: nn.functional.cross_entropy(o.float().view(-1, 11), y.view(-1))  # noqa: E731
    net = PipelineModule(specs, num_stages=stages, loss_fn=loss, partition_method="parameters")
    settings = {**config(1, "fp32"), "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    params = [p for p in net.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(params, lr=1e-2), config=settings)

    def data():
        g = torch.Generator().manual_seed(5)
        while True:
            ids = torch.randint(0, 11, (2, 6), generator=g)
            yield ids, (ids + 1) % 11

    batches = data()
    if stages == 1:
        engine.load_checkpoint(str(Path(out).parent / "pipe2"), load_module_only=True)
    else:
        for _ in range(3):
            engine.train_batch(data_iter=batches)
    engine.save_checkpoint(out)


def main() -> None:
    root, kinds = sys.argv[1], sys.argv[2:]
    deepspeed.init_distributed()
    for kind in kinds:
        out = f"{root}/{kind}"
        if kind.startswith("zero"):
            zero(out, int(kind[4]), "bf16" if kind.endswith("bf16") else "fp32")
        elif kind.startswith("tied"):
            zero(out, int(kind[4:]), "fp32", Tied)
        elif kind.startswith("moe"):
            moe(out, int(kind[3:] or 0))
        else:
            pipe(out, int(kind[4:]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
