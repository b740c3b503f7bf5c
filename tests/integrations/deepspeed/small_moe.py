"""A small mixture of experts under DeepSpeed, and the same in one process of plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.integrations.deepspeed.small_deepspeed import ACCUMULATE, CLIP, LR, MICRO, STATE, STEPS, batches

WIDTH, EXPERTS, AUXILIARY = 8, 4, 0.01
LAYER = "moe.deepspeed_moe"
PATH = f"{LAYER}.experts.deepspeed_experts"


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Experts have room for every token, so that none is dropped."""

    def __init__(self, ep_size: int, drawn: bool) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.inp, self.out = nn.Linear(7, WIDTH), nn.Linear(WIDTH, 3)
        room = {"capacity_factor": EXPERTS, "eval_capacity_factor": EXPERTS}
        self.moe = MoE(WIDTH, Expert(), EXPERTS, ep_size, use_rts=drawn, **room)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.inp(x)
        mixed, auxiliary, _ = self.moe(h)
        return loss_of(self.out(h + mixed), y, auxiliary)


def loss_of(logits: torch.Tensor, y: torch.Tensor, auxiliary: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float(), y) + AUXILIARY * auxiliary.float()


def initial(name: str, shape: torch.Size) -> torch.Tensor:
    """Return the values that a global name stands for."""
    return 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode()) % 9973))


def engine_with(name: str, ep_size: int = 2) -> Any:
    """Return an engine whose rank r of a line of `ep_size` ranks holds the experts from r × EXPERTS / ep_size on.

    name: zeroSTAGE-DTYPE; with -drawn the router draws random numbers, in evaluation too.
    """
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    stage, dtype = int(name[4]), name.split("-")[1]
    torch.manual_seed(5)
    net = Net(ep_size, name.endswith("-drawn"))
    here = torch.distributed.get_rank() % ep_size
    with torch.no_grad():
        for local, p in net.named_parameters():
            p.copy_(initial(global_name(local, here, EXPERTS // ep_size), p.shape))
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(net.parameters()), "name": "main"})
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATE,
        "gradient_clipping": clip_of(stage),
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
        **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
    }
    return deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(groups, lr=LR), config=config)[0]


def clip_of(stage: int) -> float:
    """Without ZeRO, DeepSpeed clips by the mean of the ranks' norms, which is none of the whole model: not compared."""
    return CLIP if stage else 0.0


def global_name(name: str, here: int, count: int) -> str:
    if PATH not in name:
        return name
    number, _, rest = name.removeprefix(f"{PATH}.").partition(".")
    return f"{PATH}.{here * count + int(number)}.{rest}"


class Plain(nn.Module):
    """The same mathematics: the most likely expert of each token, weighed with its probability."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out, self.wg = nn.Linear(7, WIDTH), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.inp(x)
        gates = torch.softmax(self.wg(h), dim=1)
        chosen = nn.functional.one_hot(gates.argmax(dim=1), EXPERTS)
        mixed = sum(expert(h) * (gates[:, i] * chosen[:, i])[:, None] for i, expert in enumerate(self.experts))
        auxiliary = (gates.mean(dim=0) * chosen.float().mean(dim=0)).sum() * EXPERTS
        return loss_of(self.out(h + mixed), y, auxiliary)


def named(net: Plain) -> dict[str, nn.Parameter]:
    """Return the parameters by the names that the model under DeepSpeed gives them."""
    where = {"wg.": f"{LAYER}.gate.wg.", "experts.": f"{PATH}."}
    told = dict(net.named_parameters())
    return {
        next((new + name.removeprefix(old) for old, new in where.items() if name.startswith(old)), name): p
        for name, p in told.items()
    }


def plain_moe(ranks: int, clip: float) -> list[dict[str, float]]:
    """Train the same in one process; return by step the loss of each rank and norms by "name slot"."""
    net = Plain()
    parameters = named(net)
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(initial(name, p.shape))
    optimizer, data, steps = torch.optim.AdamW(net.parameters(), lr=LR), [batches(rank) for rank in range(ranks)], []
    for step in range(STEPS):
        optimizer.zero_grad()
        told: dict[str, float] = {}
        for rank, own in enumerate(data):
            for x, y in own[step * ACCUMULATE : (step + 1) * ACCUMULATE]:
                loss = net(x, y) / ACCUMULATE
                (loss / ranks).backward()
                told[f"loss {rank}"] = told.get(f"loss {rank}", 0.0) + loss.item()
        told |= {f"{n} value": p.norm().item() for n, p in parameters.items()}
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), clip or float("inf"))
        told |= {"grad_norm": norm.item()} if clip else {}
        told |= {f"{n} grad": grad.norm().item() for n, p in parameters.items() if (grad := p.grad) is not None}
        optimizer.step()
        told |= {f"{n} {slot}_after": optimizer.state[p][slot].norm().item() for n, p in parameters.items() for slot in STATE}
        told |= {f"{n} value_after": p.norm().item() for n, p in parameters.items()}
        steps.append(told)
    return steps
