"""Logs that other tools wrote, by their own writers: each number is read at its step, and judged as a run's own."""

from __future__ import annotations

import csv
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainprobe.cli import main
from trainprobe.errors import FormatError
from trainprobe.monitor.looked_at import OF_TENSORS
from trainprobe.monitor.plan import make_rules
from trainprobe.monitor.rules import load_rule, rule_names
from trainprobe.monitor.run_folder import read_frames
from trainprobe.monitor.scalar_logs import read_scalar_log
from trainprobe.monitor.scalar_names import role_of
from trainprobe.monitor.watcher import Watcher

STEPS, SPIKE = 300, 250


def losses(spike: bool = True) -> list[float]:
    chance = random.Random(3)
    return [2 * math.exp(-i / 50) + 0.3 + chance.gauss(0, 0.02) + (4.0 if spike and i == SPIKE else 0.0) for i in range(STEPS)]


def read(path: Path) -> dict[int, dict[str, float]]:
    return {frame.step: dict(frame.scalars) for frame in read_frames(path)}


def event_files(folder: Path, numbers: list[float], **more: Any) -> Path:
    from torch.utils.tensorboard.writer import SummaryWriter

    with SummaryWriter(str(folder), **more) as writer:
        for step, loss in enumerate(numbers, more.get("purge_step", 0)):
            writer.add_scalar("train/loss", loss, step)
    return folder


def json_lines(file: Path, numbers: list[float]) -> Path:
    rows = [{"config": {"lr": 0.1}}, *({"step": 10 * i, "train": {"loss": loss}, "ok": True} for i, loss in enumerate(numbers))]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def test_event_files_of_pytorch_give_each_scalar_at_its_step(require, tmp_path):
    require("tensorboard")
    folder = event_files(tmp_path / "run", losses())
    got = read(folder)
    assert got == {i: {"train/loss": pytest.approx(loss, rel=1e-6)} for i, loss in enumerate(losses())}


def test_a_run_that_was_resumed_with_purge_step_replaces_what_was_behind_it(require, tmp_path):
    require("tensorboard")
    event_files(tmp_path, [1.0] * 10)
    event_files(tmp_path, [2.0] * 3, purge_step=4, filename_suffix=".z")
    assert [row["train/loss"] for row in read(tmp_path).values()] == [1.0] * 4 + [2.0] * 3


def test_add_scalars_is_one_run_with_the_folders_in_the_names(require, tmp_path):
    require("tensorboard")
    from torch.utils.tensorboard.writer import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("loss", 3.0, 0)
        writer.add_scalars("split", {"a": 1.0, "b": 2.0}, 0)
        writer.add_histogram("weights", torch.randn(10), 0)
        writer.add_text("note", "words", 0)
    assert read(tmp_path) == {0: {"loss": 3.0, "split_a/split": 1.0, "split_b/split": 2.0}}


def test_event_files_with_tensors_as_tensorflow_2_writes_them_are_read(require, tmp_path):
    require("tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.scalar.summary import scalar_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path))
    writer.add_event(Event(step=7, summary=scalar_pb("loss", 2.5)))
    writer.add_event(Event(step=8, summary=Summary(value=[Summary.Value(tag="loss", simple_value=1.5)])))
    writer.close()
    assert read(tmp_path) == {7: {"loss": 2.5}, 8: {"loss": 1.5}}


def test_the_state_of_a_real_hugging_face_trainer_is_its_log(require, tmp_path):
    require("transformers")
    from transformers import Trainer, TrainingArguments

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(x).square().mean()}

    arguments = TrainingArguments(
        str(tmp_path), max_steps=6, logging_steps=1, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    trainer = Trainer(Net(), arguments, train_dataset=[{"x": torch.randn(4)} for _ in range(64)])  # type: ignore[arg-type]
    trainer.train()
    wanted = {row["step"]: row for row in trainer.state.log_history if "train_runtime" not in row}
    got = read(tmp_path)  # the state of the last checkpoint, of three
    assert list(got) == [1, 2, 3, 4, 5, 6]
    for step, row in got.items():
        assert row == {name: wanted[step][name] for name in ("loss", "grad_norm", "learning_rate")}


def test_the_csv_of_a_real_lightning_training_is_joined_by_step(require, tmp_path):
    pl = require("lightning.pytorch")
    from lightning.pytorch.loggers import CSVLogger

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.seen = nn.Linear(4, 1), []

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss = self.layer(batch).square().mean()
            self.log("train_loss", loss)
            self.log("twice", 2 * loss, on_step=True, on_epoch=True)
            self.seen.append(float(loss.detach()))
            return loss

        def validation_step(self, batch: torch.Tensor, _: int) -> None:
            self.log("val_loss", self.layer(batch).square().mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    net, data = Net(), torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=2)  # type: ignore[arg-type]
    logger = CSVLogger(str(tmp_path))
    pl.Trainer(
        max_epochs=2, log_every_n_steps=1, logger=logger, enable_progress_bar=False, accelerator="cpu",
        enable_checkpointing=False, enable_model_summary=False, num_sanity_val_steps=0,
    ).fit(net, data, data)  # fmt: skip
    got = read(tmp_path)
    assert [got[step]["train_loss"] for step in range(12)] == pytest.approx(net.seen)
    assert {"twice_step", "twice_epoch", "val_loss", "train_loss"} == got[5].keys()


def test_json_lines_are_read_with_nested_names_and_without_lines_that_tell_no_step(tmp_path):
    got = read(json_lines(tmp_path / "log.jsonl", [1.0, float("nan")]))
    assert got == {0: {"train/loss": 1.0}, 10: {"train/loss": pytest.approx(math.nan, nan_ok=True)}}


def test_a_csv_of_epochs_is_read_by_epoch(tmp_path):
    with (tmp_path / "history.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["epoch", " loss", "note"], [0, 2.5, "a"], [1, "", "b"], [2, 1.5, "c"]])
    assert read(tmp_path) == {0: {"loss": 2.5}, 2: {"loss": 1.5}}


@pytest.mark.parametrize("form", ["event files", "JSON lines", "CSV"])
@pytest.mark.parametrize("spike", [True, False])
def test_a_spike_is_found_at_its_step_and_a_healthy_run_is_none(require, tmp_path, capsys, form, spike):
    if form == "event files":
        require("tensorboard")
        event_files(tmp_path, losses(spike))
    elif form == "JSON lines":
        json_lines(tmp_path / "log.jsonl", losses(spike))
    else:
        (tmp_path / "metrics.csv").write_text("step,loss\n" + "".join(f"{i},{x}\n" for i, x in enumerate(losses(spike))))
    code = main(["judge", str(tmp_path), "--json"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    step = SPIKE * (10 if form == "JSON lines" else 1)
    assert (code, [(f["rule"], f["step"]) for f in found]) == ((1, [("spike", step)]) if spike else (0, []))


def test_judge_says_which_rules_had_nothing_to_look_at(tmp_path, capsys):
    assert main(["judge", str(json_lines(tmp_path / "log.jsonl", losses(False)))]) == 0
    assert f"the rules {', '.join(OF_TENSORS)}, which look at tensors, had nothing to judge" in capsys.readouterr().out


def test_the_rules_that_look_at_tensors_alone_are_those_that_are_named(tmp_path):
    """Of scalars in which everything goes wrong, they find nothing; each other rule but those for settings of a plan does."""
    names = [name for name in rule_names() if load_rule(name).__name__.startswith("trainprobe.")]
    wild = [*losses(False)[:120], *([50.0] * 3), *(0.3 * 2**i for i in range(70)), float("nan")]
    rows = [
        {"step": i, "loss": x, "grad_norm": x, "lr": 0.1 * (1 + 9 * (i == 150)), "loss_scale": 65536 / 2 ** max(0, i - 100)}
        for i, x in enumerate(wild)
    ]
    file = tmp_path / "log.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    watcher = Watcher(make_rules({name: {"high": 10} if name == "threshold" else {} for name in names}))
    found = {finding.rule for frame in read_frames(file) for finding in watcher.judge(frame)}
    assert found.isdisjoint(OF_TENSORS) and set(OF_TENSORS) <= set(names)
    assert found >= {"loss_scale", "nonfinite", "spike", "threshold"}


def test_report_and_top_show_such_a_log(tmp_path, capsys):
    log = json_lines(tmp_path / "log.jsonl", losses())
    assert main(["report", str(log), "-o", str(tmp_path / "page.html")]) == 0
    assert "train/loss" in (tmp_path / "page.html").read_text()
    assert main(["top", str(log), "--once"]) == 0
    assert "train/loss" in capsys.readouterr().out


def test_of_two_runs_in_a_folder_one_must_be_named(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        json_lines(tmp_path / name / "log.jsonl", [1.0, 2.0])
    with pytest.raises(FormatError, match=r"holds 2 runs \(files of JSON lines.*Name one of them"):
        read_scalar_log(tmp_path)


def test_a_line_that_is_no_json_is_told_and_is_not_healthy(tmp_path, capsys):
    log = json_lines(tmp_path / "log.jsonl", losses(False))
    log.write_text(log.read_text() + "{broken\n")
    assert main(["judge", str(log)]) == 3
    assert "line 302" in capsys.readouterr().err


def _rows(file: Path, rows: list[dict[str, Any]], before: str = "") -> Path:
    file.write_text(before + "".join(f"{json.dumps(row)}\n" for row in rows))
    return file


ODD: dict[str, tuple[list[dict[str, Any]], str]] = {
    "a NaN before a resumed run": (
        [{"step": i, "loss": math.nan if i == 150 else x} for i, x in enumerate(losses(False)[:160])]
        + [{"step": i, "loss": x} for i, x in enumerate(losses(False)) if i >= 140],
        "'loss' of step 150 is nan, and",
    ),
    "each row is given one step": (
        [{"step": 0, "loss": x} for x in losses(False)],
        "'loss' has several numbers a step, in 299 rows",
    ),
    "a loss that turns null": (
        [{"step": i, "loss": x if i < 250 else None} for i, x in enumerate(losses(False))],
        "line 251: 'loss' turns null",
    ),
}


@pytest.mark.parametrize("odd", ODD)
def test_what_a_log_hides_of_a_run_is_told_and_is_not_healthy(tmp_path, capsys, odd):
    rows, sentence = ODD[odd]
    log = _rows(tmp_path / "log.jsonl", rows)
    assert main(["judge", str(log)]) == 3
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_a_resumed_run_and_an_evaluation_that_is_seldom_hide_nothing(tmp_path, capsys):
    usual = losses(False)
    rows = [{"step": i, "loss": x, "val_loss": x if i % 50 == 49 else None} for i, x in enumerate(usual[:200])]
    rows += [{"step": i, "loss": 1.001 * x} for i, x in enumerate(usual) if i >= 180]
    assert main(["judge", str(_rows(tmp_path / "log.jsonl", rows))]) == 0
    assert capsys.readouterr().err == ""


def test_the_ranks_that_write_one_file_are_told_apart(tmp_path, capsys):
    rows = [
        {"step": i, "rank": r, "loss": math.nan if (i, r) == (99, 0) else x}
        for i, x in enumerate(losses(False))
        for r in (0, 1)
    ]
    assert main(["judge", str(_rows(tmp_path / "log.jsonl", rows))]) == 1
    assert "the first NaN of step 99 is in rank0/loss" in " ".join(capsys.readouterr().out.split())


def test_a_log_behind_a_line_of_text_is_read(tmp_path, capsys):
    rows = [{"step": i, "loss": math.nan if i == 99 else x} for i, x in enumerate(losses(False))]
    assert main(["judge", str(_rows(tmp_path / "log.jsonl", rows, "INFO begins\n"))]) == 1
    assert "line 1, is left out" in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["cut off", "damaged", "two ranks"])
def test_what_event_files_hide_is_told_and_is_not_healthy(require, tmp_path, capsys, fault):
    require("tensorboard")
    bad = [math.nan if i == 250 else x for i, x in enumerate(losses(False))]
    folder = event_files(tmp_path / "run", bad, filename_suffix=".rank0")
    if fault == "two ranks":
        event_files(folder, losses(False), filename_suffix=".rank1")
    else:
        (file,) = folder.iterdir()
        data = bytearray(file.read_bytes())
        at = len(data) * 200 // STEPS
        data[at] ^= 1
        file.write_bytes(data[:at] if fault == "cut off" else data)
    assert main(["judge", str(folder)]) == 3
    told = "'train/loss' of step 250 is nan, and" if fault == "two ranks" else "bytes are left out"
    assert told in " ".join(capsys.readouterr().err.split())


def test_a_data_set_of_json_lines_is_no_log(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "step 3", "label": 1}\n' * 5)
    assert read_scalar_log(tmp_path) is None


@pytest.mark.parametrize("name", ["eval_loss", "val/loss", "test_loss", "train_loss_epoch", "Loss/validation"])
def test_the_loss_of_an_evaluation_or_an_epoch_is_not_the_loss_of_a_step(name):
    assert role_of(name) is None


@pytest.mark.parametrize("name", ["loss", "train/loss", "train_loss_step", "Loss/train"])
def test_the_loss_of_a_step_is_one(name):
    assert role_of(name) == "loss"
