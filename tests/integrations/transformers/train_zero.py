"""One rank of trainings in which DeepSpeed works beneath the Hugging Face Trainer and beneath Lightning; leaves JSON.

train_zero.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from lightning.pytorch.strategies import deepspeed as lightning_deepspeed

from tests.integrations.lightning import small_lightning
from tests.integrations.transformers import small_trainer
from tests.integrations.transformers.small_trainer import CLIP
from trainprobe.integrations.lightning import ProbeCallback as LightningProbe
from trainprobe.integrations.transformers import ProbeCallback

RANK = int(os.environ["RANK"])
PLAN = {"level": "off", "monitor": {"optimizer_state": True}}
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
lightning_deepspeed._validate_device_index_selection = lambda devices: None


class OnCpu(lightning_deepspeed.DeepSpeedStrategy):
    """The strategy without its checks for a GPU."""

    def setup_environment(self):
        super(lightning_deepspeed.DeepSpeedStrategy, self).setup_environment()

    def _setup_model_and_optimizer(self, model, optimizer, lr_scheduler=None):
        parameters = [p for p in model.parameters() if p.requires_grad]
        engine, optimizer, *_ = deepspeed.initialize(
            config=self.config, model=model, optimizer=optimizer, lr_scheduler=lr_scheduler, model_parameters=parameters,
            dist_init_required=False,
        )  # fmt: skip
        return engine, optimizer


def settings(stage: int) -> dict:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"zero_optimization": zero, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


def trainer(folder: Path, stage: int, callbacks: list) -> list[float]:
    given = settings(stage) | dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
    )
    run = small_trainer.train(
        folder / "hf", callbacks, accumulate=2, clip=CLIP, ranks=2, drop=0.0, deepspeed=given, optim="adamw_torch"
    )
    return [float(loss) for loss in run.model.losses]


def lightning(stage: int, callbacks: list, net: torch.nn.Module | None = None) -> list[float]:
    model = small_lightning.module(drop=0.0, quiet=True)
    if net is not None:
        model.net = net
    strategy = OnCpu(config={**settings(stage), "train_micro_batch_size_per_gpu": 4}, process_group_backend="gloo")
    run = small_lightning.trainer(
        callbacks,
        strategy=strategy,
        devices=2,
        use_distributed_sampler=False,
        accumulate_grad_batches=2,
        gradient_clip_val=CLIP,
    )
    run.fit(model, small_lightning.loader(rank=RANK))
    return [float(loss) for loss in model.losses]


class Mixed(torch.nn.Module):
    """Two experts on each rank; that of number 2 breaks in the second step."""

    def __init__(self) -> None:
        super().__init__()
        room = {"capacity_factor": 4, "eval_capacity_factor": 4, "use_rts": False}
        self.first, self.second = torch.nn.Linear(6, 12), torch.nn.Linear(12, 1)
        self.moe = MoE(12, torch.nn.Linear(12, 12), 4, ep_size=2, **room)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if RANK == 1 and self.calls == 3:
            with torch.no_grad():
                self.moe.deepspeed_moe.experts.deepspeed_experts[0].bias.fill_(float("nan"))
        hidden = torch.tanh(self.first(x))
        return self.second(hidden + self.moe(hidden)[0]).square().mean()


def main(folder: Path) -> None:
    told: dict[str, object] = {}
    for stage in (2, 3):
        bare = trainer(folder, stage, [])
        told[f"hf{stage} same"] = bare == trainer(folder, stage, [ProbeCallback(PLAN, output=folder / f"hf{stage}")])
    bare = lightning(2, [])
    told["lightning2 same"] = bare == lightning(2, [LightningProbe(PLAN, output=folder / "lightning2")])
    probe = LightningProbe({"level": "off", "monitor": {"activations": True}}, output=folder / "experts")
    lightning(0, [probe], Mixed())
    told["experts"] = [[found.rule, found.step, found.site.name if found.site else None] for found in probe.findings]
    (folder / f"rank{RANK}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
