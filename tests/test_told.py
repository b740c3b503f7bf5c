"""What a script tells other tools becomes scalars of the step; the other tool gets what it would get without us."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from torch import nn
from torch.utils.tensorboard.writer import SummaryWriter

import trainprobe
from trainprobe.engine.core.records import TOLD
from trainprobe.engine.storage.dumps.log import read_log
from trainprobe.integrations import torch_loop

STEPS = 4
Tell = Callable[[int, torch.Tensor], Any]


def train(output: Path | None, tell: Tell, after: Tell | None = None, steps: int = STEPS, **plan: Any) -> list[torch.Tensor]:
    """Train with or without a probe, tell something in each step and behind it, and return the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    def one(step: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(6, 4)).square().mean()
        loss.backward()
        tell(step, loss)
        optimizer.step()
        return loss

    if output is None:
        for step in range(steps):
            loss = one(step)
            if after is not None:
                after(step, loss)
        return list(model.parameters())
    with trainprobe.watch(model, optimizer, output=output, console=False, **plan) as probe:
        for step in range(steps):
            with probe.step(step):
                loss = one(step)
            if after is not None:
                after(step, loss)
        assert [f for f in probe.findings if f.severity != "info"] == []
    return list(model.parameters())


def told(folder: Path) -> list[dict[str, float]]:
    """Return the told scalars of each recorded step."""
    return [{name: x for name, x in step.scalars.items() if name.startswith(TOLD)} for step in read_log(folder)]


def events(folder: Path) -> list[tuple[int, bytes]]:
    """Return what an event file of TensorBoard holds, but for the times."""
    (file,) = folder.rglob("events.out.*")
    found = [Event.FromString(raw) for raw in RawEventFileLoader(str(file)).Load()]
    return [(event.step, event.summary.SerializeToString()) for event in found]


def test_what_a_summary_writer_is_given_is_recorded_of_the_step_in_which_or_behind_which_it_was_told(tmp_path):
    def scalars(name: str) -> tuple[Tell, Tell, SummaryWriter]:
        writer = SummaryWriter(str(tmp_path / name))

        def within(step: int, loss: torch.Tensor) -> None:
            writer.add_scalar("train/loss", loss, step)
            writer.add_histogram("weights", torch.arange(3.0), step)

        def behind(step: int, loss: torch.Tensor) -> None:
            writer.add_scalar("reward", float(step), step)
            writer.add_scalar(tag="lr", scalar_value=torch.tensor(0.5), global_step=step)

        return within, behind, writer

    runs = {}
    for name, output, plan in (
        ("none", None, {}),
        ("kept", tmp_path / "kept_run", {"audit": {"every": 2}, "monitor": True}),  # audited steps are judged at once
        ("off", tmp_path / "off_run", {"told": False}),
    ):
        within, behind, writer = scalars(name)
        runs[name] = train(output, within, behind, **plan)
        writer.close()
    assert told(tmp_path / "kept_run") == [
        {"told/train/loss": pytest.approx(dict(s)["told/train/loss"]), "told/reward": float(i), "told/lr": 0.5}
        for i, s in enumerate(told(tmp_path / "kept_run"))
    ]
    losses = [
        s.tensor.float_val[0] if s.HasField("tensor") else s.simple_value for s in _values(tmp_path / "kept", "train/loss")
    ]
    assert [step["told/train/loss"] for step in told(tmp_path / "kept_run")] == losses
    assert told(tmp_path / "off_run") == [{}] * STEPS
    assert events(tmp_path / "none") == events(tmp_path / "kept") == events(tmp_path / "off")
    for name in ("kept", "off"):
        assert all(torch.equal(mine, other) for mine, other in zip(runs["none"], runs[name], strict=True))
    assert not hasattr(SummaryWriter.add_scalar, "ended"), "the writer has its own method again"


def _values(folder: Path, tag: str) -> list[Any]:
    (file,) = folder.rglob("events.out.*")
    found = [Event.FromString(raw) for raw in RawEventFileLoader(str(file)).Load()]
    return [value for event in found for value in event.summary.value if value.tag == tag]


def test_a_rule_judges_what_is_told_behind_the_step(tmp_path):
    writer = SummaryWriter(str(tmp_path / "events"))
    found: list[trainprobe.Finding] = []
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with trainprobe.watch(model, optimizer, output=tmp_path / "run", console=False, audit=False) as probe:
        for step in range(STEPS):
            with probe.step(step):
                optimizer.zero_grad()
                model(torch.randn(6, 4)).square().mean().backward()
                optimizer.step()
            writer.add_scalar("loss", float("nan") if step == 2 else 1.0, step)
        probe.settle()
        found += probe.findings
    writer.close()
    assert [(f.rule, f.step) for f in found if f.severity == "error"] == [("nonfinite", 2)]


def test_a_loop_that_is_not_edited_tells_behind_its_steps(tmp_path):
    writer = SummaryWriter(str(tmp_path / "events"))
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loop = torch_loop.attach(model, optimizer, output=tmp_path / "run", console=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 4)).square().mean()
        loss.backward()
        optimizer.step()
        writer.add_scalars("all", {"loss": loss.item(), "step": step}, step)
    loop.close()
    writer.close()
    assert [step["told/all/step"] for step in told(tmp_path / "run")] == [0, 1, 2, 3]
    assert [step.scalars["loss"] for step in read_log(tmp_path / "run")] == [
        step["told/all/loss"] for step in told(tmp_path / "run")
    ]


def test_other_threads_strings_and_more_names_than_fit_are_left_out(tmp_path):
    writer = SummaryWriter(str(tmp_path / "events"))

    def within(step: int, loss: torch.Tensor) -> None:
        beside = threading.Thread(target=lambda: writer.add_scalar("other", 1.0, step))
        beside.start()
        beside.join()
        for i in range(100):
            writer.add_scalar(f"{step}_{i}", 1.0, step)

    train(tmp_path / "run", within)
    writer.close()
    steps = told(tmp_path / "run")
    assert [len(step) for step in steps] == [100, 100, 56, 0]
    assert all("told/other" not in step for step in steps)


def test_accelerate_and_the_trackers_that_it_calls_tell(tmp_path):
    from accelerate import Accelerator

    weights = {}
    for name, output, plan in (("none", None, {}), ("kept", tmp_path / "kept", {}), ("off", tmp_path / "off", {"told": False})):
        accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path / "events" / name)
        accelerator.init_trackers("mine")
        tell = partial(lambda log, step, loss: log({"loss": loss.item(), "note": "text"}, step=step), accelerator.log)
        weights[name] = train(output, tell, **plan)
        accelerator.end_training()
    assert [list(step) for step in told(tmp_path / "kept")] == [["told/loss"]] * STEPS
    assert told(tmp_path / "off") == [{}] * STEPS
    shown = [events(tmp_path / "events" / name) for name in weights]
    assert len(shown[0]) > STEPS and shown[0] == shown[1] == shown[2]
    assert all(torch.equal(*pair) for name in ("kept", "off") for pair in zip(weights["none"], weights[name], strict=True))


def test_what_a_trainer_of_hugging_face_logs_beside_its_loss_is_told(tmp_path):
    from transformers import Trainer, TrainingArguments

    from trainprobe.integrations.transformers import ProbeCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(x).square().mean()}

    class Theirs(Trainer):
        def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            super().log({**logs, "reward": 2.0 * self.state.global_step}, *args, **kwargs)

    def trained(name: str, *callbacks: Any) -> tuple[Any, list[torch.Tensor]]:
        torch.manual_seed(0)
        arguments = TrainingArguments(
            str(tmp_path / name), max_steps=STEPS, logging_steps=1, use_cpu=True, report_to=[], save_strategy="no"
        )
        data = [{"x": torch.full((4,), float(i))} for i in range(8 * STEPS)]
        trainer = Theirs(Model(), arguments, train_dataset=data, callbacks=list(callbacks))
        trainer.train()
        timed = ("train_runtime", "train_samples_per_second", "train_steps_per_second")
        history = [{key: x for key, x in entry.items() if key not in timed} for entry in trainer.state.log_history]
        return history, list(trainer.model.parameters())

    plans = {"kept": {}, "off": {"told": False}}
    runs = {n: trained(n, ProbeCallback(output=tmp_path / f"{n}_run", console=False, **plan)) for n, plan in plans.items()}
    history, weights = trained("none")
    assert [step["told/reward"] for step in told(tmp_path / "kept_run")] == [2.0, 4.0, 6.0, 8.0]
    assert told(tmp_path / "off_run") == [{}] * STEPS
    for their_history, their_weights in runs.values():
        assert their_history == history
        assert all(map(torch.equal, weights, their_weights))


def test_a_module_of_lightning_tells_by_its_own_log(tmp_path):
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    from trainprobe.integrations.lightning import ProbeCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.layer(batch).square().mean()
            self.log("train_loss", loss)
            self.log_dict({"index": float(index)})
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    def trained(*callbacks: Any) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        torch.manual_seed(0)
        trainer = pl.Trainer(
            max_steps=STEPS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            callbacks=list(callbacks),
        )
        model = Module()
        trainer.fit(model, DataLoader(torch.randn(STEPS, 4), batch_size=1, num_workers=0))
        return trainer.logged_metrics, list(model.parameters())

    kept = trained(ProbeCallback(output=tmp_path / "run", console=False))
    off = trained(ProbeCallback(output=tmp_path / "off", console=False, told=False))
    bare = trained()
    for metrics, weights in (kept, off):
        assert {name: metrics[name] for name in bare[0]} == bare[0]
        assert all(map(torch.equal, weights, bare[1]))
    assert told(tmp_path / "off") == [{}] * STEPS
    steps = list(read_log(tmp_path / "run"))
    assert [step.scalars["told/index"] for step in steps] == [0, 1, 2, 3]
    assert [step.scalars["told/train_loss"] for step in steps] == [step.scalars["loss"] for step in steps]


def test_names_that_are_told_behind_some_steps_alone_keep_their_own_numbers(tmp_path):
    names = [("a", "b"), ("c",), (), ("b", "a", "d"), ("e",), ("a", "b"), ("d",), ()]
    writer = SummaryWriter(str(tmp_path / "events"))

    def behind(step: int, loss: torch.Tensor) -> None:
        for name in names[step % len(names)]:
            writer.add_scalar(name, 100 * step + ord(name), step)

    train(tmp_path / "out", lambda step, loss: None, behind, steps=4 * len(names))
    found = told(tmp_path / "out")
    assert len(found) == 4 * len(names)
    for step, scalars in enumerate(found):
        assert scalars == {TOLD + name: 100 * step + ord(name) for name in names[step % len(names)]}
