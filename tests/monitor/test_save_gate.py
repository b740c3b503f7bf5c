"""A state that is saved while an error stands is flagged or refused, by whatever saves it; a sound one is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainprobe
from trainprobe.errors import PlanError, StopTraining


def train(folder: Path, plan: dict[str, Any], lost_at: int | None, save: Any = None) -> Any:
    """Train six steps and save after each; from `lost_at` on the weights are NaN. Return the probe."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    made = {"output": folder / "run", "console": False, "monitor": True, **plan}
    with trainprobe.watch(model, optimizer, made) as probe:
        for step in range(6):
            with probe.step():
                optimizer.zero_grad()
                scale = float("nan") if step == lost_at else 1.0
                (model(torch.randn(4, 4)).square().mean() * scale).backward()
                optimizer.step()
            (save or torch.save)(model.state_dict(), folder / f"{step}.pt")
    return probe


def gate(probe: Any) -> list[str]:
    return [f.message for f in probe.findings if f.rule == "save_gate"]


def test_a_save_beside_an_error_is_flagged_once_and_made(tmp_path: Path):
    before = torch.save
    assert gate(train(tmp_path, {"save_gate": True}, 3)) == ["save while an error stands: nonfinite (step 3)"]
    assert len(list(tmp_path.glob("*.pt"))) == 6
    assert torch.save is before


def test_a_refused_save_writes_nothing_and_those_before_are_there(tmp_path: Path):
    with pytest.raises(StopTraining, match=r"save was refused while an error stands: nonfinite \(step 3\): the first NaN"):
        train(tmp_path, {"save_gate": {"save": "refuse"}}, 3)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["0.pt", "1.pt", "2.pt"]


def test_a_sound_training_saves_as_without_it(tmp_path: Path):
    assert gate(train(tmp_path, {"save_gate": {"save": "refuse"}}, None)) == []
    assert len(list(tmp_path.glob("*.pt"))) == 6


def test_torchs_own_distributed_saves_are_seen_once(tmp_path: Path):
    import torch.distributed.checkpoint as dcp

    def save(state: Any, path: Path) -> None:
        dcp.save(state, checkpoint_id=path.with_suffix(""), no_dist=True)

    assert gate(train(tmp_path, {"save_gate": True}, 3, save)) == ["save while an error stands: nonfinite (step 3)"]


@pytest.mark.parametrize("refuse", [False, True])
def test_the_trainer_of_hugging_face(tmp_path: Path, refuse: bool):
    import transformers

    from trainprobe.integrations.transformers import ProbeCallback

    sizes = {"vocab_size": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "bos_token_id": 1, "eos_token_id": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight[0, 0] = torch.nan
    rows = [{"input_ids": x, "labels": x} for x in torch.randint(0, 16, (8, 8))]
    plan = {
        "output": tmp_path / "run",
        "console": False,
        "monitor": True,
        "save_gate": {"save": "refuse" if refuse else "flag"},
    }
    callback = ProbeCallback(plan)
    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"), per_device_train_batch_size=2, max_steps=3, save_steps=2, report_to="none", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[callback])
    if refuse:
        with pytest.raises(StopTraining, match=r"Trainer\._save_checkpoint was refused"):
            trainer.train()
        callback.session.end()  # a training that an exception ended is open until the process ends
        assert not list((tmp_path / "out").glob("checkpoint-*"))
    else:
        trainer.train()
        assert [f.message for f in callback.findings if f.rule == "save_gate"] == [
            "Trainer._save_checkpoint while an error stands: nonfinite (step 1)"
        ]


def test_lightning(tmp_path: Path):
    import lightning

    from trainprobe.integrations.lightning import ProbeCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(batch).square().mean() * (torch.nan if index == 2 else 1.0)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    callback = ProbeCallback({"output": tmp_path / "run", "console": False, "monitor": True, "save_gate": {"save": "refuse"}})
    keeps = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path / "out", every_n_train_steps=2, save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_steps=4, callbacks=[callback, keeps], **quiet)
    with pytest.raises(StopTraining, match=r"Trainer\.save_checkpoint was refused while an error stands: nonfinite \(step 2\)"):
        trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(8, 4)))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["epoch=0-step=2.ckpt"]


def test_accelerate_writes_nothing_of_a_refused_state(tmp_path: Path):
    """Its weights are written by safetensors, before torch saves anything."""
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)

    def save(state: Any, path: Path) -> None:
        accelerator.save_state(str(path.with_suffix("")))

    accelerator.prepare(nn.Linear(2, 2))
    with pytest.raises(StopTraining, match=r"Accelerator\.save_state was refused while an error stands: nonfinite"):
        train(tmp_path, {"save_gate": {"save": "refuse"}}, 3, save)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "run") == ["0", "1", "2"]


def test_where_nothing_judges_the_plan_is_refused(tmp_path: Path):
    with pytest.raises(PlanError, match="save_gate waits for a finding, and nothing judges"):
        trainprobe.Probe({"output": tmp_path, "save_gate": True})
