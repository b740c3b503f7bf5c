"""`resume-check` on the resumes of real frameworks: right ones are right, and what was not brought back is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.launch import launch
from trainprobe.again.conditions.resume import compared, held_by, judge


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    launch(Path(__file__).with_name("train_over_ranks.py"), 2, str(folder), "-", "3")
    return folder


@pytest.mark.parametrize("lost", ["", "moments", "step counters"])
def test_a_run_of_two_ranks_is_resumed_on_one(on_two_ranks: Path, tmp_path: Path, lost: str) -> None:
    launch(Path(__file__).with_name("train_over_ranks.py"), 1, str(tmp_path), str(on_two_ranks / "2"), "3", lost)
    verdict = judge(held_by(compared(on_two_ranks / "3", tmp_path / "3")))
    assert verdict.code in ((2,) if lost else (0, 1)), verdict
    assert not lost or verdict.sentence.startswith(f"the resume is wrong: {lost}: "), verdict


@pytest.mark.parametrize(
    ("at", "lost"),
    [(4, ""), (4, "moments"), (2, "learning rates"), (2, "weights, or the random states, which neither state holds")],
)
def test_lightnings_own_resume(tmp_path: Path, at: int, lost: str) -> None:
    """After four batches an epoch ends: a resume there counts the epochs that it has begun otherwise than the run before.

    Amid an epoch Lightning begins the data anew, and warns of it: what it saves says the same of both.
    """
    lightning: Any = pytest.importorskip("lightning.pytorch")

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7), "interval": "step"}]

    def fit(folder: Path, start: Path | None = None) -> None:
        torch.manual_seed(3)
        rows = torch.utils.data.TensorDataset(torch.randn(32, 8, generator=torch.Generator().manual_seed(1)))
        saving = lightning.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(max_steps=at + 1, accelerator="cpu", default_root_dir=folder, callbacks=[saving], **quiet)
        trainer.fit(Net(), torch.utils.data.DataLoader(rows, 8), ckpt_path=start, weights_only=False)

    fit(tmp_path / "straight")
    state = torch.load(tmp_path / f"straight/step={at}.ckpt", weights_only=False)
    for one in state["optimizer_states"][0]["state"].values() if lost == "moments" else ():
        one["exp_avg"].zero_()
    if lost == "learning rates":
        state["lr_schedulers"][0] |= {"last_epoch": 0, "_last_lr": [1e-2]}
        state["optimizer_states"][0]["param_groups"][0]["lr"] = 1e-2
    torch.save(state, tmp_path / "start.ckpt")
    fit(tmp_path / "resumed", tmp_path / "start.ckpt")
    verdict = judge(held_by(compared(*(tmp_path / f"{name}/step={at + 1}.ckpt" for name in ("straight", "resumed")))))
    assert verdict.code == (2 if lost else 0), verdict
    assert not lost or verdict.sentence.startswith(f"the resume is wrong: {lost}: "), verdict
