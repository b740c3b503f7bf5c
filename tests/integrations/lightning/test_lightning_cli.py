"""The callback in a file of LightningCLI: `class_path: trainprobe.integrations.lightning.ProbeCallback`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from tests.integrations.lightning.small_lightning import loader, module, recorded


@pytest.mark.proves("Lightning", "class_path in a LightningCLI file")
def test_the_callback_is_named_in_a_file_of_lightning_cli(require, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("lightning")
    require("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    about = {"level": "off", "monitor": True, "sinks": ["parquet"], "output": str(tmp_path / "out")}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(about))
    callback = {
        "class_path": "trainprobe.integrations.lightning.ProbeCallback",
        "init_args": {"plan": str(tmp_path / "plan.yaml")},
    }
    trainer = {"callbacks": [callback], "max_steps": 3, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"trainer": {**trainer, "enable_progress_bar": False}}))
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(tmp_path / "config.yaml")])
    made = type(module())
    cli = LightningCLI(made, run=False, save_config_callback=None, seed_everything_default=False)
    cli.trainer.fit(cli.model, loader())
    assert list(recorded(tmp_path / "out")) == [0, 1, 2]
