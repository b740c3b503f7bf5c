"""Each integration as the README writes it, under the default plan: 60 steps and more, a schedule from zero, no warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.launch import launch
from tests.integrations.records import recorded
from trainprobe.engine.plan.defaults import default_plan

torch.set_num_threads(1)
pytestmark = pytest.mark.frameworks
STEPS, SAMPLES = 64, 512


def alarms(findings: Any) -> list[str]:
    return [f"{f.step} {f.rule}: {f.message}" for f in findings if f.severity != "info"]


class Net(nn.Module):
    """Two layers with dropout; returns its loss as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.norm, self.drop, self.second = nn.Linear(6, 12), nn.LayerNorm(12), nn.Dropout(0.1), nn.Linear(12, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.second(self.drop(torch.tanh(self.norm(self.first(x)))))
        return {"loss": nn.functional.cross_entropy(out, labels), "logits": out}


def samples() -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(11)
    points = [torch.randn(6, generator=made) for _ in range(SAMPLES)]
    return [{"x": x, "labels": (x.sum() > 0).long()} for x in points]


def warm_up(step: int) -> float:
    return min(1.0, step / 10)


# ---- Hugging Face Trainer


def trained(folder: Path, steps: int, resume: bool = False, **options: Any) -> list[str]:
    transformers = pytest.importorskip("transformers")
    from trainprobe.integrations.transformers import ProbeCallback

    arguments = {
        "output_dir": str(folder / "run"), "use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 5,
        "save_strategy": "steps", "save_steps": 43, "per_device_train_batch_size": 8, "learning_rate": 1e-2, "max_steps": steps,
        "warmup_steps": 10, "lr_scheduler_type": "cosine", "eval_strategy": "steps", "eval_steps": 20, "weight_decay": 0.1,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    data = samples()
    run = transformers.Trainer(
        model=Net(),
        args=transformers.TrainingArguments(**{**arguments, **options}),
        train_dataset=data,
        eval_dataset=data[:8],
        callbacks=[ProbeCallback(output=folder / "out", **default_plan())],
    )
    run.train(resume_from_checkpoint=resume)
    callback = next(c for c in run.callback_handler.callbacks if type(c).__name__ == "ProbeCallback")
    return alarms(callback.findings)


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}], ids=["plain", "micro", "bf16"])
def test_the_trainer_of_hugging_face(require, tmp_path, options):
    require("transformers")
    assert trained(tmp_path, STEPS, **options) == []


def test_the_trainer_of_hugging_face_resumed_at_an_odd_step(require, tmp_path):
    require("transformers")
    assert trained(tmp_path, 43) == []
    assert trained(tmp_path, 43 + STEPS, resume=True) == []


# ---- Lightning


def lightning_module(kind: str) -> Any:
    pl = pytest.importorskip("lightning.pytorch")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.net(**batch)["loss"]
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.net(**batch)["loss"])

        def configure_optimizers(self) -> Any:
            held = filter(lambda p: p.requires_grad, self.parameters())
            optimizer = torch.optim.AdamW(held, lr=1e-2, weight_decay=0.1)
            if kind == "thaws":
                return optimizer
            if kind == "one cycle":
                scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=4 * STEPS)
            else:
                scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return Module()


def fitted(folder: Path, kind: str, epochs: int, resume: Path | None = None, **options: Any) -> tuple[list[str], Any]:
    pl = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.callbacks import BackboneFinetuning

    from trainprobe.integrations.lightning import ProbeCallback

    module = lightning_module(kind)
    callback = ProbeCallback(output=folder / "out", **default_plan())
    others = []
    if kind == "thaws":
        module.backbone = module.net.first
        others = [BackboneFinetuning(unfreeze_backbone_at_epoch=1)]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(
        callbacks=[callback, *others],
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        num_sanity_val_steps=1,
        **quiet,
        **options,
    )
    loader = torch.utils.data.DataLoader(samples()[: 8 * 43], batch_size=8, shuffle=True)  # 43 steps an epoch
    held_out = torch.utils.data.DataLoader(samples()[:8], batch_size=8)
    trainer.fit(module, loader, held_out, ckpt_path=resume)
    return alarms(callback.findings), trainer


@pytest.mark.parametrize("kind", ["warm-up", "one cycle", "thaws"])
def test_lightning(require, tmp_path, kind):
    require("lightning")
    assert fitted(tmp_path, kind, 2, gradient_clip_val=0.5)[0] == []


def test_lightning_resumed_at_an_odd_step(require, tmp_path):
    require("lightning")
    found, trainer = fitted(tmp_path, "warm-up", 1)
    trainer.save_checkpoint(tmp_path / "last.ckpt", weights_only=False)
    assert (found, trainer.global_step) == ([], 43)
    assert fitted(tmp_path, "warm-up", 3, tmp_path / "last.ckpt")[0] == []


# ---- Accelerate: a plain loop


@pytest.mark.parametrize("first", [0, 1, 43])
def test_accelerate(require, tmp_path, first):
    require("accelerate")
    from accelerate import Accelerator

    from trainprobe.integrations.torch_loop import attach

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
    loader = torch.utils.data.DataLoader(samples(), batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    loop = attach(model, optimizer, first_step=first, output=tmp_path / "out", **default_plan())
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    found = alarms(loop.findings)
    loop.close()
    assert found == []


# ---- two ranks, each in a process of its own


@pytest.mark.parametrize("kind", ["ddp", "accelerate", "tensor parallel"])
def test_two_ranks(require, tmp_path, kind):
    if kind == "accelerate":
        require("accelerate")
    script = Path(__file__).parent / "train_two_ranks.py"
    launch(script, 2, str(tmp_path), kind, timeout=400)
    for rank in range(2):
        assert (tmp_path / f"alarms{rank}.txt").read_text() == ""
        assert list(recorded(tmp_path / "out", rank)) == [*range(64)]


# ---- DeepSpeed and Megatron-core, each in a process of its own


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "kinds"),
    [("deepspeed", "zero0 zero1 zero2 zero3 bf16 fp16 from43"), ("megatron.core", "0 1 43 fp16")],
    ids=["DeepSpeed", "Megatron-core"],
)
def test_engines(require, tmp_path, package, kinds):
    require(package)
    script = Path(__file__).parent / package.partition(".")[0] / "train_with_no_plan.py"
    for kind in kinds.split():
        (tmp_path / kind).mkdir()
        launch(script, 1, str(tmp_path / kind), kind, timeout=400)
        assert (tmp_path / kind / "alarms.txt").read_text() == "", kind
