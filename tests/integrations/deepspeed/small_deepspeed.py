"""A small DeepSpeed training, the same one in one process of plain torch, and what can be compared of both."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.lockstep import bits_of

MICRO, ACCUMULATE, STEPS, LR, CLIP, DECAY = 4, 2, 3, 0.02, 0.1, 0.1
STATE = ("exp_avg", "exp_avg_sq")
OFFLOADED = {"device": "cpu"}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    **{f"zero{stage}-{dtype}": {} for dtype in ("fp32", "bf16") for stage in range(4)},
    "zero2-fp32-offload": {"zero_optimization": {"stage": 2, "offload_optimizer": OFFLOADED}},
    "zero3-fp32-offload": {"zero_optimization": {"stage": 3, "offload_optimizer": OFFLOADED}},
    "zero1-fp32-unmanaged": {"managed_gradient_accumulation": False},
    "zero1-bf16-adds_in_fp32": {"data_types": {"grad_accum_dtype": "fp32"}},
    "zero2-fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    """Odd sizes, so that ZeRO cuts through parameters and has to pad."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2, self.head = nn.Linear(7, 13), nn.LayerNorm(13), nn.Linear(13, 13), nn.Linear(13, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.relu(self.fc2(torch.relu(self.norm(self.fc1(x)))))
        return nn.functional.cross_entropy(self.head(z).float(), y)


def batches(rank: int, count: int = ACCUMULATE * STEPS) -> list[Batch]:
    made = torch.Generator().manual_seed(100 + rank)
    return [(torch.randn(MICRO, 7, generator=made), torch.randint(0, 3, (MICRO,), generator=made)) for _ in range(count)]


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with the usual two groups, with and without weight decay."""
    params = list(net.parameters())
    matrices, vectors = [p for p in params if p.dim() > 1], [p for p in params if p.dim() == 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}], lr=LR)


def engine_with(stage: int, dtype: str = "fp32", *, net: nn.Module | None = None, **settings: Any) -> Any:
    """Return an engine; settings go on top of its configuration."""
    import deepspeed

    torch.manual_seed(5)
    net = net or Net()
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATE,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
        "zero_force_ds_cpu_optimizer": False,  # would be compiled
        **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
        **settings,
    }
    return deepspeed.initialize(model=net, optimizer=optimizer_of(net), config=config)[0]


def train(engine: Any, micro: list[Batch], direct: bool = False) -> list[torch.Tensor]:
    """Train with an evaluation behind each micro-batch; return the losses. direct: by `loss.backward()`."""
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float16 if engine.fp16_enabled() else torch.float32
    losses = []
    for i, (x, y) in enumerate(micro):
        loss = engine(x.to(dtype), y)
        loss.backward() if direct else engine.backward(loss)
        if engine.managed_gradient_accumulation() or (i + 1) % ACCUMULATE == 0:
            engine.step()
        losses.append(loss.detach())
        engine.eval()
        with torch.no_grad():
            losses.append(engine(x.to(dtype), y))
        engine.train()
    return losses


def bits(engine: Any, losses: list[torch.Tensor]) -> dict[str, bytes]:
    """Losses, weights, optimizer state and random state."""
    found = {f"loss {i}": bits_of(loss) for i, loss in enumerate(losses)}
    found |= {f"weight {n}": bits_of(held(p)) for n, p in engine.module.named_parameters()}
    for i, entries in enumerate(engine.basic_optimizer.state.values()):
        found |= {f"state {i} {k}": bits_of(torch.as_tensor(v)) for k, v in entries.items()}
    return found | {"random state": bits_of(torch.get_rng_state())}


def held(p: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a parameter, under ZeRO 3 without the padding, which is never written."""
    if not hasattr(p, "ds_tensor"):
        return p
    size = p.ds_tensor.ds_numel
    return p.ds_tensor[: max(0, min(size, p.ds_numel - torch.distributed.get_rank() * size))]


def traces(engine: Any) -> dict[str, Any]:
    """What an integration could leave on an engine: attributes, and hooks on parameters and optimizer."""
    optimizer = engine.basic_optimizer
    return {
        "attributes": sorted(vars(engine)),
        "parameter hooks": [len(p._backward_hooks or ()) for p in engine.module.parameters()],
        "module hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in engine.module.modules()],
        "optimizer hooks": len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks),
    }


def plain_torch(ranks: int = 2) -> list[dict[str, float]]:
    """Train the same in one process of plain torch; return by step the loss and norms by "name slot".

    "grad_unreduced R" and "grad_unreduced_last R" are the gradients that rank R computes, of all and of the last micro-batch.
    """
    torch.manual_seed(5)
    net = Net()
    optimizer = optimizer_of(net)
    data = [batches(rank) for rank in range(ranks)]
    named = dict(net.named_parameters())
    steps: list[dict[str, float]] = []
    for step in range(STEPS):
        told: dict[str, float] = {}
        mean = {n: torch.zeros_like(p) for n, p in named.items()}
        for rank, own in enumerate(data):
            sum_of = {n: torch.zeros_like(p) for n, p in named.items()}
            for x, y in own[step * ACCUMULATE : (step + 1) * ACCUMULATE]:
                loss = net(x, y) / ACCUMULATE
                told[f"loss {rank}"] = told.get(f"loss {rank}", 0.0) + loss.item()
                for (n, _), gradient in zip(named.items(), torch.autograd.grad(loss, list(named.values())), strict=True):
                    sum_of[n] += gradient
                    told[f"{n} grad_unreduced_last {rank}"] = float(gradient.norm())
            told |= {f"{n} grad_unreduced {rank}": float(g.norm()) for n, g in sum_of.items()}
            mean = {n: mean[n] + g / ranks for n, g in sum_of.items()}
        for n, p in named.items():
            p.grad = mean[n]
        told |= {f"{n} value": p.norm().item() for n, p in named.items()}
        told |= {f"{n} grad_unclipped": float(p.grad.norm()) for n, p in named.items()}
        told["grad_norm"] = nn.utils.clip_grad_norm_(net.parameters(), CLIP).item()
        told |= {f"{n} grad": float(p.grad.norm()) for n, p in named.items()}
        told["lr"] = LR
        optimizer.step()
        told |= {f"{n} {slot}_after": float(optimizer.state[p][slot].norm()) for n, p in named.items() for slot in STATE}
        told |= {f"{n} value_after": p.norm().item() for n, p in named.items()}
        steps.append(told)
    return steps
