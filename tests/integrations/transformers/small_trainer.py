"""A small training with the Hugging Face Trainer, the same one in plain torch, and what can be compared of both."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from tests.integrations.lightning.small_lightning import local, recorded
from tests.lockstep import bits_of

__all__ = ["bits", "plain_torch", "recorded", "train"]
warnings.filterwarnings("ignore", module=".*(transformers|accelerate|torch).*")
MICRO, STEPS, LR, CLIP = 4, 4, 0.05, 0.05


class Net(nn.Module):
    """first, dropout, second; returns its loss as models of transformers do."""

    def __init__(self, drop: float = 0.1, **about: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(6, 12)
        self.drop = nn.Dropout(drop)
        self.second = nn.Linear(12, 1)
        self.about = about
        self.seen = 0
        self.losses: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            if self.about.get("crash_at") == self.seen:
                raise RuntimeError("the training broke")
            if self.about.get("nan_at") == self.seen:
                with torch.no_grad():
                    self.second.weight[0, 0] = float("nan")
            self.seen += 1
        out = self.second(self.drop(torch.tanh(self.first(x))))
        loss = out.square().mean()
        if self.training:
            self.losses.append(loss.detach())
        return {"loss": loss, "logits": out}


class Sequential(Trainer):
    """Takes the samples in their order."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def samples(accumulate: int, ranks: int = 1) -> list[torch.Tensor]:
    """Return the micro-batches of a run in order; those of the ranks take turns."""
    made = torch.Generator().manual_seed(11)
    return [torch.randn(MICRO, 6, generator=made) for _ in range(STEPS * accumulate * ranks)]


def trainer(
    folder: Any, callbacks: list[Any], accumulate: int = 1, clip: float = 0.0, ranks: int = 1, **options: Any
) -> Trainer:
    about = {name: options.pop(name) for name in ("nan_at", "crash_at", "drop") if name in options}
    data = [{"x": x} for batch in samples(accumulate, ranks) for x in batch]
    arguments = {
        "output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no",
        "logging_strategy": "no", "per_device_train_batch_size": MICRO, "max_steps": STEPS,
        "learning_rate": LR, "weight_decay": 0.0,
        "gradient_accumulation_steps": accumulate, "max_grad_norm": clip, "remove_unused_columns": False,
        "dataloader_pin_memory": False, "label_names": [],
    }  # fmt: skip
    net = Net(**about)
    return Sequential(
        model=net,
        args=TrainingArguments(**{**arguments, **options}),
        train_dataset=data,
        eval_dataset=data[:4],
        callbacks=callbacks,
    )


def train(folder: Any, callbacks: list[Any], **options: Any) -> Trainer:
    """Train and return the trainer."""
    run = trainer(folder, callbacks, **options)
    torch.manual_seed(9)
    run.train()
    return run


def bits(run: Trainer) -> dict[str, bytes]:
    """Losses, weights, optimizer state and random state."""
    found = {f"loss {i}": bits_of(loss) for i, loss in enumerate(run.model.losses)}
    found |= {f"weight {n}": bits_of(local(p)) for n, p in run.model.named_parameters()}
    state = getattr(run.optimizer, "optimizer", run.optimizer).state
    for j, entries in enumerate(state.values()):
        found |= {f"optimizer {j} {k}": bits_of(torch.as_tensor(v)) for k, v in entries.items()}
    return found | {"random state": bits_of(torch.get_rng_state())}


def plain_torch(accumulate: int, clip: float, ranks: int = 1) -> list[dict[str, float]]:
    """Train the same in one process of plain torch; return norms of gradients, weights and moments, loss and lr, by step."""
    net = Net(drop=0.0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    batches, steps = samples(accumulate, ranks), []
    for start in range(0, len(batches), accumulate * ranks):
        optimizer.zero_grad()
        losses = [net(x)["loss"] / accumulate / ranks for x in batches[start : start + accumulate * ranks]]
        for loss in losses:
            loss.backward()
        told = {"loss": float(sum(loss.detach() for loss in losses)), "lr": optimizer.param_groups[0]["lr"]}
        told |= {f"{n} grad_unclipped": float(p.grad.norm()) for n, p in net.named_parameters()} if clip else {}
        if clip:
            told["grad_norm"] = float(nn.utils.clip_grad_norm_(net.parameters(), clip))
        told |= {f"{n} grad": float(p.grad.norm()) for n, p in net.named_parameters()}
        told |= {f"{n} value": float(p.detach().norm()) for n, p in net.named_parameters()}
        optimizer.step()
        schedule.step()
        told |= {f"{n} exp_avg_after": float(optimizer.state[p]["exp_avg"].norm()) for n, p in net.named_parameters()}
        steps.append(told)
    return steps
