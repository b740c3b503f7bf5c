"""The PyNative Trainer of MindFormers on a tiny model of one's own, without and with the callback.

Argument: the folder for what is written, which holds a `plan.yaml`. The configuration fills what the trainer insists on; the
callback that prints the loss asks the model for a Megatron configuration, and is taken out.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindformers.pynative.callback import LossCallback, TrainerCallback
from mindformers.pynative.trainer.trainer import Trainer
from mindspore import nn
from mindspore.dataset import GeneratorDataset

from trainprobe.integrations.mindformers import ProbeCallback, attach_to_script

STEPS, BATCH, WIDTH = 4, 2, 5


class Model(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Dense(WIDTH, 2 * WIDTH)
        self.act = nn.GELU()
        self.down = nn.Dense(2 * WIDTH, 1)

    def construct(self, x: Any, y: Any) -> Any:
        return (((self.down(self.act(self.up(x))) - y) ** 2).mean(),)


class Data:
    def __init__(self, broken: bool) -> None:
        draw = np.random.default_rng(2)
        self.x = draw.standard_normal((STEPS * BATCH, WIDTH)).astype(np.float32)
        self.y = draw.standard_normal((STEPS * BATCH, 1)).astype(np.float32)
        if broken:
            self.y[BATCH] = np.inf  # in step 2

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return self.x[i], self.y[i]


class Watch(TrainerCallback):
    def __init__(self) -> None:
        self.reports: list[list[Any]] = []
        self.held: list[str] = []

    def on_step_end(self, args: Any, state: Any, **about: Any) -> None:
        norm = about["grad_norm"]
        self.reports.append(
            [int(state.global_step), float(about["loss"].asnumpy()), None if norm is None else float(norm.asnumpy())]
        )

    def on_train_end(self, args: Any, state: Any, **about: Any) -> None:
        held = (*about["model"].get_parameters(), *about["optimizer"].get_parameters())
        self.held = sorted(f"{p.name} {hashlib.sha256(p.asnumpy().tobytes()).hexdigest()}" for p in held)


class Writes(TrainerCallback):
    """Writes to a weight behind step 3."""

    def on_step_end(self, args: Any, state: Any, **about: Any) -> None:
        if state.global_step == 3:
            weight = about["model"].up.weight
            ms.ops.assign(weight, weight * 1.5)


CONFIG: dict[str, Any] = {
    "training": {"steps": STEPS, "local_batch_size": BATCH, "global_batch_size": BATCH},
    "checkpoint": {"enable_save": False},
    "lr_scheduler": {"type": "ConstantWarmUpLR"},
    "optimizer": {"type": "AdamW"},
    "model": {"model_type": "tiny", "architectures": "Tiny"},
    "train_dataset": {"dataloader": {"type": "Tiny"}},
}


def train(
    extra: Sequence[Any] = (), listed: Sequence[dict[str, Any]] = (), broken: bool = False, leaves_out: str = ""
) -> Watch:
    ms.set_seed(11)
    model = Model()
    optimizer = nn.AdamWeightDecay([p for p in model.trainable_params() if p.name != leaves_out], 1e-2)
    watch = Watch()
    data = GeneratorDataset(Data(broken), ["x", "y"], shuffle=False).batch(BATCH)
    schedule = nn.learning_rate_schedule.PolynomialDecayLR(1e-2, 1e-3, 10, 1.0)
    trainer = Trainer(
        config={**CONFIG, "callbacks": list(listed)},
        model=model,
        train_dataset=data,
        optimizer=optimizer,
        lr_scheduler=schedule,
        callbacks=[watch, *extra],
        compute_loss_func=None,
    )
    trainer.callback_handler.remove_callback(LossCallback)
    trainer.train()
    return watch


def grave(callback: ProbeCallback) -> list[Any]:
    return [[f.rule, f.step, f.site.name if f.site else None, f.message] for f in callback.findings if f.severity != "info"]


def main(folder: str) -> None:
    ms.set_device("CPU")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    plan = {
        "level": "L0",
        "monitor": {"optimizer_state": True},
        "audit": {"every": 1},
        "sinks": ["dump", "jsonl"],
        "on_error": "raise",
        "stacks": False,
    }
    bare = train()
    given = ProbeCallback({**plan, "output": f"{folder}/given"})
    on = train([given])
    listed = train(listed=[{"type": "ProbeCallback", "plan": {**plan, "output": f"{folder}/listed"}}])
    bad = ProbeCallback({**plan, "level": "off", "output": f"{folder}/broken"})
    broken = train([bad], broken=True)
    bare_broken = train(broken=True)
    lost = ProbeCallback({**plan, "level": "off", "output": f"{folder}/lost"})
    train([lost], leaves_out="down.weight")
    train([ProbeCallback(f"{folder}/plan.yaml"), Writes()])
    attach_to_script({**plan, "level": "off", "output": f"{folder}/unedited"})
    unedited = train()
    told = {
        "equal": [
            bare.held == on.held == listed.held == unedited.held and bare.reports == on.reports,
            broken.held == bare_broken.held,
        ],
        "reports": on.reports,
        "broken": broken.reports,
        "findings": grave(bad),
        "quiet": grave(given),
        "lost": grave(lost),
        "restored": nn.Cell.__call__.__module__,
    }
    print("\n" + json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
