"""A small Lightning training, the same one in plain torch, and what can be compared of both."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch
from torch import nn

from tests.integrations.records import recorded
from tests.lockstep import bits_of

__all__ = ["batches", "bits", "loader", "module", "plain_torch", "recorded", "trainer"]

warnings.filterwarnings("ignore", module=".*(lightning|torch).*")
MICRO, BATCHES, LR, CLIP = 4, 8, 0.05, 0.05


class Net(nn.Module):
    def __init__(self, drop: float = 0.1) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.drop = nn.Dropout(drop)
        self.second = nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(torch.tanh(self.first(x)))).square().mean()


def loader(rank: int = 0, count: int = BATCHES) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(batches(rank, count), batch_size=None)


def batches(rank: int = 0, count: int = BATCHES) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(11 + rank)
    return [torch.randn(MICRO, 6, generator=made) for _ in range(count)]


def module(kind: str = "automatic", namespace: str = "lightning.pytorch", **about: Any) -> Any:
    """Return a module: automatic, manual or two optimizers; about: nan_at, poison_at … (micro-batches), rank …"""
    pl = importlib.import_module(namespace)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.net = Net(about.get("drop", 0.1))
            self.other = Net() if kind == "two optimizers" else None
            self.automatic_optimization = kind == "automatic"
            self.losses: list[torch.Tensor] = []
            self.seen = 0

        def training_step(self, batch, index):
            if about.get("crash_at") == self.seen:
                raise RuntimeError("the training broke")
            if about.get("nan_at") == self.seen and about.get("rank", 0) == self.trainer.global_rank:
                with torch.no_grad():
                    self.net.second.weight[0, 0] = float("nan")
            if about.get("poison_at") == self.seen and about.get("rank", 0) == self.trainer.global_rank:
                self.net.second.weight.register_hook(lambda gradient: gradient * float("nan"))
            if about.get("nudge_at") == self.seen and about.get("rank", 0) == self.trainer.global_rank:
                with torch.no_grad():
                    self.net.second.weight[0, 0] += 1e-4
            self.seen += 1
            loss = self.net(batch)
            self.losses.append(loss.detach())
            if "quiet" not in about:
                self.log("train_loss", loss)
            return loss if kind == "automatic" else self.by_hand(loss, batch, index)

        def by_hand(self, loss, batch, index):
            optimizers = self.optimizers()
            for optimizer, one in zip(
                optimizers if kind == "two optimizers" else [optimizers],
                [loss, self.other(batch)] if kind == "two optimizers" else [loss],
                strict=True,
            ):
                optimizer.zero_grad()
                self.manual_backward(one)
                self.clip_gradients(optimizer, gradient_clip_val=CLIP)
                optimizer.step()

        def validation_step(self, batch, index):
            self.log("val_loss", self.net(batch))

        def configure_optimizers(self):
            if kind == "two optimizers":
                return [torch.optim.AdamW(net.parameters(), lr=LR) for net in (self.net, self.other)]
            optimizer = torch.optim.AdamW(self.net.parameters(), lr=LR)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]

    return Module()


def trainer(callbacks: list[Any], namespace: str = "lightning.pytorch", **options: Any) -> Any:
    pl = importlib.import_module(namespace)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    common = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "num_sanity_val_steps": 0}
    return pl.Trainer(callbacks=callbacks, **{**quiet, **common, **options})


def bits(module: Any, trainer: Any) -> dict[str, bytes]:
    """Losses, weights, optimizer state and random state."""
    found = {f"loss {i}": bits_of(loss) for i, loss in enumerate(module.losses)}
    found |= {f"weight {n}": bits_of(local(p)) for n, p in module.named_parameters()}
    for i, optimizer in enumerate(trainer.optimizers):
        for j, entries in enumerate(optimizer.state.values()):
            found |= {f"optimizer {i} {j} {k}": bits_of(local(torch.as_tensor(v))) for k, v in entries.items()}
    return found | {"random state": bits_of(torch.get_rng_state())}


def local(t: Any) -> Any:
    return t.to_local() if hasattr(t, "to_local") else t


def plain_torch(accumulate: int, clip: float | None, micro: list[list[torch.Tensor]]) -> list[dict]:
    """Train the same in one process of plain torch; return norms of gradients, weights and moments, and the loss, by step.

    micro: for each rank its micro-batches; the loss of a step is the mean over ranks and micro-batches.
    """
    torch.manual_seed(5)
    net = Net(drop=0.0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    steps = []
    for start in range(0, len(micro[0]), accumulate):
        optimizer.zero_grad()
        losses = [net(x) / accumulate / len(micro) for own in micro for x in own[start : start + accumulate]]
        told = {"loss": float(sum(loss.detach() for loss in losses))}
        for rank in range(len(micro)):
            for loss in losses[rank * accumulate : (rank + 1) * accumulate]:
                loss.backward(retain_graph=True)
            told |= {f"{n} rank{rank}": float(p.grad.norm()) * len(micro) for n, p in net.named_parameters()}
            optimizer.zero_grad()
        for loss in losses:
            loss.backward()
        told |= {f"{n} grad_unclipped": float(p.grad.norm()) for n, p in net.named_parameters()}
        if clip:
            told["grad_norm"] = float(nn.utils.clip_grad_norm_(net.parameters(), clip))
        told |= {f"{n} grad": float(p.grad.norm()) for n, p in net.named_parameters()}
        told |= {f"{n} value": float(p.detach().norm()) for n, p in net.named_parameters()}
        told["lr"] = optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()
        told |= {f"{n} exp_avg_after": float(optimizer.state[p]["exp_avg"].norm()) for n, p in net.named_parameters()}
        steps.append(told)
    return steps
