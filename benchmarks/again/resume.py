"""A training that is saved, resumed with one fault, and saved again one step later.

python -m benchmarks.again.resume

Each fault has the healthy resume as its twin. Found is a fault whose kind the sentence names.
"""

from __future__ import annotations

import copy
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from trainprobe.again.conditions.resume import (
    AVERAGED,
    BUFFERS,
    COUNTERS,
    DATA,
    MOMENTS,
    RANDOM,
    RATES,
    SCALE,
    WEIGHTS,
    compared,
    held_by,
    judge,
)

SAVED, CHECKED = 5, 6  # steps


class Net(nn.Module):
    """Has running statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 32))
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).relu())


class Run:
    """All that a training has; kind: which optimizer, and what there is beside it."""

    def __init__(self, kind: str = "adamw", seed: int = 0) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.kind, self.step, self.epoch, self.position = kind, 0, 0, 0
        self.model = Net().bfloat16() if kind == "bfloat16" else Net()
        if kind == "sgd":
            self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        elif kind == "adagrad":
            self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.05)
        else:
            groups = [{"params": self.model.body.parameters()}, {"params": self.model.head.parameters(), "lr": 3e-3}]
            options: dict[str, Any] = {"amsgrad": kind == "amsgrad", "fused": kind == "fused"}
            self.optimizer = torch.optim.AdamW(groups, lr=1e-2, **options)
        if kind == "cosine":
            self.scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        else:
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (1 + n))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=kind == "scaled")
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if kind != "no average" else None
        self.data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
        self.labels = torch.randint(0, 4, (64,), generator=torch.Generator().manual_seed(2))
        self.shuffle()

    def shuffle(self) -> None:
        self.order = torch.randperm(64, generator=torch.Generator().manual_seed(100 + self.epoch)).tolist()

    def train(self) -> None:
        rows = self.order[self.position : self.position + 8]
        self.position += 8
        if self.position == 64:
            self.epoch, self.position = self.epoch + 1, 0
            self.shuffle()
        x = self.data[rows] + 0.01 * random.random() + 0.01 * float(np.random.rand())
        loss = nn.functional.cross_entropy(self.model(x.to(next(self.model.parameters()).dtype)), self.labels[rows])
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        if self.ema is not None:
            self.ema.update_parameters(self.model)
        self.step += 1

    def state(self) -> dict[str, Any]:
        found = {
            **{"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step},
            **{"scheduler": self.scheduler.state_dict(), "scaler": self.scaler.state_dict()},
            "rng": {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()},
            "sampler": {"epoch": self.epoch, "position": self.position},
        }
        return copy.deepcopy({**found, "ema": self.ema.module.state_dict()} if self.ema is not None else found)

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"], strict=False)
        if "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])
        if "scheduler" in state:
            self.scheduler.load_state_dict(state["scheduler"])
        if state.get("scaler"):
            self.scaler.load_state_dict(state["scaler"])
        if "ema" in state and self.ema is not None:
            self.ema.module.load_state_dict(state["ema"])
            self.ema.n_averaged.fill_(state["step"])
        self.step = state.get("step", 0)
        rng = state.get("rng", {})
        for name, put in (("torch", torch.set_rng_state), ("python", random.setstate), ("numpy", np.random.set_state)):
            if name in rng:
                put(rng[name])
        sampler = state.get("sampler", {})
        self.epoch, self.position = sampler.get("epoch", 0), sampler.get("position", 0)
        self.shuffle()


def without(state: dict[str, Any], *path: str) -> dict[str, Any]:
    here: Any = state
    for key in path[:-1]:
        here = here[key]
    here.pop(path[-1])
    return state


def fault(name: str, s: dict[str, Any]) -> dict[str, Any]:
    """Return a saved state as a faulty resume brings it back."""
    weights, moments = s["model"], s["optimizer"]["state"]
    if name == "half of the weights not loaded":
        s["model"] = {k: v for k, v in weights.items() if "running" in k or "num_b" in k or k.startswith("head")}
    elif name == "weights through bfloat16":
        s["model"] = {k: v.bfloat16().float() if v.is_floating_point() else v for k, v in weights.items()}
    elif name == "optimizer not loaded":
        return without(s, "optimizer")
    elif name == "second moments zero":
        for one in moments.values():
            one["exp_avg_sq"].zero_()
    elif name == "both moments zero":
        for one in moments.values():
            one["exp_avg"].zero_()
            one["exp_avg_sq"].zero_()
    elif name == "moments of two parameters swapped":
        moments[0]["exp_avg"], moments[6]["exp_avg"] = (
            moments[0]["exp_avg"] * 0 + moments[6]["exp_avg"].mean(),
            moments[6]["exp_avg"],
        )
    elif name == "step counters begin anew":
        for one in moments.values():
            one["step"].zero_()
    elif name == "scheduler not loaded":
        for group in s["optimizer"]["param_groups"]:
            group["lr"] = group["initial_lr"]
        return without(s, "scheduler")
    elif name == "scheduler one step behind":
        s["scheduler"]["last_epoch"] -= 1
    elif name == "scaler not loaded":
        return without(s, "scaler")
    elif name == "data begin anew":
        s["sampler"]["position"] = 0
    elif name == "epoch of the sampler forgotten":
        s["sampler"]["epoch"] += 1
    elif name == "torch's random state not loaded":
        return without(s, "rng", "torch")
    elif name == "NumPy's random state not loaded":
        return without(s, "rng", "numpy")
    elif name == "running statistics not loaded":
        s["model"] = {k: v for k, v in weights.items() if "running" not in k}
    elif name == "averaged weights begin anew":
        s["ema"] = copy.deepcopy(weights)
    return s


FAULTS = {
    "half of the weights not loaded": WEIGHTS,
    "weights through bfloat16": WEIGHTS,
    "optimizer not loaded": COUNTERS,
    "second moments zero": MOMENTS,
    "both moments zero": MOMENTS,
    "moments of two parameters swapped": MOMENTS,
    "step counters begin anew": COUNTERS,
    "scheduler not loaded": RATES,
    "scheduler one step behind": RATES,
    "scaler not loaded": SCALE,
    "data begin anew": DATA,
    "epoch of the sampler forgotten": DATA,
    "torch's random state not loaded": RANDOM,
    "NumPy's random state not loaded": RANDOM,
    "running statistics not loaded": BUFFERS,
    "averaged weights begin anew": AVERAGED,
}
HEALTHY = (
    "adamw",
    "sgd",
    "adagrad",
    "amsgrad",
    "fused",
    "cosine",
    "scaled",
    "no average",
    "bfloat16",
    "later",
    "at an epoch's end",
    "at once",
)


def resumed(kind: str, name: str, saved: int = SAVED, further: int = 1) -> Any:
    """Return the verdict on a run of this kind that was resumed with a fault."""
    folder = Path(tempfile.mkdtemp())
    straight = Run(kind)
    for _ in range(saved):
        straight.train()
    state = straight.state()
    for _ in range(further):
        straight.train()
    torch.save(straight.state(), folder / "straight.pt")
    again = Run(kind, seed=7)
    again.load(fault(name, state))
    for _ in range(further):
        again.train()
    torch.save(again.state(), folder / "resumed.pt")
    return judge(held_by(compared(folder / "straight.pt", folder / "resumed.pt")))


def told(name: str, word: str, verdict: Any) -> None:
    print(f"{name:36} {word:7} {verdict.code} {verdict.sentence[:100]} | {'; '.join(verdict.details)[:150]}", flush=True)


def main() -> None:
    named = alarms = 0
    for name, kind in FAULTS.items():
        verdict = resumed("scaled", name)
        right = verdict.code == 2 and f"wrong: {kind}:" in verdict.sentence
        named += right
        told(name, "named" if right else "MISSED", verdict)
    more = {"later": (11, 2), "at an epoch's end": (8, 1), "at once": (5, 0)}
    for kind in HEALTHY:
        verdict = resumed("scaled" if kind in more else kind, "", *more.get(kind, (SAVED, 1)))
        alarms += verdict.code >= 2
        told(kind, "ALARM" if verdict.code >= 2 else "quiet", verdict)
    print(f"faults: {named} of {len(FAULTS)} named by kind; healthy resumes: {alarms} alarms of {len(HEALTHY)}")


if __name__ == "__main__":
    main()
